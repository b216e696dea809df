// Scores of few queries a request (decode): the tiles of all queries, one after another, are cut into equal ranges, one a
// block, so that mixed lengths balance and a block meets one or two queries.
#pragma once

#include "dsv4/key_ring.cuh"
#include "dsv4/scores.cuh"

namespace dsv4 {

constexpr int kFewTeams = 4;
constexpr int kFewThreads = kFewTeams * kTeamThreads;  // of the teams
constexpr int kFewWarps = kFewThreads / 32;
// With the warps that fill the teams' stages, one a team. Threads start with 96 registers each; these give theirs away.
template <bool kHopper>
constexpr int kFewBlock = kFewThreads + (kHopper ? 32 * kFewTeams : 0);
constexpr int kScoreRegisters = 112, kFillRegisters = 32;
constexpr int kFewTokens = 1024;  // tokens whose tile counts a block of score_few scans
template <bool kHopper>
constexpr int kRangeTiles = kHopper ? 512 : 64;  // tiles whose places in the pool a block looks up at a time
constexpr int kTurnEntries = kFewTeams * kKeyTile;  // from a team's tile to its next

// Elsewhere than on Hopper a block may have 99 KB of shared memory in all.
constexpr size_t kPortableShared = 99 * 1024;
template <typename Layout, bool kHopper>
struct FewRingOf {
  using Ring = AsyncRing<Layout, kFewTeams, KeyShare<Layout>::kPieces == 1 ? 3 : 2>;
};
template <typename Layout>
struct FewRingOf<Layout, true> {
  using Ring = BulkRing<Layout, kFewTeams, KeyShare<Layout>::kPieces == 1 ? 8 : 5>;
};
template <typename Layout, bool kHopper>
using FewRing = typename FewRingOf<Layout, kHopper>::Ring;
template <typename Layout, bool kHopper>
constexpr int kFewShared = kImageBytes<kHopper> + FewRing<Layout, kHopper>::kBytes + 1024;

// Which keys a block scores next: its teams say so, and the warps that fill their stages do it.
template <bool kHopper>
struct KeySource {
  RingBarriers<kHopper ? kFewTeams : 1> barriers;
  HalfTile halves[2 * kRangeTiles<kHopper>];  // of the range's tiles
  struct Range {
    int tiles;     // none: there are no more ranges
    bool grouped;  // score_planned: which ring
  } range[2];      // of even and odd ones: a warp whose team has no tiles may read it late
  int ranges;      // handed over so far
  unsigned half_signs;
  uint64_t images;  // an arrival and the bytes of a range's images

  // All threads of the teams, before a barrier of all of them.
  __device__ __forceinline__ void start() {
    barriers.start();
    if (threadIdx.x == 0) {
      ranges = 0;
      half_signs = SignedCodes::kHalfSigns;
      hopper::mbarrier_init(&images, 1);
      hopper::fence_async_shared();
    }
  }
  __device__ __forceinline__ SignedCodes signed_codes() const { return {load_shared4(shared_address(&half_signs))}; }
};

// Where the threads of a block stand, and what they share.
template <bool kHopper>
struct FewBlock {
  using Range = typename KeySource<kHopper>::Range;

  float* weights;  // [kMaxHeads]
  KeySource<kHopper>& keys;
  unsigned image_address;  // of kImageBytes; the teams' stages stand behind it
  int lane, block_warp, team, warp;

  __device__ __forceinline__ FewBlock(uint8_t* raw_shared, float* weights_at, KeySource<kHopper>& keys_at)
      : keys(keys_at) {
    lane = threadIdx.x & 31;
    block_warp = threadIdx.x >> 5;
    team = block_warp >> 2;
    warp = block_warp & 3;
    weights = weights_at;
    image_address = (shared_address(raw_shared) + 1023) & ~1023u;
    if constexpr (kHopper) image_address = keep(image_address);
  }

  __device__ __forceinline__ static bool fills() { return threadIdx.x >= kFewThreads; }
  __device__ __forceinline__ static void teams_meet() { named_barrier(1, kFewThreads); }
  __device__ __forceinline__ static void all_meet() { named_barrier(2, kFewBlock<kHopper>); }

