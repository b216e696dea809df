// Scores for many queries a request (prefill). A block holds 256 keys as operands in registers and streams the images of
// up to 64 queries past them. `score_many_hopper` for sm_90a, `score_many` for all other targets.
#pragma once

#include "dsv4/key_ring.cuh"
#include "dsv4/scores.cuh"

namespace dsv4 {

constexpr int kManyTeams = 2;
constexpr int kManyThreads = kManyTeams * kTeamThreads;
constexpr int kQueryTile = 64;  // queries of one request a block
constexpr int kManyTiles = 2;   // key tiles a team holds
constexpr int kBlockKeys = kManyTeams * kManyTiles * kKeyTile;

// The tokens first .. first + count - 1 of a request, those of a tile of queries that see a key of the block; `most` entries
// are visible to the last one. No tokens where there is nothing to do.
struct QueryTile {
  int request, first, count, most;

  // Tile `number`: requests have ceil(tokens / kQueryTile) each. Every warp searches for itself.
  template <typename Layout>
  __device__ __forceinline__ static QueryTile find(const ScoreParams<Layout>& p, int number, int block_entry, int lane) {
    QueryTile tile = {-1, 0, 0, 0};
    int end = 0;
    for (int start = 0, before = 0; start < p.meta.num_requests && tile.request < 0; start += 32) {
      const int candidate = start + lane;
      int offset = 0, tokens = 0;
      if (candidate < p.meta.num_requests) {
        offset = p.meta.token_offsets[candidate];
        tokens = p.meta.token_offsets[candidate + 1] - offset;
      }
      const int tiles = (max(tokens, 0) + kQueryTile - 1) / kQueryTile;
      const int upto = inclusive_sum(tiles, lane);
      const int local = number - before - (upto - tiles);
      const unsigned found = __ballot_sync(kFullMask, local >= 0 && local < tiles);
      if (found) {
        const int source = __ffs(found) - 1;
        tile.request = start + source;
        tile.first = __shfl_sync(kFullMask, offset + local * kQueryTile, source);
        end = min(__shfl_sync(kFullMask, offset + tokens, source), tile.first + kQueryTile);
      }
      before += __shfl_sync(kFullMask, upto, 31);
    }
    if (tile.request < 0) return tile;
    tile.most = p.visible(end - 1);
    if (block_entry >= tile.most) return tile;
    // The first query that sees a key of this block: positions ascend by one within a request.
    while (tile.first < end - 1 && p.visible(tile.first) <= block_entry) ++tile.first;
    tile.count = end - tile.first;
    return tile;
  }
};

// Operands of the warp's keys first_entry + 64 i.
template <bool kHopper, typename Layout, typename Operand>
__device__ __forceinline__ void load_operands(const ScoreParams<Layout>& p, const QueryTile& tile, int first_entry, int lane,
                                              Operand (&a)[kManyTiles], float (&factor)[kManyTiles][2]) {
  const int rows_shift = p.meta.page_shift - kCsaShift;
#pragma unroll
  for (int i = 0; i < kManyTiles; ++i) {
    const int entry = first_entry + i * kKeyTile;
    const int page = p.page_of(tile.request, min(entry, tile.most - 1) >> rows_shift);
    KeyShare<Layout> key;
    constexpr bool kOwn = kHopper && KeyShare<Layout>::kOwnScale;
    key.template load<kOwn>(p.keys, p.row_of(page, entry & ((1 << rows_shift) - 1)), lane);
    if constexpr (kHopper) {
      operand_e4m3(key, SignedCodes{SignedCodes::kHalfSigns}, a[i], factor[i]);
    } else {
      operand_bf16(key, lane, a[i], factor[i]);
    }
  }
}

// ---- Hopper ----

// Images and weights on their way into shared memory. One warp asks for them, and no team waits for another until it is
// some queries ahead of it.
struct ImageRing {
  static constexpr int kStages = 8;
  static constexpr int kAhead = 5;  // queries that are under way; the stage asked for was read kStages - kAhead queries ago
  static constexpr unsigned kImage = kImageBytes<true>, kWeights = kMaxHeads * sizeof(float);
  static constexpr int kBytes = kStages * (kImage + kWeights) + 1024;  // images start at 1,024-byte addresses

  unsigned images, barriers;  // in shared memory
  const float* weights;

