// The producers of the Hopper attention kernel: rows become bf16 panels in shared memory, half a tile a warpgroup.
#pragma once

#include "dsv4/attention_block.cuh"
#include "dsv4/grid.cuh"

namespace dsv4 {
namespace hopper {

constexpr int kWarpRows = 8;  // of a half tile in a producer warp

// Four lanes take a row and one in four of its 16-byte units: seven of codes, one for each scale, and two of rotated
// channels, even and odd, so that what eight lanes store together lies in eight different bank groups. Where there is no
// row the one before stays, or zeros: what nobody weighs need only be finite if what is weighed is.
struct PackedRow {
  static constexpr int kChunks = kNopeDim / kFp8Quant;
  uint4 data[kChunks + 2] = {};
  uint2 scales = {};

  struct Source {
    const uint8_t *row, *scales;
    bool real;

    __device__ __forceinline__ Source(const RowPool<MainFp8>& pool, int id) : real(id >= 0) {
      row = pool.data(max(id, 0));
      scales = pool.scale(max(id, 0));
    }
    // A lane's part of what it takes to have the row in the second-level cache.
    __device__ __forceinline__ void prefetch(int quarter) const {
      if (!real) return;
      prefetch_l2(row + 128 * quarter);
      prefetch_l2(quarter == 0 ? row + MainFp8::kDataBytes - 1 : scales);
    }
  };

  __device__ __forceinline__ void load_scales(const Source& from) { load8_if(scales, from.scales, from.real); }
  template <int i>
  __device__ __forceinline__ void load(const Source& from, int quarter) {
    if constexpr (i < kChunks) {
      load16_if<kFp8Quant * i>(data[i], from.row + 16 * quarter, from.real);
    } else {
      load16_if<kNopeDim + 16 * (i - kChunks)>(data[i], from.row + 32 * quarter, from.real);
    }
  }
  template <int i = 0>
  __device__ __forceinline__ void load_all(const Source& from, int quarter) {
    load<i>(from, quarter);
    if constexpr (i + 1 < kChunks + 2) load_all<i + 1>(from, quarter);
  }

  __device__ __forceinline__ bool large() const { return any_large(scales.x) || any_large(scales.y); }
  // `even` and `odd` are where the lane's units of the first panel go.
  template <bool kLarge, int i>
  __device__ __forceinline__ void store(unsigned even, unsigned odd, const uint2& of_chunks) const {
    if constexpr (i < kChunks) {
      uint4 values[2];
      decode_chunk<kLarge>(data[i], ((i < 4 ? of_chunks.x : of_chunks.y) >> (8 * (i & 3))) & 255u, values);
      store_shared16(even + i * kRowPanel, values[0]);
      store_shared16(odd + i * kRowPanel, values[1]);
    } else {
      store_shared16((i == kChunks ? even : odd) + kChunks * kRowPanel, data[i]);
    }
  }
  template <bool kLarge, int i = 0>
  __device__ __forceinline__ void turn_from(unsigned even, unsigned odd, const uint2& of_chunks, const Source& next,
                                            int quarter) {
    store<kLarge, i>(even, odd, of_chunks);
    load<i>(next, quarter);
    if constexpr (i + 1 < kChunks + 2) turn_from<kLarge, i + 1>(even, odd, of_chunks, next, quarter);
  }
  // Stores the row, and asks for the next in its place.
  template <bool kLarge>
  __device__ __forceinline__ void turn(unsigned even, unsigned odd, const Source& next, int quarter) {
    const uint2 of_chunks = scales;
    load_scales(next);
    turn_from<kLarge>(even, odd, of_chunks, next, quarter);
  }
};

// Where a producer's lane stands.
struct ProducerLane {
  int half, warp, lane;
  int row, quarter;  // of its warp's eight rows of the half, and of the row

