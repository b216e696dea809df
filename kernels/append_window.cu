// Quantises this step's K rows and stores them in each request's ring, and in the snapshots that are due; raw projections
// are normed and rotated first, or (norm_window) that alone. One warp a token, 16 channels a lane, the rotated ones in the
// last four lanes; contract in sglang_dsv4/ops/append_window.py.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kWarps = 4;

struct Norm {
  const void* weight;
  const float* rope;
  int64_t rope_stride;
  int64_t rope_positions;
  float eps;
  bool weight_is_bf16;
};

// RMS norm of a row that the warp holds, then rotation at `position`: float32 throughout, each product and sum of the
// reference rounded once. All 32 lanes must call it.
__device__ __forceinline__ void norm_and_rotate(const Norm& norm, int position, float (&x)[16], int lane) {
  float weight[16], turns[16];  // 8 cosines, 8 sines
  if (norm.weight_is_bf16) {
    load16(static_cast<const __nv_bfloat16*>(norm.weight) + 16 * lane, weight);
  } else {
    load16(static_cast<const float*>(norm.weight) + 16 * lane, weight);
  }
  const bool turned = lane >= kNopeLanes;
  if (turned) {
    const int64_t row = min(max(int64_t{position}, int64_t{0}), norm.rope_positions - 1);
    const float* table = norm.rope + row * norm.rope_stride + 8 * (lane - kNopeLanes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(table + (i / 2) * (kRopeDim / 2) + 4 * (i % 2));
      turns[4 * i] = v.x, turns[4 * i + 1] = v.y, turns[4 * i + 2] = v.z, turns[4 * i + 3] = v.w;
    }
  }
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i % 4] = fmaf(x[i], x[i], sums[i % 4]);
  float squares = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) squares += __shfl_xor_sync(kFullMask, squares, step);
  const float scale = __frcp_rn(__fsqrt_rn(fmaf(squares, 1.0f / kHeadDim, norm.eps)));
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], scale), weight[i]);
  if (!turned) return;
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const float even = x[2 * pair], odd = x[2 * pair + 1];
    x[2 * pair] = __fsub_rn(__fmul_rn(even, turns[pair]), __fmul_rn(odd, turns[8 + pair]));
    x[2 * pair + 1] = __fadd_rn(__fmul_rn(even, turns[8 + pair]), __fmul_rn(odd, turns[pair]));
  }
}

template <typename T, bool kNormed>
__global__ void __launch_bounds__(kWarps * 32)
    append_window_kernel(const __grid_constant__ StepMeta meta, const RowPool<MainFp8> window,
                         const T* __restrict__ kv, const int64_t kv_stride, const __grid_constant__ Norm norm) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x & 31;
  const int token = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (token >= meta.num_tokens) return;
  const int request = meta.request_of(token);
  if (request < 0) return;

  const int position = static_cast<int>(meta.positions[token]);
  const int ring_row = position % kWindow;
  const int64_t live_row = int64_t{meta.slots[request]} * kWindow + ring_row;
  // Older tokens of a long chunk would meet younger ones in a ring row: only the last 128 are stored.
  const bool live = position >= meta.seq_lens[request] - kWindow && window.contains(live_row);
  const int32_t* snapshot_slots = meta.snapshot_slots + request * meta.snapshot_stride;
  const int32_t* snapshot_lens = meta.snapshot_lens + request * meta.snapshot_stride;
  const auto snapshot_row = [&](int s) -> int64_t {
    const int slot = snapshot_slots[s], length = snapshot_lens[s];
    const bool due = slot >= 0 && position >= length - kWindow && position < length;
    return due ? int64_t{slot} * kWindow + ring_row : -1;
  };
  bool needed = live;
  for (int s = 0; s < meta.max_snapshots; ++s) needed |= snapshot_row(s) >= 0;
  if (!needed) return;

  float x[16];
  load16(kv + token * kv_stride + 16 * lane, x);
  if constexpr (kNormed) {
    norm_and_rotate(norm, position, x, lane);
    __syncwarp();
  }
  const MainLane row = encode_main(x, lane);
  const uint2 scales = main_scales(row);
  if (live) store_main(window, live_row, row, scales, lane);
  for (int s = 0; s < meta.max_snapshots; ++s) {
    const int64_t target = snapshot_row(s);
    if (window.contains(target)) store_main(window, target, row, scales, lane);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    norm_window_kernel(const T* __restrict__ kv, const int64_t kv_stride, const int64_t* __restrict__ positions,
                       float* __restrict__ out, const int tokens, const __grid_constant__ Norm norm) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x & 31;
  const int token = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (token >= tokens) return;
  float x[16];
  load16(kv + token * kv_stride + 16 * lane, x);
  norm_and_rotate(norm, static_cast<int>(positions[token]), x, lane);
  float4* const target = reinterpret_cast<float4*>(out + int64_t{token} * kHeadDim + 16 * lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) target[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

template <typename T, bool kNormed>
void launch_append(const TensorView& window, const TensorView& kv, const StepMeta& meta, const Norm& norm) {
  LaunchShape shape;
  shape.grid = dim3((meta.num_tokens + kWarps - 1) / kWarps);
  shape.block = dim3(kWarps * 32);
  shape.overlap = true;
  launch(kv, shape, append_window_kernel<T, kNormed>, meta, make_pool<MainFp8>(window), data_of<const T>(kv),
         kv.stride(0), norm);
}

void append_window(TensorView window, TensorView kv, DSV4_META_PARAMS) {
  const DeviceGuard guard(kv);
  const StepMeta meta = DSV4_META;
  if (is_bf16(kv)) {
    launch_append<__nv_bfloat16, false>(window, kv, meta, {});
  } else {
    launch_append<float, false>(window, kv, meta, {});
  }
}

Norm norm_of(const TensorView& weight, double eps, const TensorView& rope) {
  return {data_of<const void>(weight), data_of<const float>(rope), rope.stride(0), rope.size(0),
          static_cast<float>(eps), is_bf16(weight)};
}

void append_window_normed(TensorView window, TensorView kv, TensorView weight, double eps, TensorView rope,
                          DSV4_META_PARAMS) {
  const DeviceGuard guard(kv);
  const StepMeta meta = DSV4_META;
  const Norm norm = norm_of(weight, eps, rope);
  if (is_bf16(kv)) {
    launch_append<__nv_bfloat16, true>(window, kv, meta, norm);
  } else {
    launch_append<float, true>(window, kv, meta, norm);
  }
}

template <typename T>
void launch_norm(const TensorView& kv, const TensorView& positions, const TensorView& out, const Norm& norm) {
  const int tokens = static_cast<int>(kv.size(0));
  LaunchShape shape;
  shape.grid = dim3((tokens + kWarps - 1) / kWarps);
  shape.block = dim3(kWarps * 32);
  shape.overlap = true;
  launch(kv, shape, norm_window_kernel<T>, data_of<const T>(kv), kv.stride(0), data_of<const int64_t>(positions),
         data_of<float>(out), tokens, norm);
}

void norm_window(TensorView kv, TensorView weight, double eps, TensorView rope, TensorView positions, TensorView out) {
  const DeviceGuard guard(kv);
  const Norm norm = norm_of(weight, eps, rope);
  if (is_bf16(kv)) {
    launch_norm<__nv_bfloat16>(kv, positions, out, norm);
  } else {
    launch_norm<float>(kv, positions, out, norm);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_window, append_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_window, norm_window);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_window_normed, append_window_normed);
