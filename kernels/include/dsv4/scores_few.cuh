// Scores of few queries a request (decode): the tiles of all queries, one after another, are cut into equal ranges, one a
// block, so that mixed lengths balance and a block meets one or two queries.
#pragma once

#include "dsv4/scores.cuh"

namespace dsv4 {

constexpr int kFewTeams = 4;
constexpr int kFewThreads = kFewTeams * kTeamThreads;
constexpr int kFewTokens = 1024;  // tokens whose tile counts a block of score_few scans
constexpr int kFewPages = 1024;   // pages of a request that a block looks up at a time

// Stages of a team. Elsewhere than on Hopper a block may have 99 KB of shared memory.
template <typename Layout, bool kHopper>
constexpr int kFewStages = kHopper ? (KeyShare<Layout>::kPieces == 1 ? 8 : 5) : (KeyShare<Layout>::kPieces == 1 ? 4 : 2);
template <typename Layout, bool kHopper>
constexpr int kFewShared =
    kImageBytes<kHopper> + kFewTeams * kFewStages<Layout, kHopper> * KeyShare<Layout>::kStageBytes + 1024;

// Where a block of kFewThreads keeps what it works with.
struct FewBlock {
  uint8_t* image;       // of kImageBytes; the teams' stages stand behind it
  float* weights;       // [kMaxHeads]
  unsigned* page_rows;  // [kFewPages]
  unsigned image_address;
  int lane, block_warp, team, warp;

