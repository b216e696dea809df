// Attention on Hopper: a block takes 64 heads of a query and a range of its tiles.
//
// Four warpgroups, two tiles of 64 rows deep. Two producers turn rows into bf16 panels in shared memory, one half of every
// tile each; a warp keeps its eight rows of the next tile in flight in registers, each part asked for as soon as the part
// before it there is decoded, and those of the tile behind in the second-level cache. Two consumers split the work so that
// neither half of it is done twice: each multiplies the queries with one half of a tile (64 heads x 32 rows x 512), then,
// after exchanging probabilities through shared memory, each accumulates one half of the channels over all of it (64 heads
// x 256 channels x 64 rows). Meanwhile the producers fill the other tile.
//
// A maximum is raised only where it grew by more than 2^8: until then probabilities above one are as exact as others, the
// 128 accumulators of a thread need no rescaling, and the consumers need not know each other's maxima.
//
// A query's tiles may be cut among the blocks of a cluster. Each of them finishes some of the heads, eight at a time: the
// others send their accumulators of those heads into its shared memory, to the very threads that hold its own. No
// workspace, no second launch. Groups of clusters (few queries, very many columns) leave partial results for
// combine_kernel.
#pragma once

#include "dsv4/attention.cuh"
#include "dsv4/grid.cuh"

namespace dsv4 {
namespace hopper {

constexpr int kBlockHeads = 64;
constexpr int kAttentionThreads = 512;
constexpr int kConsumerRegisters = 176, kProducerRegisters = 80;  // 4 x 128 in all
constexpr int kStages = 2;                       // tiles in shared memory
constexpr int kHalfRows = kTileRows / 2;         // of a tile: a producer's, and a consumer's to score
constexpr int kHeadPanel = kBlockHeads * 128;    // bytes: 64 heads x 64 channels or rows of bf16
constexpr int kRowPanel = kHalfRows * 128;       // bytes: 32 rows x 64 channels of bf16
constexpr int kPanels = kHeadDim / 64;
constexpr int kHalf = kPanels * kRowPanel;       // 32 rows x 512 channels
constexpr float kRaise = 8.0f;                   // base-2 growth of a maximum that is let pass
constexpr int kShareHeads = 8;                   // of the heads that a block of a cluster finishes
constexpr int kShares = kBlockHeads / kShareHeads;
constexpr int kShareBytes = kShareHeads * kHeadDim * 2;  // half precision
constexpr int kMaxSlots = 7;                     // shares that a block receives: 4 of 1 other, 2 of 3, 1 of 7

struct AttentionShared {
  uint8_t q[kPanels * kHeadPanel];  // [panel][head]; later the output
  uint8_t rows[kStages][2][kHalf];  // [stage][half of the tile][panel][row]; later shares of other blocks
  uint8_t p[kStages][kHeadPanel];   // [stage][head], probabilities of a tile's rows
  float maximum[2][kBlockHeads];
  float sum[2][kBlockHeads];
  float2 stats[kMaxSlots][kShareHeads];  // maxima and sums of other blocks
  float units[kMaxSlots][2][32];         // what a lane's share of them is in
  float sink[kBlockHeads], rope[kRopeDim];
  unsigned valid[kStages][2][4];  // [stage][half][producer warp], bit 4 r: its row r exists
  uint64_t full[kStages][2], empty[kStages], received;
  int last;
};
constexpr int kAttentionShared = sizeof(AttentionShared) + 1024;
static_assert(kAttentionShared <= 227 * 1024 && kMaxSlots * kShareBytes <= kStages * 2 * kHalf);

// ---- producers ----

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

// ---- consumers ----

// Where a consumer thread stands: which half of a tile it scores, and of the channels it accumulates.
struct ConsumerThread {
  int group, warp, lane, head;  // the first of its two heads; the other one is 8 more