  // How many ranges have been handed over: asked before the teams meet ahead of the next.
  __device__ __forceinline__ int number() const { return keys.ranges; }
  // The teams hand a range, the `number`-th, to the warps that fill. None of the teams reads from an earlier one.
  __device__ __forceinline__ void hand_over(Range range, int number) const {
    if (number > 0) keys.barriers.restart();
    if (threadIdx.x == 0) {
      keys.range[number & 1] = range;
      keys.ranges = number + 1;
    }
    all_meet();
  }
  // The images of the `number`-th range are there. Every thread of the teams waits for those of every range.
  __device__ __forceinline__ void wait_images(int number) const { hopper::mbarrier_wait(&keys.images, number & 1); }
  // Instead of a range: there are no more. Teams may still read from the last one.
  __device__ __forceinline__ void hand_over_end() const {
    if (threadIdx.x == 0) keys.range[keys.ranges & 1] = {0, false};
    all_meet();
  }
  // The block's `number`-th.
  __device__ __forceinline__ Range take_over(int number) const {
    all_meet();
    return keys.range[number & 1];
  }
};

// Some tiles of one token, of which a block's teams take turns, and where their scores go.
struct TileRange {
  float* out;  // the token's row
  int visible, tile, count;

  __device__ __forceinline__ int of_team(int team) const { return (count - team + kFewTeams - 1) / kFewTeams; }
  // The first entry of a warp in its team's first tile.
  __device__ __forceinline__ int entry(int team, int warp) const { return (tile + team) * kKeyTile + 16 * warp; }
};

// Where the 32 entries from `entry` on of a request stand; any page table leads to rows of the pool. `kAhead`: of a page
// table that may be written meanwhile.
template <bool kAhead = false, typename Layout>
__device__ __forceinline__ HalfTile half_of(const ScoreParams<Layout>& p, int request, int entry, int visible) {
  const int rows_shift = p.meta.page_shift - kCsaShift;
  // Behind the last page keys of it are scored that nobody asks for.
  const int32_t* const at = p.page_at(request, min(entry, max(visible - 1, 0)) >> rows_shift);
  const unsigned row = static_cast<unsigned>(kAhead ? load_ahead(at) : *at) << rows_shift;
  const unsigned first = min(row, static_cast<unsigned>(p.keys.num_rows) - (1u << rows_shift));
  return HalfTile::at(p.keys, first + (entry & ((1 << rows_shift) - 1)));
}

// A team's tiles of MXFP4 keys on Hopper: the next key is read, and its scales are looked at, while this one is
// multiplied. It is converted behind that, into the same registers, while the sums of this one are made.
template <typename Reader>
struct HalfSumPass {
  Reader reader;
  const FewBlock<true>& block;
  SignedCodes signed_codes;
  ReluSum relu;
  unsigned a[4][4];
  float dots[32];
  bool leads;  // its warp

  __device__ __forceinline__ HalfSumPass(const Reader& of_warp, const FewBlock<true>& of_block)
      : reader(of_warp), block(of_block), signed_codes(of_block.keys.signed_codes()), leads(of_block.lane == 0) {
    relu.set(block.weights, block.lane);
  }

  __device__ __forceinline__ void convert(const KeyShare<IndexFp4>& key, const KeyCodes& codes) {
    codes.convert(key, signed_codes, a);
    hopper::wgmma_operands(a);
  }
  __device__ __forceinline__ void issue() {
    hopper::wgmma_registers(dots);
    hopper::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      hopper::wgmma_e4m3_64x64x32(dots, a[s], hopper::panel_descriptor(block.image_address + 32 * s), s > 0);
    }
    hopper::wgmma_commit();
  }
  __device__ __forceinline__ void collect(ReluSum::Parts& parts) {
    unsigned packed[4][4];
    hopper::wgmma_wait<0>();
    hopper::wgmma_registers(dots);
    ReluSum::pack(dots, packed);
    relu.start(packed, parts);
  }
  // `at` is where the score of the lane's first key goes, if it stores at all and the key is one of `visible` from it.
  __device__ __forceinline__ void store(float* at, const float (&factor)[2], const ReluSum::Parts& parts,
                                        int visible) const {
    store_if(at, relu.sum(parts, 0) * factor[0], visible > 0);
    store_if(at + 8, relu.sum(parts, 1) * factor[1], visible > 8);
  }

