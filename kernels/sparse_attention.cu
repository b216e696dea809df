// Decode attention over packed window rows and packed entries; contract in sglang_dsv4/ops/sparse_attention.py.
#include "dsv4/check.h"
#include "dsv4/attention_launch.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

// `entry_lens` may be empty. `partial` and `partial_stat` have room for `splits` results a query and head. `parts` > 0 takes the Hopper kernel, a
// cluster of that many blocks a query and `splits` groups of them; 0 takes the portable one, `splits` blocks a query.
void sparse_attention(TensorView q, TensorView window, TensorView window_rows, TensorView entries,
                      TensorView entry_rows, TensorView entry_lens, TensorView sink, TensorView rope, TensorView positions, TensorView out,
                      TensorView partial, TensorView partial_stat, double scale, int64_t parts, int64_t splits) {
  const DeviceGuard guard(q);
  AttentionParams<PackedRows> p = {};
  p.rows.window = make_pool<MainFp8>(window);
  p.rows.entries = make_pool<MainFp8>(entries);
  p.rows.window_rows = data_of<const void>(window_rows);
  p.rows.window_wide = window_rows.dtype().bits == 64;
  p.rows.window_stride = window_rows.stride(0);
  p.rows.entry_rows = data_of<const int32_t>(entry_rows);
  p.rows.entry_lens = entry_lens.size(0) > 0 ? data_of<const int32_t>(entry_lens) : nullptr;
  p.rows.entry_stride = entry_rows.stride(0);
  p.rows.num_entries = static_cast<int>(entry_rows.size(1));
  fill_attention(p, q, sink, rope, positions, out, partial, partial_stat, scale);
  launch_attention(out, p, static_cast<int>(parts), static_cast<int>(splits));
}

// How many clusters of `parts` blocks of the Hopper kernel run at once: less than the multiprocessors have room for, as a
// cluster stays within a part of the device.
int64_t hopper_clusters(TensorView anchor, int64_t parts) {
  const DeviceGuard guard(anchor);
  if (parts == 1) return multiprocessors();
  return clusters_at_once(hopper_shape(multiprocessors(), 1, static_cast<int>(parts), 1),
                                hopper::attention_kernel<PackedRows>);
}

// ---- FlashMLA leaves the output rotated ----

// A warp a query and head: lane l turns pair l of the last 64 channels.
__global__ void __launch_bounds__(256) derotate_kernel(__nv_bfloat16* __restrict__ out, const int64_t token_stride,
                                                       const float* __restrict__ rope, const int64_t rope_rows,
                                                       const int64_t* __restrict__ positions, const int heads,
                                                       const int64_t rows) {
  const int lane = threadIdx.x & 31;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 8 + (threadIdx.x >> 5);
  if (row >= rows) return;
  const int64_t token = row / heads, position = min(max(positions[token], int64_t{0}), rope_rows - 1);
  __nv_bfloat16* const at = out + token * token_stride + (row % heads) * kHeadDim + kNopeDim + 2 * lane;
  float2 pair = unpack_bf16(*reinterpret_cast<const unsigned*>(at));
  derotate(rope + kRopeDim * position, lane, pair.x, pair.y);
  *reinterpret_cast<unsigned*>(at) = pack_bf16(pair.x, pair.y);
}

void derotate_output(TensorView out, TensorView rope, TensorView positions) {
  const DeviceGuard guard(out);
  const int64_t rows = out.size(0) * out.size(1);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>((rows + 7) / 8));
  shape.block = dim3(256);
  launch(out, shape, derotate_kernel, data_of<__nv_bfloat16>(out), out.stride(0), data_of<const float>(rope),
         rope.size(0), data_of<const int64_t>(positions), static_cast<int>(out.size(1)), rows);
}

// Identity of the graph that the current stream is being captured into, 0 if none.
int64_t capture_id(TensorView anchor) {
  const DeviceGuard guard(anchor);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cuda_check(cudaStreamGetCaptureInfo(current_stream(anchor), &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? static_cast<int64_t>(id) : 0;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_attention, sparse_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(hopper_clusters, hopper_clusters);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(capture_id, capture_id);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(derotate, derotate_output);