  __device__ __forceinline__ ConsumerThread(int group_of, int warp_of, int lane_of)
      : group(group_of), warp(warp_of), lane(lane_of), head(16 * warp_of + (lane_of >> 2)) {}
  __device__ __forceinline__ static void all_meet() { named_barrier(1, 256); }
  __device__ __forceinline__ static bool any(bool condition) { return named_barrier_or(1, 256, condition); }
};

struct ConsumerState {
  // Heads 16 warp + lane / 4 and 8 more, channels 256 group + 128 half + 8 j + 2 (lane % 4) and the next. (Two products
  // of 128 channels: one of 256 would need more registers than a thread starts with.)
  float o[2][64];
  float maximum[2];  // of the two heads, base 2
  float sum[2];      // over this thread's columns

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int j = 0; j < 128; ++j) o[j >> 6][j & 63] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 128; ++j) o[j >> 6][j & 63] *= factor[(j >> 1) & 1];
  }
  // Four of head 8 i further on: 0 <= k < 16.
  __device__ __forceinline__ float& value(int i, int k, int c) {
    return o[k >> 3][4 * (2 * (k & 7) + (c >> 1)) + 2 * i + (c & 1)];
  }
};

// Asks for the queries, all of them by the consumers, and for the sinks.
template <typename Rows>
__device__ __forceinline__ void load_queries(const AttentionParams<Rows>& p, AttentionShared& shared, int token,
                                             int first_head) {
  const unsigned target = shared_address(shared.q);
#pragma unroll
  for (int i = 0; i < kBlockHeads * 64 / 256; ++i) {
    const int at = threadIdx.x + 256 * i, head = at >> 6, unit = at & 63;
    const bool real = first_head + head < p.heads;
    const __nv_bfloat16* source = p.q + token * p.q_stride + (first_head + (real ? head : 0)) * kHeadDim + 8 * unit;
    copy_async16(target + (unit >> 3) * kHeadPanel + panel_offset(head, unit & 7), source, real);
  }
  if (threadIdx.x < kBlockHeads) {
    const int head = min(first_head + static_cast<int>(threadIdx.x), p.heads - 1);
    copy_async4(shared_address(&shared.sink[threadIdx.x]), p.sink + head);
  }
  copy_async_commit();
}
// Waits for the queries and asks for the rotation at `rope`, which is there once copy_async_wait<0>() has returned.
__device__ __forceinline__ void wait_queries(AttentionShared& shared, const float* rope) {
  if (threadIdx.x < kRopeDim) copy_async4(shared_address(&shared.rope[threadIdx.x]), rope + threadIdx.x);
  copy_async_commit();
  copy_async_wait<1>();
  fence_async_shared();
  ConsumerThread::all_meet();
}

// A half of a tile is there.
template <typename Rows>
__device__ __forceinline__ void wait_half(AttentionShared& shared, int stage, int half, unsigned parity) {
  mbarrier_wait(&shared.full[stage][half], parity);
  if (!Rows::kFixedTiles) fence_async_shared();  // copies; who stores rows has fenced them
}

// s[64 heads x 32 rows]: the queries times a half of a tile.
__device__ __forceinline__ void multiply_half(AttentionShared& shared, int stage, int group, float (&s)[16]) {
  const unsigned queries = panel_start(shared_address(shared.q));
  const unsigned rows = panel_start(shared_address(shared.rows[stage][group]));
  wgmma_registers(s);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 32; ++k) {
    const unsigned at_query = queries + (((k >> 2) * kHeadPanel + (k & 3) * 32) >> 4);
    wgmma_bf16_64x32x16(s, panel_at(at_query), panel_at(rows + (((k >> 2) * kRowPanel + (k & 3) * 32) >> 4)), k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(s);
}

// Scales logits, masks what is not there; the two heads' maxima over the half, in every thread of a quad.
__device__ __forceinline__ void mask_half(const AttentionShared& shared, int stage, const ConsumerThread& at, float scale,
                                          float (&s)[16], float (&top)[2]) {
  top[0] = top[1] = -INFINITY;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned valid = shared.valid[stage][at.group][j] >> (8 * (at.lane & 3));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[4 * j + i];
      x = valid & (1u << (4 * (i & 1))) ? x * scale : -INFINITY;
      top[i >> 1] = fmaxf(top[i >> 1], x);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 1));
    top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 2));
  }
}