  // Starts a tile's product.
  __device__ __forceinline__ void begin(float (&factor)[2]) {
    KeyShare<IndexFp4> key;
    KeyCodes codes;
    reader.read(key);
    codes.start(key, factor);
    convert(key, codes);
    issue();
    reader.release(leads);
  }
  // Scores a tile and starts the product of the one behind it, `kAhead` from where the reader is.
  template <int kAhead>
  __device__ __forceinline__ void turn(float* at, const float (&factor)[2], float (&next_factor)[2], int visible) {
    KeyShare<IndexFp4> key;
    KeyCodes codes;
    ReluSum::Parts parts;
    reader.template read<kAhead>(key);
    codes.start(key, next_factor);
    collect(parts);
    convert(key, codes);
    store(at, factor, parts, visible);
    __syncwarp();  // else the compiler moves the product ahead of the sums, which then wait for it
    issue();
    reader.template release<kAhead>(leads);
  }
  // Scores a tile behind whose product there is none.
  __device__ __forceinline__ void end(float* at, const float (&factor)[2], int visible) {
    ReluSum::Parts parts;
    collect(parts);
    store(at, factor, parts, visible);
  }

  // No product is in flight where a branch begins or ends: the compiler would let each wait for the one before.
  __device__ __forceinline__ void run(const TileRange& range) {
    const int entry = range.entry(block.team, block.warp) + (block.lane >> 2);
    const bool stores = (block.lane & 3) == 0;
    int left = range.of_team(block.team), visible = stores ? range.visible - entry : 0;
    if (left <= 0) return;
    float* at = range.out + entry;
    float factor[2], next_factor[2];
    begin(factor);
    reader.template advance<1>();
    // All keys of a tile that is not the team's last are visible.
    const int all = stores ? kKeyTile : 0;
#pragma unroll 1
    for (; left > 2; left -= 2, at += 2 * kTurnEntries, visible -= 2 * kTurnEntries) {
      turn<0>(at, factor, next_factor, all);
      turn<1>(at + kTurnEntries, next_factor, factor, all);
      reader.template advance<2>();
    }
    end(at, factor, visible);
    if (left > 1) {
      begin(factor);
      end(at + kTurnEntries, factor, visible - kTurnEntries);
    }
  }
};

// A team's tiles where sums are float32; `done` is told when a key has been multiplied.
template <bool kHopper, typename Layout, typename NextKey, typename Done>
__device__ __forceinline__ void score_in_floats(const FewBlock<kHopper>& block, const TileRange& range,
                                                const NextKey& next_key, const Done& done) {
  float weight[16];
  load_weights(block.weights, block.lane, weight);
  const unsigned image = kHopper ? hopper::panel_start(block.image_address) : block.image_address;
  const int count = range.of_team(block.team), entry = range.entry(block.team, block.warp);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    KeyShare<Layout> key;
    next_key(i, key);
    float dots[32], factor[2], sum[2];
    multiply<kHopper>(key, image, block.lane, dots, factor);
    done();
    weigh(dots, weight, sum);
    store_scores(range.out, range.visible, entry + i * kTurnEntries, block.lane, sum, factor);
  }
}

// Brings a token's image and its weights, kImageCopy bytes in all; one lane. No team reads an earlier image any more.
constexpr unsigned kImageCopy = kImageBytes<true> + kMaxHeads * sizeof(float);
template <typename Layout>
__device__ __forceinline__ void copy_image(const ScoreParams<Layout>& p, int token, unsigned image, unsigned weights,
                                           unsigned barrier) {
  const uint8_t* const from = p.images + static_cast<int64_t>(token) * kImageBytes<true>;
  hopper::copy_bulk(image, from, kImageBytes<true>, barrier);
  hopper::copy_bulk(weights, p.image_weights + static_cast<int64_t>(token) * kMaxHeads, kMaxHeads * sizeof(float), barrier);
}

