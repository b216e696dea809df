// Keys on their way from the pool to a block's teams: each team has a ring of stages in shared memory, a tile of 64 keys
// in each, and takes every kTeams-th of the block's tiles.
//
// `BulkRing` (Hopper): warps beside the teams fill the stages with bulk copies of 32 rows, so that a team waits, reads
// and says that it has read. `AsyncRing` (all others): each thread copies what it will read itself.
#pragma once

#include "dsv4/index_keys.cuh"

namespace dsv4 {

constexpr int kHalfTile = kKeyTile / 2;  // rows that stand together in the pool: a page holds 32 or 64

// Where they stand: looked up once, for whoever copies.
struct __align__(16) HalfTile {
  const uint8_t* data;
  const uint8_t* scale;

  template <typename Layout>
  __device__ __forceinline__ static HalfTile at(const RowPool<Layout>& pool, unsigned row) {
    const unsigned within = row % kGroupRows;
    const uint8_t* group =
        pool.base + static_cast<uint64_t>(row / kGroupRows) * static_cast<unsigned>(pool.group_stride);
    return {group + within * Layout::kDataBytes,
            group + (kGroupRows * Layout::kDataBytes + within * Layout::kScaleBytes)};
  }
};

struct RingStage {
  uint64_t full;   // one arrival, and the bytes of both halves
  uint64_t empty;  // an arrival of each warp of the team
};

template <int kTeams>
struct RingBarriers {
  static constexpr int kMost = 8;  // stages
  RingStage of[kTeams][kMost];

  // Where rings begin; all warps of the teams, before a barrier of all that use them. One lane a warp, as the lanes of a
  // warp do this one after another.
  __device__ __forceinline__ void start() { set<false>(); }
  // The same anew, once all that was copied has been read.
  __device__ __forceinline__ void restart() { set<true>(); }

 private:
  template <bool kAgain>
  __device__ __forceinline__ void set() {
    constexpr int kEach = kMost / 4;
    const int warp = threadIdx.x >> 5, team = warp >> 2;
    if (team >= kTeams || !hopper::elect_one()) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      RingStage& stage = of[team][(warp & 3) * kEach + i];
      if constexpr (kAgain) {
        hopper::mbarrier_invalidate(&stage.full);
        hopper::mbarrier_invalidate(&stage.empty);
      }
      hopper::mbarrier_init(&stage.full, 1);
      hopper::mbarrier_init(&stage.empty, 4);
    }
    if ((warp & 3) == 0) {  // stage 0: as if a tile had come and gone, see BulkRing::kFirst
      hopper::mbarrier_arrive(&of[team][0].full);
      hopper::mbarrier_arrive(&of[team][0].empty, 4);
    }
    hopper::fence_async_shared();
  }
};

template <typename Layout, int kTeams, int kStages>
struct BulkRing {
  static_assert(kStages <= RingBarriers<kTeams>::kMost, "a barrier for each stage");
  static constexpr int kStageBytes = kKeyTile * (Layout::kDataBytes + Layout::kScaleBytes);
  static constexpr int kBytes = kTeams * kStages * kStageBytes;
  // The stage of a team's first tile. A loop that takes two tiles at a time reads the first ahead of it; then no two of
  // them stand on both sides of the ring's end.
  static constexpr unsigned kFirst = 1;
  static_assert(kKeyTile * Layout::kDataBytes % 128 == 0, "stages start at 16-byte addresses, as bulk copies demand");

  // A warp's place in its team's stages.
  struct Reader {
    unsigned data, scale, barriers;  // in stage 0
    unsigned stage, parity;

    __device__ __forceinline__ Reader(unsigned stages, RingBarriers<kTeams>& of, int team, int warp, int lane) {
      const unsigned first = stages + team * (kStages * kStageBytes);
      data = keep(first + (16 * warp + (lane >> 2)) * Layout::kDataBytes + 16 * (lane & 3));
      scale = keep(first + kKeyTile * Layout::kDataBytes + (16 * warp + (lane >> 2)) * Layout::kScaleBytes +
                   (KeyShare<Layout>::kOwnScale ? lane & 3 : 0));
      barriers = keep(shared_address(&of.of[team][0]));
      stage = kFirst;
      parity = 0;
    }