// Whether a maximum must be raised.
__device__ __forceinline__ bool outgrown(const ConsumerState& state, const float (&top)[2]) {
  return top[0] > state.maximum[0] + kRaise || top[1] > state.maximum[1] + kRaise;
}

// Raises the maxima to those of a tile where that is due, and brings accumulators and sums along.
__device__ __forceinline__ void raise_maxima(ConsumerState& state, const float (&top)[2]) {
  float factor[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (top[i] > state.maximum[i] + kRaise) {
      // The first finite maximum meets accumulators that are zero.
      factor[i] = state.maximum[i] == -INFINITY ? 1.0f : exp2_fast(state.maximum[i] - top[i]);
      state.maximum[i] = top[i];
      state.sum[i] *= factor[i];
    }
  }
  if (__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) state.rescale(factor);
}

// Logits to probabilities in shared memory; this thread's sums of them as they were rounded.
__device__ __forceinline__ void weigh_half(AttentionShared& shared, int stage, const ConsumerThread& at,
                                           const ConsumerState& state, const float (&s)[16], float (&sum)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float base = state.maximum[i] == -INFINITY ? 0.0f : state.maximum[i];
    uint8_t* const row = shared.p[stage] + 4 * (at.lane & 3);
    sum[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float even = exp2_fast(s[4 * j + 2 * i] - base), odd = exp2_fast(s[4 * j + 2 * i + 1] - base);
      const unsigned pair = pack_bf16(even, odd);
      const float2 rounded = unpack_bf16(pair);
      sum[i] += rounded.x + rounded.y;
      *reinterpret_cast<unsigned*>(row + panel_offset(at.head + 8 * i, 4 * at.group + j)) = pair;
    }
  }
  fence_async_shared();
}

// A half's logits become probabilities of both groups' maxima. Ends when both halves are there.
__device__ __forceinline__ void weigh(AttentionShared& shared, int stage, const ConsumerThread& at, ConsumerState& state,
                                      const float (&s)[16], float (&top)[2]) {
  float sum[2];
  weigh_half(shared, stage, at, state, s, sum);
  if (ConsumerThread::any(outgrown(state, top))) {
    // Once more, over maxima that both groups know.
    if ((at.lane & 3) == 0) {
      shared.maximum[at.group][at.head] = top[0];
      shared.maximum[at.group][at.head + 8] = top[1];
    }
    ConsumerThread::all_meet();
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], shared.maximum[1 - at.group][at.head + 8 * i]);
    raise_maxima(state, top);
    weigh_half(shared, stage, at, state, s, sum);
    ConsumerThread::all_meet();
  }
  state.sum[0] += sum[0];
  state.sum[1] += sum[1];
}

// o[64 heads x 256 channels] += the probabilities times the tile.
__device__ __forceinline__ void accumulate(AttentionShared& shared, int stage, int group, ConsumerState& state) {
  wgmma_registers(state.o[0]);
  wgmma_registers(state.o[1]);
  wgmma_fence();
  const uint64_t weights = panel_descriptor(shared_address(shared.p[stage]));
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
    const unsigned rows = shared_address(shared.rows[stage][k >> 1]) + 4 * group * kRowPanel + (k & 1) * 16 * 128;
    const uint64_t values = panel_descriptor(rows, kRowPanel);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wgmma_bf16_64x128x16(state.o[half], weights + (32 * k >> 4), values + (2 * half * kRowPanel >> 4));
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_registers(state.o[0]);
  wgmma_registers(state.o[1]);
}

