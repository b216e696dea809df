// Quantises this step's K rows and stores them in each request's ring, and in the snapshots that are due.
// One warp a token; contract in sglang_dsv4/ops/append_window.py.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    append_window_kernel(const __grid_constant__ StepMeta meta, const RowPool<MainFp8> window,
                         const T* __restrict__ kv, const int64_t kv_stride) {
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
  const MainLane row = encode_main(x, lane);
  const uint2 scales = main_scales(row);
  if (live) store_main(window, live_row, row, scales, lane);
  for (int s = 0; s < meta.max_snapshots; ++s) {
    const int64_t target = snapshot_row(s);
    if (window.contains(target)) store_main(window, target, row, scales, lane);
  }
}

template <typename T>
void launch_append(const TensorView& window, const TensorView& kv, const StepMeta& meta) {
  LaunchShape shape;
  shape.grid = dim3((meta.num_tokens + kWarps - 1) / kWarps);
  shape.block = dim3(kWarps * 32);
  shape.overlap = true;
  launch(kv, shape, append_window_kernel<T>, meta, make_pool<MainFp8>(window), data_of<const T>(kv), kv.stride(0));
}

void append_window(TensorView window, TensorView kv, DSV4_META_PARAMS) {
  const DeviceGuard guard(kv);
  const StepMeta meta = DSV4_META;
  if (is_bf16(kv)) {
    launch_append<__nv_bfloat16>(window, kv, meta);
  } else {
    launch_append<float>(window, kv, meta);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_window, append_window);