// Where the halves of a range's tiles stand; all threads of the teams.
template <typename Layout, bool kHopper>
__device__ __forceinline__ void look_up_tiles(const ScoreParams<Layout>& p, const FewBlock<kHopper>& block, int request,
                                              const TileRange& range) {
  for (int half = threadIdx.x; half < 2 * range.count; half += kFewThreads) {
    const int entry = range.tile * kKeyTile + half * kHalfTile;
    block.keys.halves[half] = half_of(p, request, entry, range.visible);
  }
}

// Scores of a range of one token, at most kRangeTiles; all threads of the teams.
template <typename Layout>
__device__ __forceinline__ void score_tiles(const ScoreParams<Layout>& p, const FewBlock<true>& block, int token,
                                            int request, const TileRange& range) {
  using Reader = typename FewRing<Layout, true>::Reader;
  const int number = block.number();
  FewBlock<true>::teams_meet();  // the last rows and the last image have been read
  if (block.block_warp == 0 && hopper::elect_one()) {
    const unsigned barrier = shared_address(&block.keys.images);
    hopper::mbarrier_expect(barrier, kImageCopy);
    copy_image(p, token, block.image_address, shared_address(block.weights), barrier);
  }
  look_up_tiles(p, block, request, range);
  block.hand_over({range.count, false}, number);
  block.wait_images(number);
  Reader reader(block.image_address + kImageBytes<true>, block.keys.barriers, block.team, block.warp, block.lane);
  if constexpr (kHalfSums<Layout, true>) {
    HalfSumPass<Reader>(reader, block).run(range);
  } else {
    const bool leads = block.lane == 0;
    const auto next_key = [&](int, KeyShare<Layout>& key) { reader.read(key); };
    score_in_floats<true, Layout>(block, range, next_key, [&] {
      reader.release(leads);
      reader.template advance<1>();
    });
  }
}
template <typename Layout>
__device__ __forceinline__ void score_tiles(const ScoreParams<Layout>& p, const FewBlock<false>& block, int token,
                                            int request, const TileRange& range) {
  const int lane = block.lane;
  ImageShare<Layout, kFewWarps> share;
  share.load(p, token, block.block_warp, lane);
  FewBlock<false>::teams_meet();  // the last rows and the last image have been read
  look_up_tiles(p, block, request, range);
  FewBlock<false>::teams_meet();
  FewRing<Layout, false> ring(block.image_address + kImageBytes<false>, block.team, block.warp, lane);
  const int own = range.of_team(block.team);
  const HalfTile* const halves = block.keys.halves + 2 * block.team + (block.warp >> 1);
  ring.start(halves, own, lane);
  uint8_t* const image = static_cast<uint8_t*>(__cvta_shared_to_generic(block.image_address));
  share.template write<false>(image, block.weights, block.block_warp, lane);
  FewBlock<false>::teams_meet();
  const auto next_key = [&](int i, KeyShare<Layout>& key) { ring.read(halves, i, own, lane, key); };
  score_in_floats<false, Layout>(block, range, next_key, [] {});
  copy_async_wait<0>();
}

// Known to the compiler to be the same in all lanes.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kFullMask, x, 0); }

// What the other warps do on Hopper: they fill the stages of a range's teams, and of one range after another.
template <typename Layout>
__device__ __forceinline__ void fill_range(const FewBlock<true>& block, int tiles) {
  FewRing<Layout, true>::fill(block.image_address + kImageBytes<true>, block.keys.barriers, block.keys.halves, tiles,
                              uniform(block.warp));
}
template <typename Layout>
__device__ __forceinline__ void fill_ranges(const FewBlock<true>& block) {
  for (int number = 0;; ++number) {
    const int tiles = uniform(block.take_over(number).tiles);
    if (tiles == 0) return;
    fill_range<Layout>(block, tiles);
  }
}