  __device__ __forceinline__ static unsigned parity(int query) { return query / kStages & 1; }
  __device__ __forceinline__ unsigned image(int query) const { return images + query % kStages * kImage; }
  __device__ __forceinline__ const float* weights_of(int query) const { return weights + query % kStages * kMaxHeads; }
  __device__ __forceinline__ unsigned barrier(int query) const { return barriers + query % kStages * sizeof(RingStage); }

  __device__ __forceinline__ void wait(int query) const { hopper::mbarrier_wait(barrier(query), parity(query)); }

  // All that the warp loaded from the stage was used. Lane 0 arrives for the warp.
  __device__ __forceinline__ void release(int query, int lane) const {
    __syncwarp();
    hopper::mbarrier_arrive_if(barrier(query) + offsetof(RingStage, empty), lane == 0);
  }

  // Asks for the image of a block's query, `token`; one warp.
  template <typename Layout>
  __device__ __forceinline__ void fetch(const ScoreParams<Layout>& p, int query, int token) const {
    const unsigned full = barrier(query);
    hopper::mbarrier_wait(full + offsetof(RingStage, empty), parity(query) ^ 1);
    if (hopper::elect_one()) {
      hopper::mbarrier_expect(full, kImage + kWeights);
      hopper::copy_bulk(image(query), p.images + static_cast<int64_t>(token) * kImage, kImage, full);
      hopper::copy_bulk(shared_address(weights_of(query)), p.image_weights + static_cast<int64_t>(token) * kMaxHeads,
                        kWeights, full);
    }
    __syncwarp();
  }
};

// The sum over a quad of share[lane % 4 / 2][lane % 2]: of the first tile's two keys and the second's, one a lane, added in the
// order of `weigh`.
__device__ __forceinline__ float quad_sum(const float (&share)[2][2], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  float of[2];
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const float other = __shfl_xor_sync(kFullMask, odd ? share[t][0] : share[t][1], 1);
    of[t] = (odd ? share[t][1] : share[t][0]) + other;
  }
  const float other = __shfl_xor_sync(kFullMask, upper ? of[0] : of[1], 2);
  return (upper ? of[1] : of[0]) + other;
}

template <typename Layout>
__global__ void __launch_bounds__(kManyThreads, 2) score_many_hopper(const __grid_constant__ ScoreParams<Layout> p) {
  extern __shared__ uint8_t raw_shared[];
  __shared__ RingStage stages[ImageRing::kStages];
  const int lane = threadIdx.x & 31, team = threadIdx.x / kTeamThreads, warp = (threadIdx.x >> 5) & 3;
  const unsigned start = shared_address(raw_shared), images = (start + 1023) & ~1023u;
  const ImageRing ring = {keep(images), keep(shared_address(stages)),
                          reinterpret_cast<const float*>(raw_shared + (images - start) + ImageRing::kStages * ImageRing::kImage)};
  if (threadIdx.x < ImageRing::kStages) {
    hopper::mbarrier_init(&stages[threadIdx.x].full, 1);
    hopper::mbarrier_init(&stages[threadIdx.x].empty, kManyThreads / 32);
    hopper::fence_async_shared();
  }
  __syncthreads();

  const int block_entry = blockIdx.x * kBlockKeys;
  const QueryTile tile = QueryTile::find(p, blockIdx.y, block_entry, lane);
  const int count = __shfl_sync(kFullMask, tile.count, 0);
  if (count == 0) return;
  const bool fetches = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x >> 5), 0) == 0;  // a warp's branch
  if (fetches) {
    for (int i = 0; i < min(ImageRing::kAhead, count); ++i) ring.fetch(p, i, tile.first + i);
  }

  const int first_entry = block_entry + team * kManyTiles * kKeyTile + 16 * warp;
  unsigned a[kManyTiles][4][4];
  float factors[kManyTiles][2];
  load_operands<true>(p, tile, first_entry, lane, a, factors);

  // The key whose score this lane stores, and the first query that sees it: positions ascend by one within a request.
  const int entry = first_entry + (lane >> 2) + 8 * (lane & 1) + (lane & 2 ? kKeyTile : 0);
  const float low = lane & 1 ? factors[0][1] : factors[0][0], high = lane & 1 ? factors[1][1] : factors[1][0];
  const float factor = lane & 2 ? high : low;
  const int64_t position = p.meta.positions[tile.first];
  const int seen = entry < p.max_entries ? static_cast<int>(max(((int64_t{entry} + 1) << kCsaShift) - 1 - position, int64_t{0})) : count;
  float* out = p.out + tile.first * p.out_stride + entry;

