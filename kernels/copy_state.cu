// Copies whole slots in all layers; contract in sglang_dsv4/ops/copy_state.py.
//
// A fixed grid strides over (pair, tile) items: in a decode graph the number of due pairs is known on the device only,
// and most steps have none, so every CTA first looks at the list and leaves when it is empty.
//
// From compute capability 9.0 one thread drives the bulk copy engine through a ring of shared memory tiles; before
// that, all threads copy through registers.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"

namespace {

using namespace dsv4;

constexpr bool kBulk = DSV4_ARCH >= 90;
constexpr int kThreads = 256;
constexpr int kVectors = 5;                        // 16-byte vectors of a tile for each thread
constexpr int kTile = kThreads * kVectors;
// Tiles in the ring: compute capability 12 has 99 KB of shared memory for a block, the others 227.
constexpr bool kSmall = DSV4_ARCH >= 120;
constexpr int kStages = kSmall ? 4 : 5;
constexpr int kBlocksPerMultiprocessor = !kBulk ? 4 : kSmall ? 1 : 2;
constexpr size_t kRingBytes = kBulk ? sizeof(uint4) * kTile * kStages : 0;

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

struct Tile {
  const uint4* source;
  uint4* target;
  int vectors;
};

__device__ __forceinline__ Tile tile_of(const Planes& planes, int64_t from, int64_t to, int item) {
  const int layer = item / planes.tiles, begin = (item % planes.tiles) * planes.tile_vectors;
  uint4* base = planes.base + layer * planes.layer_stride + begin;
  return {base + from * planes.slot_stride, base + to * planes.slot_stride,
          min(planes.tile_vectors, planes.vectors - begin)};
}

// The items of one list of due pairs: every pair's window tiles, then its overlap tiles.
struct Items {
  const Planes& windows;
  const Planes& overlaps;
  const int64_t (*pairs)[2];

  __device__ __forceinline__ int per_pair() const {
    return windows.layers * windows.tiles + overlaps.layers * overlaps.tiles;
  }
  __device__ __forceinline__ Tile operator[](int item) const {
    const int window_items = windows.layers * windows.tiles;
    const int pair = item / per_pair(), part = item % per_pair();
    const int64_t from = pairs[pair][0], to = pairs[pair][1];
    return part < window_items ? tile_of(windows, from, to, part) : tile_of(overlaps, from, to, part - window_items);
  }
};

#if DSV4_ARCH >= 90

__device__ __forceinline__ void start_load(uint4* stage, uint64_t* barrier, const Tile& tile) {
  const unsigned bytes = static_cast<unsigned>(tile.vectors * sizeof(uint4)), at = shared_address(barrier);
  hopper::mbarrier_expect(at, bytes);
  hopper::copy_bulk(shared_address(stage), tile.source, bytes, at);
}

__device__ __forceinline__ void start_store(const uint4* stage, const Tile& tile) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
               "cp.async.bulk.commit_group;" ::"l"(tile.target),
               "r"(shared_address(stage)), "r"(static_cast<unsigned>(tile.vectors * sizeof(uint4)))
               : "memory");
}

// Copies items first, first + stride, ... below `count`; one thread. `loads` counts the ring's use over the whole
// kernel: it gives the stage and the barrier's phase.
__device__ __forceinline__ void copy_items(const Items& items, int first, int stride, int count, uint4* ring,
                                           uint64_t* barriers, unsigned& loads) {
  unsigned stored = loads;
  int next = first;
  for (int i = 0; i < kStages - 1 && next < count; ++i, next += stride, ++loads) {
    start_load(ring + (loads % kStages) * kTile, &barriers[loads % kStages], items[next]);
  }
  for (int item = first; item < count; item += stride, ++stored) {
    const unsigned stage = stored % kStages;
    hopper::mbarrier_wait(&barriers[stage], stored / kStages & 1);
    start_store(ring + stage * kTile, items[item]);
    if (next < count) {
      // The stage to fill held the tile whose store was started one iteration ago.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      start_load(ring + (loads % kStages) * kTile, &barriers[loads % kStages], items[next]);
      next += stride;
      ++loads;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#else

__device__ __forceinline__ void copy_tile(const Tile& tile) {
  uint4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < tile.vectors) v[i] = tile.source[at];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    if (at < tile.vectors) tile.target[at] = v[i];
  }
}

#endif

__global__ void __launch_bounds__(kThreads)
    copy_state_kernel(const __grid_constant__ Planes windows, const __grid_constant__ Planes overlaps,
                      const int64_t* __restrict__ src, const int64_t* __restrict__ dst, const int num_pairs,
                      const int64_t num_slots) {
  __shared__ int64_t pairs[kThreads][2];
  __shared__ int warp_counts[kThreads / 32];
  grid_dependency_launch();
  grid_dependency_wait();
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const Items items = {windows, overlaps, pairs};
#if DSV4_ARCH >= 90
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t barriers[kStages];
  unsigned loads = 0;
  if (thread < kStages) {
    hopper::mbarrier_init(&barriers[thread], 1);
    hopper::mbarrier_init_fence();
  }
#endif

  for (int first = 0; first < num_pairs; first += kThreads) {
    int64_t from = -1, to = -1;
    if (first + thread < num_pairs) {
      from = src[first + thread];
      to = dst[first + thread];
    }
    const bool due = from >= 0 && to >= 0 && from < num_slots && to < num_slots;
    if (!__syncthreads_or(due)) continue;
    // Every CTA lists the due pairs in the same order, so that they agree on the items.
    const unsigned ballot = __ballot_sync(kFullMask, due);
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
    const int num_items = count * items.per_pair();
#if DSV4_ARCH >= 90
    if (thread == 0) copy_items(items, blockIdx.x, gridDim.x, num_items, ring, barriers, loads);
#else
    for (int item = blockIdx.x; item < num_items; item += gridDim.x) copy_tile(items[item]);
#endif
    __syncthreads();
  }
}

Planes make_planes(const TensorView& tensor, int64_t element_bytes) {
  int64_t slot_elements = 1;
  for (int d = 2; d < tensor.ndim(); ++d) slot_elements *= tensor.size(d);
  const int per_vector = static_cast<int>(sizeof(uint4) / element_bytes);
  Planes planes = {};
  planes.base = data_of<uint4>(tensor);
  planes.layers = static_cast<int>(tensor.size(0));
  planes.layer_stride = tensor.stride(0) / per_vector;
  planes.slot_stride = tensor.stride(1) / per_vector;
  planes.vectors = static_cast<int>(slot_elements / per_vector);
  planes.tiles = (planes.vectors + kTile - 1) / kTile;
  planes.tile_vectors = planes.tiles ? (planes.vectors + planes.tiles - 1) / planes.tiles : 0;
  return planes;
}

void copy_state(TensorView windows, TensorView overlaps, TensorView src, TensorView dst) {
  const DeviceGuard guard(windows);
  if (src.size(0) == 0) return;
  LaunchShape shape;
  shape.grid = dim3(multiprocessors() * kBlocksPerMultiprocessor);
  shape.block = dim3(kThreads);
  shape.dynamic_smem = kRingBytes;
  shape.overlap = true;
  launch(windows, shape, copy_state_kernel, make_planes(windows, 1), make_planes(overlaps, 4),
               data_of<const int64_t>(src), data_of<const int64_t>(dst), static_cast<int>(src.size(0)),
               windows.size(1));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_state, copy_state);