  __device__ __forceinline__ FewBlock(uint8_t* raw_shared, float* weights_at, unsigned* page_rows_at) {
    lane = threadIdx.x & 31;
    block_warp = threadIdx.x >> 5;
    team = block_warp >> 2;
    warp = block_warp & 3;
    image = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
    weights = weights_at;
    page_rows = page_rows_at;
    image_address = shared_address(image);
  }
};

template <typename Layout, bool kHopper>
__device__ __forceinline__ typename KeyShare<Layout>::Places few_places(const FewBlock& block) {
  typename KeyShare<Layout>::Places places;
  const int stages = block.team * kFewStages<Layout, kHopper> * KeyShare<Layout>::kStageBytes;
  places.start(block.image_address + kImageBytes<kHopper> + stages, block.warp, block.lane);
  return places;
}

// Tiles of a query from `tile` on whose pages a block looks up at a time.
__device__ __forceinline__ int tiles_at_once(int tile, int rows_shift) {
  const int first_page = tile * kKeyTile >> rows_shift;
  return ((first_page + kFewPages) << rows_shift) / kKeyTile - tile;
}

// Scores of `block_count` tiles of one token from `token_tile` on, at most tiles_at_once() of them.
template <typename Layout, bool kHopper>
__device__ __forceinline__ void score_tiles(const ScoreParams<Layout>& p, const FewBlock& block,
                                            const typename KeyShare<Layout>::Places& places, int token, int request,
                                            int visible, int token_tile, int block_count) {
  constexpr int kStages = kFewStages<Layout, kHopper>, kStageBytes = KeyShare<Layout>::kStageBytes;
  constexpr int kWarps = kFewThreads / 32;
  const int lane = block.lane, block_warp = block.block_warp, team = block.team, warp = block.warp;
  uint8_t* const image = block.image;
  float* const weights = block.weights;
  unsigned* const page_rows = block.page_rows;
  const unsigned image_address = block.image_address;
  const int rows_shift = p.meta.page_shift - kCsaShift;
  const int first_page = token_tile * kKeyTile >> rows_shift;
  const int first_tile = token_tile + team;  // the team's; it takes every kFewTeams-th
  const int count = (block_count - team + kFewTeams - 1) / kFewTeams;

  ImageShare<Layout, kWarps> share;
  share.load(p, token, block_warp, lane);
  float* const out = p.out + token * p.out_stride;
  const int first_entry = first_tile * kKeyTile + 16 * warp;
  // The pool row that each page starts at; any table leads to rows of the pool.
  const int last_page = (min((token_tile + block_count) * kKeyTile, visible) - 1) >> rows_shift;
  __syncthreads();  // the last rows and the last image have been read
  for (int page = first_page + threadIdx.x; page <= last_page; page += kFewThreads) {
    const unsigned row = static_cast<unsigned>(p.page_of(request, page)) << rows_shift;
    page_rows[page - first_page] = min(row, static_cast<unsigned>(p.keys.num_rows) - (1u << rows_shift));
  }
  __syncthreads();
  const auto copy = [&](int i, unsigned stage) {
    if (i < count) {
      const int entry = first_entry + i * kFewTeams * kKeyTile;
      // Warps behind the last page score keys of it that nobody asks for.
      const int page = min(entry >> rows_shift, last_page) - first_page;
      KeyShare<Layout>::copy(places, stage, p.keys, page_rows[page] + (entry & ((1 << rows_shift) - 1)), lane);
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copy(i, i * kStageBytes);

  share.template write<kHopper, kHalfSums<Layout, kHopper>>(image, weights, block_warp, lane);
  if constexpr (kHopper) hopper::fence_async_shared();
  __syncthreads();

  unsigned stage = 0, next_stage = (kStages - 1) * kStageBytes;
  // Reads the key of turn i and starts a copy into the stage that the warp read in the turn before.
  const auto next_key = [&](int i, KeyShare<Layout>& key) {
    copy_async_wait<kStages - 2>();
    __syncwarp();
    key.read(places, stage);
    copy(i + kStages - 1, next_stage);
    next_stage = stage;
    stage = stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  };
  const int turn_entries = kFewTeams * kKeyTile;
  if constexpr (kHalfSums<Layout, kHopper>) {
    // The next key is converted while this one is multiplied.
    ReluSum relu;
    relu.start(weights, lane);
    unsigned a[2][4][4];
    float factor[2][2], dots[32];
    const auto prepare = [&](int i, int which) {
      KeyShare<Layout> key;
      next_key(i, key);
      operand_e4m3(key, lane, a[which], factor[which]);
      hopper::wgmma_operands(a[which]);  // converted here, not behind the wait that follows
    };
    const auto issue = [&](int which) {
      hopper::wgmma_registers(dots);
      hopper::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        hopper::wgmma_e4m3_64x64x32(dots, a[which][s], hopper::panel_descriptor(image_address + 32 * s), s > 0);
      }
      hopper::wgmma_commit();
    };
    const auto collect = [&](unsigned(&packed)[4][4]) {
      hopper::wgmma_wait<0>();
      hopper::wgmma_registers(dots);
      ReluSum::pack(dots, packed);
    };
    const auto finish = [&](int i, int which, const unsigned(&packed)[4][4]) {
      float sum[2];
      relu.sum(packed, sum);
      if ((lane & 3) == 0) {
        const int entry = first_entry + i * turn_entries + (lane >> 2);
        if (entry < visible) out[entry] = sum[0] * factor[which][0];
        if (entry + 8 < visible) out[entry + 8] = sum[1] * factor[which][1];
      }
    };
    const auto turn = [&](int i, int which) {
      unsigned packed[4][4];
      prepare(i + 1, which ^ 1);
      collect(packed);
      issue(which ^ 1);
      finish(i, which, packed);
    };
    // No product is in flight where a branch begins or ends: the compiler would let each wait for the one before.
    if (count > 0) {
      prepare(0, 0);
      issue(0);
      int i = 0;
#pragma unroll 1
      for (; i + 2 < count; i += 2) {
        turn(i, 0);
        turn(i + 1, 1);
      }
      unsigned packed[4][4];
      collect(packed);
      finish(i, 0, packed);
      if (i + 1 < count) {
        prepare(i + 1, 1);
        issue(1);
        collect(packed);
        finish(i + 1, 1, packed);
      }
    }
  } else {
    float weight[16];
    load_weights(weights, lane, weight);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      KeyShare<Layout> key;
      next_key(i, key);
      float dots[32], factor[2], sum[2];
      multiply<kHopper>(key, image_address, lane, dots, factor);
      weigh(dots, weight, sum);
      store_scores(out, visible, first_entry + i * turn_entries, lane, sum, factor);
    }
  }
  copy_async_wait<0>();
}

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kFewThreads, 1) score_few(const __grid_constant__ ScoreParams<Layout> p) {
  constexpr int kWarps = kFewThreads / 32;
  extern __shared__ uint8_t raw_shared[];
  __shared__ int tiles_before[kFewTokens + 1];
  __shared__ int visible_of[kFewTokens], request_of[kFewTokens];
  __shared__ unsigned page_rows[kFewPages];
  __shared__ int warp_sums[kWarps];
  __shared__ __align__(16) float weights[kMaxHeads];

  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x & 31, block_warp = threadIdx.x >> 5;
  const FewBlock block(raw_shared, weights, page_rows);
  const auto places = few_places<Layout, kHopper>(block);

  // Tiles before each token: a block-wide prefix sum, kFewTokens / kFewThreads tokens a thread.
  constexpr int kPerThread = kFewTokens / kFewThreads;
  int counts[kPerThread], own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = threadIdx.x * kPerThread + i;
    int visible = 0, request = -1;
    if (token < p.meta.num_tokens) {
      request = p.meta.request_of(token);
      const int64_t position = p.meta.positions[token];
      if (request >= 0) visible = static_cast<int>(min((position + 1) >> kCsaShift, static_cast<int64_t>(p.max_entries)));
    }
    visible_of[token] = visible;
    request_of[token] = request;
    counts[i] = (visible + kKeyTile - 1) / kKeyTile;
    own += counts[i];
  }
  int before = inclusive_sum(own, lane);
  if (lane == 31) warp_sums[block_warp] = before;
  before -= own;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int sum = warp_sums[i];
    before += i < block_warp ? sum : 0;
    total += sum;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    tiles_before[threadIdx.x * kPerThread + i] = before;
    before += counts[i];
  }
  if (threadIdx.x == 0) tiles_before[kFewTokens] = total;
  __syncthreads();

  const int begin = static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x);
  const int rows_shift = p.meta.page_shift - kCsaShift;

  int low = 0, high = kFewTokens;  // the last token with tiles_before <= begin
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    (tiles_before[middle] <= begin ? low : high) = middle;
  }

  int token = low;
  for (int tile = begin; tile < end;) {
    while (tiles_before[token + 1] <= tile) ++token;
    const int token_tile = tile - tiles_before[token];
    const int count = min(min(end, tiles_before[token + 1]) - tile, tiles_at_once(token_tile, rows_shift));
    score_tiles<Layout, kHopper>(p, block, places, token, request_of[token], visible_of[token], token_tile, count);
    tile += count;
  }
}

}  // namespace dsv4