#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (fetches && i + ImageRing::kAhead < count) ring.fetch(p, i + ImageRing::kAhead, tile.first + i + ImageRing::kAhead);
    ring.wait(i);
    const unsigned image = hopper::panel_start(ring.image(i));
    float dots[kManyTiles][32];
    hopper::wgmma_registers(dots[0]);
    hopper::wgmma_registers(dots[1]);
    hopper::wgmma_fence();
#pragma unroll
    for (int t = 0; t < kManyTiles; ++t) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        hopper::wgmma_e4m3_64x64x32(dots[t], a[t][s], hopper::panel_at(image + 2 * s), s > 0);
      }
      hopper::wgmma_commit();
    }
    __syncwarp();  // else the compiler spreads the products over what follows
    float weight[16], share[kManyTiles][2];
    load_weights(ring.weights_of(i), lane, weight);
    hopper::wgmma_wait<1>();
    hopper::wgmma_registers(dots[0]);
    weigh_share(dots[0], weight, share[0]);
    hopper::wgmma_wait<0>();
    hopper::wgmma_registers(dots[1]);
    weigh_share(dots[1], weight, share[1]);
    store_if(out, quad_sum(share, lane) * factor, i >= seen);
    out += p.out_stride;
    ring.release(i, lane);
  }
}

// ---- other targets ----

struct ManyShared {
  static constexpr int kStages = 2;
  static constexpr int kStage = kImageBytes<false> + 1024;  // image, weights, alignment of the next image
  static constexpr int kBytes = kStages * kStage + 1024;
};

template <typename Layout>
__global__ void __launch_bounds__(kManyThreads) score_many(const __grid_constant__ ScoreParams<Layout> p) {
  constexpr int kStages = ManyShared::kStages, kStage = ManyShared::kStage;
  constexpr int kImage = kImageBytes<false>;
  extern __shared__ uint8_t raw_shared[];
  const int lane = threadIdx.x & 31, team = threadIdx.x / kTeamThreads, warp = (threadIdx.x >> 5) & 3;
  const unsigned base = (shared_address(raw_shared) + 1023) & ~1023u;
  uint8_t* const aligned = raw_shared + (base - shared_address(raw_shared));

  const int block_entry = blockIdx.x * kBlockKeys;
  const QueryTile tile = QueryTile::find(p, blockIdx.y, block_entry, lane);
  const int count = tile.count;
  if (count == 0) return;
  const int first_entry = block_entry + team * kManyTiles * kKeyTile + 16 * warp;
  unsigned a[kManyTiles][8][4];
  float factor[kManyTiles][2];
  load_operands<false>(p, tile, first_entry, lane, a, factor);

  const int first_position = static_cast<int>(p.meta.positions[tile.first]) + 1;
  const auto fetch = [&](int i) {
    if (i < count) {
      const int64_t token = tile.first + i;
      const unsigned stage = base + (i % kStages) * kStage;
      const uint8_t* source = p.images + token * kImage;
#pragma unroll
      for (int at = 0; at < kImage; at += 16 * kManyThreads) {
        copy_async16(stage + at + 16 * threadIdx.x, source + at + 16 * threadIdx.x);
      }
      if (threadIdx.x < kMaxHeads / 4) {
        copy_async16(stage + kImage + 16 * threadIdx.x, p.image_weights + token * kMaxHeads + 4 * threadIdx.x);
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);

  for (int i = 0; i < count; ++i) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    fetch(i + kStages - 1);  // into the stage that every warp has left
    // As positions ascend by one: two loads, one behind the other, would stand between the products.
    const int visible = min((first_position + i) >> kCsaShift, p.max_entries);
    float* const out = p.out + (tile.first + i) * p.out_stride;
    const unsigned image = base + (i % kStages) * kStage;
    float weight[16];
    load_weights(reinterpret_cast<const float*>(aligned + (i % kStages) * kStage + kImage), lane, weight);
#pragma unroll
    for (int t = 0; t < kManyTiles; ++t) {
      float dots[32], sum[2];
      multiply_image(a[t], image, lane, dots);
      weigh(dots, weight, sum);
      store_scores(out, visible, first_entry + t * kKeyTile, lane, sum, factor[t]);
    }
  }
}

}  // namespace dsv4