template <typename Rows>
__device__ __forceinline__ void consume(const AttentionParams<Rows>& p, AttentionShared& shared, ConsumerState& state,
                                        int begin, int end, const ConsumerThread& at) {
  const int other = 1 - at.group;
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % kStages;
    const unsigned parity = (tile - begin) / kStages & 1;
    float s[16], top[2];
    wait_half<Rows>(shared, stage, at.group, parity);
    multiply_half(shared, stage, at.group, s);
    mask_half(shared, stage, at, p.scale, s, top);
    weigh(shared, stage, at, state, s, top);
    // The other group has met its half, so this does not wait; it orders that half before this group's products.
    wait_half<Rows>(shared, stage, other, parity);
    accumulate(shared, stage, at.group, state);
    if (at.lane == 0) mbarrier_arrive(&shared.empty[stage]);
  }

  // Sums over all columns, in every thread of a head's quad.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    state.sum[i] += __shfl_xor_sync(kFullMask, state.sum[i], 1);
    state.sum[i] += __shfl_xor_sync(kFullMask, state.sum[i], 2);
    if ((at.lane & 3) == 0) shared.sum[at.group][at.head + 8 * i] = state.sum[i];
  }
  copy_async_wait<0>();
  ConsumerThread::all_meet();  // also: no product reads queries or rows any more, and the rotation is there
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] += shared.sum[other][at.head + 8 * i];
}

// ---- the end ----

// Which block of a cluster of 2^bits finishes which heads, kShareHeads at a time: in turn, so that all warps take part.
struct Shares {
  int bits, rank, count;  // of the block's 64 heads: shares that hold any

  __device__ __forceinline__ int others() const { return (1 << bits) - 1; }
  __device__ __forceinline__ int owner(int share) const { return share & others(); }
  __device__ __forceinline__ bool mine(int share) const { return share < count && owner(share) == rank; }
  // Where in the owner's shared memory those that it is sent of a share begin, and that of a block.
  __device__ __forceinline__ int first_slot(int share) const { return (share >> bits) * others(); }
  __device__ __forceinline__ int slot(int share, int sender) const {
    return first_slot(share) + sender - (sender > owner(share));
  }
  // Bytes that the others send to this block.
  __device__ __forceinline__ unsigned incoming() const {
    const int held = max(count - rank + others(), 0) >> bits;
    return held * others() * (kShareBytes + kShareHeads * sizeof(float2) + 64 * sizeof(float));
  }
};

// The power of two in which a lane sends accumulators, so that the largest lies in [2^14, 2^15) and everything above
// 2^-28 of it is a normal number in half precision, and its inverse.
struct Unit {
  float unit, inverse;

  __device__ __forceinline__ Unit(ConsumerState& state, int i) {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
#pragma unroll
      for (int c = 0; c < 4; ++c) largest = fmaxf(largest, fabsf(state.value(i, k, c)));
    }
    const unsigned exponent = max(__float_as_uint(largest) >> 23, 15u);
    unit = __uint_as_float((exponent - 14) << 23);
    inverse = __uint_as_float((268 - exponent) << 23);
  }
};

// Sends what this block has of the heads that others finish: what goes between multiprocessors takes longest, so in half
// precision.
__device__ __forceinline__ void send_shares(AttentionShared& shared, ConsumerState& state, const Shares& shares,
                                            const ConsumerThread& at) {
  const unsigned values = shared_address(shared.rows) + at.group * (kShareBytes / 2) + 16 * at.lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int share = 2 * at.warp + i, owner = shares.owner(share);
    if (share >= shares.count || owner == shares.rank) continue;
    const int slot = shares.slot(share, shares.rank);
    const unsigned barrier = cluster_address(shared_address(&shared.received), owner);
    const unsigned target = cluster_address(values + slot * kShareBytes, owner);
    const Unit in(state, i);
#pragma unroll
    for (int k = 0; k < 16; k += 2) {
      const auto pair = [&](int j, int c) {
        return pack_f16(state.value(i, j, c) * in.inverse, state.value(i, j, c + 1) * in.inverse);
      };
      cluster_send(target + 256 * k, make_uint4(pair(k, 0), pair(k, 2), pair(k + 1, 0), pair(k + 1, 2)), barrier);
    }
    const unsigned unit = shared_address(&shared.units[slot][at.group][at.lane]);
    cluster_send(cluster_address(unit, owner), in.unit, barrier);
    if (at.group == 0 && (at.lane & 3) == 0) {
      const unsigned stat = shared_address(&shared.stats[slot][at.lane >> 2]);
      cluster_send(cluster_address(stat, owner), make_float2(state.maximum[i], state.sum[i]), barrier);
    }
  }
}

