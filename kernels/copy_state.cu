// Copies whole slots in all layers; contract in sglang_dsv4/ops/copy_state.py.
//
// A fixed grid strides over (pair, tile) items: in a decode graph the number of due pairs is known on the device only,
// and most steps have none, so every CTA first looks at the list and leaves when it is empty.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 5;  // 16-byte loads that a thread has in flight
constexpr int kTile = kThreads * kVectors;
constexpr int kBlocksPerMultiprocessor = 6;

// One tensor [layers, slots, ...]: `vectors` 16-byte vectors a slot, cut into `tiles` of `tile_vectors`.
struct Planes {
  uint4* base;
  int64_t layer_stride;  // in vectors
  int64_t slot_stride;
  int layers;
  int vectors;
  int tiles;
  int tile_vectors;
};

__device__ __forceinline__ void copy_tile(const Planes& planes, int64_t from, int64_t to, int item) {
  const int layer = item / planes.tiles, begin = (item % planes.tiles) * planes.tile_vectors;
  const int end = min(begin + planes.tile_vectors, planes.vectors);
  const uint4* source = planes.base + layer * planes.layer_stride + from * planes.slot_stride;
  uint4* target = planes.base + layer * planes.layer_stride + to * planes.slot_stride;
  uint4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = begin + i * kThreads + static_cast<int>(threadIdx.x);
    if (at < end) v[i] = __ldcs(source + at);
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = begin + i * kThreads + static_cast<int>(threadIdx.x);
    if (at < end) __stcs(target + at, v[i]);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    copy_state_kernel(const __grid_constant__ Planes windows, const __grid_constant__ Planes overlaps,
                      const int64_t* __restrict__ src, const int64_t* __restrict__ dst, const int num_pairs,
                      const int64_t num_slots) {
  __shared__ int64_t pairs[kThreads][2];
  __shared__ int warp_counts[kThreads / 32];
  dsv4::grid_dependency_launch();
  dsv4::grid_dependency_wait();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int window_items = windows.layers * windows.tiles;
  const int items_per_pair = window_items + overlaps.layers * overlaps.tiles;

  for (int first = 0; first < num_pairs; first += kThreads) {
    int64_t from = -1, to = -1;
    if (first + thread < num_pairs) {
      from = src[first + thread];
      to = dst[first + thread];
    }
    const bool due = from >= 0 && to >= 0 && from < num_slots && to < num_slots;
    if (!__syncthreads_or(due)) continue;
    // Every CTA lists the due pairs in the same order, so that they agree on the items.
    const unsigned ballot = __ballot_sync(dsv4::kFullMask, due);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();
    int at = __popc(ballot & ((1u << lane) - 1)), count = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      at += w < warp ? warp_counts[w] : 0;
      count += warp_counts[w];
    }
    if (due) pairs[at][0] = from, pairs[at][1] = to;
    __syncthreads();
    for (int item = blockIdx.x; item < count * items_per_pair; item += gridDim.x) {
      const int pair = item / items_per_pair, part = item % items_per_pair;
      if (part < window_items) {
        copy_tile(windows, pairs[pair][0], pairs[pair][1], part);
      } else {
        copy_tile(overlaps, pairs[pair][0], pairs[pair][1], part - window_items);
      }
    }
    __syncthreads();
  }
}

Planes make_planes(const dsv4::TensorView& tensor, int64_t element_bytes) {
  int64_t slot_elements = 1;
  for (int d = 2; d < tensor.ndim(); ++d) slot_elements *= tensor.size(d);
  const int per_vector = static_cast<int>(sizeof(uint4) / element_bytes);
  Planes planes = {};
  planes.base = dsv4::data_of<uint4>(tensor);
  planes.layers = static_cast<int>(tensor.size(0));
  planes.layer_stride = tensor.stride(0) / per_vector;
  planes.slot_stride = tensor.stride(1) / per_vector;
  planes.vectors = static_cast<int>(slot_elements / per_vector);
  planes.tiles = (planes.vectors + kTile - 1) / kTile;
  planes.tile_vectors = planes.tiles ? (planes.vectors + planes.tiles - 1) / planes.tiles : 0;
  return planes;
}

void copy_state(dsv4::TensorView windows, dsv4::TensorView overlaps, dsv4::TensorView src, dsv4::TensorView dst) {
  const dsv4::DeviceGuard guard(windows);
  if (src.size(0) == 0) return;
  dsv4::LaunchShape shape;
  shape.grid = dim3(dsv4::multiprocessors() * kBlocksPerMultiprocessor);
  shape.block = dim3(kThreads);
  shape.overlap = true;
  dsv4::launch(windows, shape, copy_state_kernel, make_planes(windows, 1), make_planes(overlaps, 4),
               dsv4::data_of<const int64_t>(src), dsv4::data_of<const int64_t>(dst), static_cast<int>(src.size(0)),
               windows.size(1));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_state, copy_state);