// Who asks for what, and how many tiles come before: of every token of a step.
struct FewQueries {
  int tiles_before[kFewTokens + 1];
  int visible[kFewTokens], request[kFewTokens];
  int warp_sums[kFewWarps];
  int begin, end;  // the block's tiles

  // All threads of a block.
  template <typename Layout>
  __device__ __forceinline__ void start(const ScoreParams<Layout>& p, int lane, int block_warp) {
    // A prefix sum over the teams' threads, kPerThread tokens each.
    constexpr int kPerThread = kFewTokens / kFewThreads;
    const bool counting = block_warp < kFewWarps;
    int counts[kPerThread], own = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int token = threadIdx.x * kPerThread + i;
      int sees = 0, asks = -1;
      if (token < p.meta.num_tokens) {
        asks = p.meta.request_of(token);
        const int64_t position = p.meta.positions[token];
        if (asks >= 0) sees = static_cast<int>(min((position + 1) >> kCsaShift, static_cast<int64_t>(p.max_entries)));
      }
      counts[i] = tiles_of(sees);
      own += counts[i];
      if (counting) {
        visible[token] = sees;
        request[token] = asks;
      }
    }
    int before = inclusive_sum(own, lane);
    if (counting && lane == 31) warp_sums[block_warp] = before;
    before -= own;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int i = 0; i < kFewWarps; ++i) {
      const int sum = warp_sums[i];
      before += i < block_warp ? sum : 0;
      total += sum;
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (counting) tiles_before[threadIdx.x * kPerThread + i] = before;
      before += counts[i];
    }
    if (threadIdx.x == 0) {
      tiles_before[kFewTokens] = total;
      begin = static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x);
      end = static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x);
    }
    __syncthreads();
  }

  // The last token with tiles_before <= tile.
  __device__ __forceinline__ int at(int tile) const {
    int low = 0, high = kFewTokens;
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      (tiles_before[middle] <= tile ? low : high) = middle;
    }
    return low;
  }
};

template <typename Layout>
constexpr size_t kFewInAll =
    kFewShared<Layout, false> + sizeof(FewQueries) + sizeof(KeySource<false>) + kMaxHeads * sizeof(float);
static_assert(kFewInAll<IndexFp4> <= kPortableShared && kFewInAll<IndexFp8> <= kPortableShared,
              "what score_few keeps beside its stages counts, too");

// The teams' part: the block's ranges one after another.
template <typename Layout, bool kHopper>
__device__ __forceinline__ void score_ranges(const ScoreParams<Layout>& p, const FewBlock<kHopper>& block,
                                             const FewQueries& queries) {
  int token = queries.at(queries.begin);
  for (int tile = queries.begin; tile < queries.end;) {
    while (queries.tiles_before[token + 1] <= tile) ++token;
    const int count = min(min(queries.end, queries.tiles_before[token + 1]) - tile, kRangeTiles<kHopper>);
    const TileRange range = {p.out + token * p.out_stride, queries.visible[token], tile - queries.tiles_before[token],
                             count};
    score_tiles(p, block, token, queries.request[token], range);
    tile += count;
  }
  if constexpr (kHopper) block.hand_over_end();
}

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kFewBlock<kHopper>, 1) score_few(const __grid_constant__ ScoreParams<Layout> p) {
  extern __shared__ uint8_t raw_shared[];
  __shared__ FewQueries queries;
  __shared__ KeySource<kHopper> keys;
  __shared__ __align__(16) float weights[kMaxHeads];

  grid_dependency_launch();
  if constexpr (kHopper) keys.start();
  grid_dependency_wait();
  queries.start(p, threadIdx.x & 31, threadIdx.x >> 5);
  if constexpr (kHopper) {
    if (FewBlock<kHopper>::fills()) {
      hopper::lower_registers<kFillRegisters>();
      fill_ranges<Layout>(FewBlock<kHopper>(raw_shared, weights, keys));
      return;
    }
    hopper::raise_registers<kScoreRegisters>();
  }
  score_ranges<Layout, kHopper>(p, FewBlock<kHopper>(raw_shared, weights, keys), queries);
}

}  // namespace dsv4