// Brings a head's accumulators, this block's and what others sent from `slot` on, to their common maximum; all are
// multiplied with what `factor_of` makes of it and the common sum.
template <typename Factor>
__device__ __forceinline__ void merge_share(const AttentionShared& shared, ConsumerState& state, int i, int slot,
                                            int others, const ConsumerThread& at, const Factor& factor_of) {
  const float2* const stats = &shared.stats[slot][at.lane >> 2];
  float top = state.maximum[i];
  for (int other = 0; other < others; ++other) top = fmaxf(top, stats[other * kShareHeads].x);
  const auto weight_of = [&](float maximum) { return maximum == -INFINITY ? 0.0f : exp2_fast(maximum - top); };
  const float own = weight_of(state.maximum[i]);
  float sum = own * state.sum[i];
  for (int other = 0; other < others; ++other) {
    const float2 stat = stats[other * kShareHeads];
    sum += weight_of(stat.x) * stat.y;
  }
  state.maximum[i] = top;
  state.sum[i] = sum;
  const float factor = factor_of(top, sum), own_factor = own * factor;
#pragma unroll
  for (int k = 0; k < 16; ++k) {
#pragma unroll
    for (int c = 0; c < 4; ++c) state.value(i, k, c) *= own_factor;
  }
  const unsigned values = shared_address(shared.rows) + at.group * (kShareBytes / 2) + 16 * at.lane + slot * kShareBytes;
#pragma unroll 1
  for (int other = 0; other < others; ++other) {
    const float in = shared.units[slot + other][at.group][at.lane];
    const float weight = weight_of(stats[other * kShareHeads].x) * factor * in;
#pragma unroll
    for (int k = 0; k < 16; k += 2) {
      const uint4 raw = load_shared16(values + other * kShareBytes + 256 * k);
      const unsigned pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float2 v = unpack_f16(pairs[pair]);
        state.value(i, k + (pair >> 1), 2 * (pair & 1)) += weight * v.x;
        state.value(i, k + (pair >> 1), 2 * (pair & 1) + 1) += weight * v.y;
      }
    }
  }
}

// Derotates and stores a warp's eight heads 8 i further on, through shared memory, so that it stores whole rows.
template <typename Rows>
__device__ __forceinline__ void store_share(const AttentionParams<Rows>& p, AttentionShared& shared, ConsumerState& state,
                                            int i, int token, int first_head, const ConsumerThread& at) {
  if (at.group == 1) {
#pragma unroll
    for (int j = 24; j < 32; ++j) {
      float(&o)[64] = state.o[1];
      derotate(shared.rope, 4 * (j - 24) + (at.lane & 3), o[4 * (j - 16) + 2 * i], o[4 * (j - 16) + 2 * i + 1]);
    }
  }
  const int first = 16 * at.warp + kShareHeads * i;
  const unsigned staged = shared_address(shared.q) + (at.group * kBlockHeads + first) * 512;  // [head][256 channels]
  const unsigned matrix_row = staged + (at.lane & 7) * 512;
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    unsigned pairs[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float(&o)[64] = state.o[j >> 4];
      pairs[m] = pack_bf16(o[4 * ((j + m) & 15) + 2 * i], o[4 * ((j + m) & 15) + 2 * i + 1]);
    }
    store_matrices(matrix_row + (((j + (at.lane >> 3)) ^ (at.lane & 7)) << 4), pairs);
  }
  __syncwarp();
  const int64_t head = static_cast<int64_t>(token) * p.heads + first_head + first;
  __nv_bfloat16* target = p.out + head * kHeadDim + 256 * at.group + 8 * at.lane;
  const int heads = min(kShareHeads, p.heads - first_head - first);
#pragma unroll
  for (int row = 0; row < kShareHeads; ++row) {
    if (row >= heads) break;
    *reinterpret_cast<uint4*>(target + row * kHeadDim) = load_shared16(staged + row * 512 + ((at.lane ^ row) << 4));
  }
}