  __device__ __forceinline__ ProducerLane(int half_of, int warp_of, int lane_of)
      : half(half_of), warp(warp_of), lane(lane_of), row(lane_of >> 2), quarter(lane_of & 3) {}
  __device__ __forceinline__ int first_row() const { return kWarpRows * warp; }
  // Its column of a tile.
  __device__ __forceinline__ int column() const { return kHalfRows * half + first_row() + row; }

  // There is room for the `count`-th tile of the block.
  __device__ __forceinline__ void wait_room(AttentionShared& shared, int count) const {
    if (count >= kStages) mbarrier_wait(&shared.empty[count % kStages], (count / kStages - 1) & 1);
  }
  __device__ __forceinline__ void announce(AttentionShared& shared, int stage, int id) const {
    const unsigned valid = __ballot_sync(kFullMask, id >= 0);
    if (lane == 0) shared.valid[stage][half][warp] = valid;
  }
};

// Fills a half of tiles [begin, end).
__device__ __forceinline__ void produce(const PackedRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        const ProducerLane& at) {
  if (begin >= end) return;
  const auto fetch = [&](int tile) { return rows.fetch(token, tile, at.column(), tile < end); };
  const auto source = [&](int tile, int id) { return PackedRow::Source(rows.pool(tile), id); };
  const Column first = fetch(begin), second = fetch(begin + 1);
  Column ahead = fetch(begin + 2);  // of the tile behind the one that is in the second-level cache
  int id = rows.row_of(first, begin);
  PackedRow packed;
  {
    const PackedRow::Source from = source(begin, id);
    packed.load_scales(from);
    packed.load_all(from, at.quarter);
  }
  int next_id = rows.row_of(second, begin + 1);
  source(begin + 1, next_id).prefetch(at.quarter);
  const unsigned lane_place = at.first_row() * 128 + panel_offset(at.row, 2 * at.quarter);
  // All loads of a turn share a scoreboard: what one waits for must have been asked for in the turn before.
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % kStages;
    const int id_behind = rows.row_of(ahead, tile + 2);
    ahead = fetch(tile + 3);
    source(tile + 2, id_behind).prefetch(at.quarter);
    at.wait_room(shared, tile - begin);
    at.announce(shared, stage, id);
    const unsigned even = shared_address(shared.rows[stage][at.half]) + lane_place, odd = even ^ 16;
    const PackedRow::Source next = source(tile + 1, next_id);
    if (__any_sync(kFullMask, packed.large())) {
      packed.turn<true>(even, odd, next, at.quarter);
    } else {
      packed.turn<false>(even, odd, next, at.quarter);
    }
    fence_async_shared();
    __syncwarp();
    if (at.lane == 0) mbarrier_arrive(&shared.full[stage][at.half]);
    id = next_id;
    next_id = id_behind;
  }
}

__device__ __forceinline__ void produce(const DenseRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        const ProducerLane& at) {
  const auto fetch = [&](int tile) { return rows.fetch(token, tile, at.column(), tile < end); };
  Column ahead = fetch(begin);
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % kStages;
    const int own_id = rows.row_of(ahead, tile);
    ahead = fetch(tile + 1);
    at.wait_room(shared, tile - begin);
    at.announce(shared, stage, own_id);
    const unsigned base = shared_address(shared.rows[stage][at.half]) + at.first_row() * 128;
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      const int id = __shfl_sync(kFullMask, own_id, 4 * row);
      const __nv_bfloat16* source = rows.workspace + max(id, 0) * rows.row_stride + 8 * at.lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int unit = 32 * i + at.lane;
        copy_async16(base + (unit >> 3) * kRowPanel + panel_offset(row, unit & 7), source + 256 * i, id >= 0);
      }
    }
    // Every lane arrives when its copies have landed, and the one that told which rows exist for that.
    mbarrier_arrive_copied(&shared.full[stage][at.half]);
    if (at.lane == 0) mbarrier_arrive(&shared.full[stage][at.half]);
  }
}

template <typename Rows>
constexpr int kFullArrivals = Rows::kFixedTiles ? 4 : 128 + 4;

}  // namespace hopper
}  // namespace dsv4