    // The team's tile `kAhead` behind the next one.
    template <int kAhead = 0>
    __device__ __forceinline__ void read(KeyShare<Layout>& key) const {
      const unsigned at = (stage + kAhead) * kStageBytes;
      hopper::mbarrier_wait(barriers + (stage + kAhead) * sizeof(RingStage), parity);
      // Scales first: loads come back in order, and it is the data that a product waits for.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned scale_at = scale + at + 8 * i * Layout::kScaleBytes;
        key.scale[i] = KeyShare<Layout>::kOwnScale ? load_shared1(scale_at) : load_shared4(scale_at);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int piece = 0; piece < KeyShare<Layout>::kPieces; ++piece) {
          key.data[i][piece] = load_shared16(data + at + 8 * i * Layout::kDataBytes + 64 * piece);
        }
      }
    }

    // Its stage may be filled again: behind the product that was issued with it, so that the loads have come back. An
    // arrival does not wait for loads ahead of it, and the copy that it lets go would overwrite what they read.
    template <int kAhead = 0>
    __device__ __forceinline__ void release(bool leads) const {
      __syncwarp();
      hopper::mbarrier_arrive_if(barriers + (stage + kAhead) * sizeof(RingStage) + offsetof(RingStage, empty), leads);
    }

    // On by as many tiles, none of them beyond the ring's end.
    template <int kTiles>
    __device__ __forceinline__ void advance() {
      static_assert(kTiles == 1 || (kTiles == 2 && kStages % 2 == 0), "pairs begin at even stages");
      stage += kTiles;
      if (stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  // Brings to L2 what `fill` will copy for a tile of these halves.
  __device__ __forceinline__ static void prefetch(const HalfTile& low, const HalfTile& high) {
    if (whole_group(low, high)) {
      hopper::prefetch_bulk(low.data, kStageBytes);
    } else {
      hopper::prefetch_bulk(low.data, kData);
      hopper::prefetch_bulk(high.data, kData);
      hopper::prefetch_bulk(low.scale, kScale);
      hopper::prefetch_bulk(high.scale, kScale);
    }
  }

  // Fills a team's stages with its share of a block's `tiles`, two of `halves` each; one warp.
  __device__ __forceinline__ static void fill(unsigned stages, RingBarriers<kTeams>& barriers, const HalfTile* halves,
                                              int tiles, int team) {
    const unsigned first = keep(stages + team * (kStages * kStageBytes));
    const unsigned full = keep(shared_address(&barriers.of[team][0]));
    const bool copies = hopper::elect_one();
    unsigned stage = kFirst, parity = 0;
#pragma unroll 1
    for (int tile = team; tile < tiles; tile += kTeams) {
      const HalfTile low = halves[2 * tile], high = halves[2 * tile + 1];
      const unsigned to = first + stage * kStageBytes, barrier = full + stage * sizeof(RingStage);
      hopper::mbarrier_wait(barrier + offsetof(RingStage, empty), parity ^ 1);
      if (copies) {
        hopper::mbarrier_expect(barrier, kStageBytes);
        if (whole_group(low, high)) {
          hopper::copy_bulk(to, low.data, kStageBytes, barrier);
        } else {
          hopper::copy_bulk(to, low.data, kData, barrier);
          hopper::copy_bulk(to + kData, high.data, kData, barrier);
          hopper::copy_bulk(to + 2 * kData, low.scale, kScale, barrier);
          hopper::copy_bulk(to + 2 * kData + kScale, high.scale, kScale, barrier);
        }
      }
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    __syncwarp();
  }

 private:
  static constexpr unsigned kData = kHalfTile * Layout::kDataBytes, kScale = kHalfTile * Layout::kScaleBytes;
  // It stands in the pool as in a stage.
  __device__ __forceinline__ static bool whole_group(const HalfTile& low, const HalfTile& high) {
    return high.data == low.data + kData && low.scale == low.data + 2 * kData;
  }
};

// A stage holds what each thread copied for itself: its 16-byte pieces, and the keys' scales, which one thread of a quad
// copies for all four. (Loads into registers would be waited for together, however early they were issued.)
template <typename Layout, int kTeams, int kStages>
struct AsyncRing {
  static constexpr int kStageBytes = kKeyTile * (Layout::kDataBytes + Layout::kScaleBytes);
  static constexpr int kBytes = kTeams * kStages * kStageBytes;
  static constexpr int kPieces = KeyShare<Layout>::kPieces;

  // A thread's places in its team's first stage and in a half of a tile.
  unsigned data, scale, scale_copy;    // in the stage: read, read, written
  unsigned source_data, source_scale;
  unsigned stage, next_stage;

  __device__ __forceinline__ AsyncRing(unsigned stages, int team, int warp, int lane) {
    const unsigned first = stages + team * (kStages * kStageBytes), key = (lane >> 2) + 8 * (lane & 1);
    const unsigned within = kHalfTile / 2 * (warp & 1);
    data = keep(first + 16 * (32 * warp + lane));
    scale = keep(first + kKeyTile * Layout::kDataBytes + 4 * (16 * warp + (lane >> 2)));
    scale_copy = keep(first + kKeyTile * Layout::kDataBytes + 4 * (16 * warp + key));
    source_data = keep((within + (lane >> 2)) * Layout::kDataBytes + 16 * (lane & 3));
    source_scale = keep((within + key) * Layout::kScaleBytes);
    stage = 0;
    next_stage = (kStages - 1) * kStageBytes;
  }

  // Starts loading the warp's part of the team's tile `i` of `count`; `halves` are the warp's, one of every tile of it.
  __device__ __forceinline__ void copy(const HalfTile* halves, int i, int count, unsigned to, int lane) const {
    if (i < count) {
      const HalfTile half = halves[2 * kTeams * i];
      const uint8_t* source = half.data + source_data;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          copy_async16(data + to + 2048 * (row * kPieces + piece), source + 8 * row * Layout::kDataBytes + 64 * piece);
        }
      }
      if ((lane & 2) == 0) copy_async4(scale_copy + to, half.scale + source_scale);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ void start(const HalfTile* halves, int count, int lane) const {
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy(halves, i, count, i * kStageBytes, lane);
  }

  // Reads the key of tile `i` and starts a copy into the stage that the warp read before.
  __device__ __forceinline__ void read(const HalfTile* halves, int i, int count, int lane, KeyShare<Layout>& key) {
    copy_async_wait<kStages - 2>();
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        key.data[row][piece] = load_shared16(data + stage + 2048 * (row * kPieces + piece));
      }
      key.scale[row] = load_shared4(scale + stage + 32 * row);
    }
    copy(halves, i + kStages - 1, count, next_stage, lane);
    next_stage = stage;
    stage = stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }
};

}  // namespace dsv4