// Leaves a warp's eight heads 8 i further on for combine_kernel, as the `split`-th of `splits`.
template <typename Rows>
__device__ __forceinline__ void store_partial(const AttentionParams<Rows>& p, ConsumerState& state, int i, int token,
                                              int first_head, int split, int splits, const ConsumerThread& at) {
  const int head = first_head + at.head + kShareHeads * i;
  if (head >= p.heads) return;
  const int64_t place = (static_cast<int64_t>(token) * p.heads + head) * splits + split;
  float* const target = p.partial + place * kHeadDim + 256 * at.group + 2 * (at.lane & 3);
  if (state.sum[i] > 0.0f) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float(&o)[64] = state.o[j >> 4];
      *reinterpret_cast<float2*>(target + 8 * j) = make_float2(o[4 * (j & 15) + 2 * i], o[4 * (j & 15) + 2 * i + 1]);
    }
  }
  if (at.group == 0 && (at.lane & 3) == 0) p.partial_stat[place] = make_float2(state.maximum[i], state.sum[i]);
}

// Grid: (2^bits parts of a cluster x tokens, blocks of 64 heads, groups of clusters).
template <typename Rows>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams<Rows> p, const int bits) {
#if DSV4_HOPPER
  extern __shared__ uint8_t raw_shared[];
  AttentionShared& shared =
      *reinterpret_cast<AttentionShared*>(raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023));
  // Known to be the same in a warp, so that descriptors of products are computed once.
  const int lane = threadIdx.x & 31, block_warp = __shfl_sync(kFullMask, threadIdx.x >> 5, 0);
  const int warp = block_warp & 3, group = block_warp >> 2;
  const int token = blockIdx.x >> bits, first_head = blockIdx.y * kBlockHeads;
  const Shares shares = {bits, static_cast<int>(cluster_rank()),
                         (min(kBlockHeads, p.heads - first_head) + kShareHeads - 1) / kShareHeads};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i][0], kFullArrivals<Rows>);
      mbarrier_init(&shared.full[i][1], kFullArrivals<Rows>);
      mbarrier_init(&shared.empty[i], 8);
    }
    mbarrier_init(&shared.received, 1);
    mbarrier_init_fence();
    mbarrier_expect(shared_address(&shared.received), shares.incoming());
  }
  const int splits = gridDim.z, split = blockIdx.z;
  // Where the block's tiles begin (i = 0) and end (1).
  const auto part = [&](int tiles, int i) {
    const unsigned all = tiles * ((split << bits) + shares.rank + i);
    return static_cast<int>(splits == 1 ? all >> bits : all / (splits << bits));
  };
  if (group >= 2) {
    // These leave early: a barrier of the cluster waits for nobody who left.
    lower_registers<kProducerRegisters>();
    grid_dependency_wait();
    const int tiles = count_tiles(p.rows, token, &shared.last);
    produce(p.rows, shared, token, part(tiles, 0), part(tiles, 1), ProducerLane(group - 2, warp, lane));
    return;
  }
  raise_registers<kConsumerRegisters>();
  const ConsumerThread at(group, warp, lane);
  ConsumerState state;
  grid_dependency_wait();
  load_queries(p, shared, token, first_head);
  const float* const rope = rope_of(p, token);
  const int tiles = count_tiles(p.rows, token, &shared.last);
  state.start();
  wait_queries(shared, rope);
  consume(p, shared, state, part(tiles, 0), part(tiles, 1), at);
  if (bits > 0) {
    cluster_meet();  // no block reads its rows any more
    send_shares(shared, state, shares, at);
    if (shares.mine(2 * warp) || shares.mine(2 * warp + 1)) mbarrier_wait(&shared.received, 0);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!shares.mine(2 * warp + i)) continue;
    const auto factor_of = [&](float top, float sum) {
      return splits > 1 ? 1.0f : normaliser(top, sum, shared.sink[at.head + kShareHeads * i]);
    };
    merge_share(shared, state, i, shares.first_slot(2 * warp + i), shares.others(), at, factor_of);
    if (splits > 1) {
      store_partial(p, state, i, token, first_head, split, splits, at);
    } else {
      store_share(p, shared, state, i, token, first_head, at);
    }
  }
#endif
}

}  // namespace hopper
}  // namespace dsv4
