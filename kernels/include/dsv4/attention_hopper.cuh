// Attention on Hopper: a block takes 64 heads of a query and a range of its tiles.
//
// Four warpgroups, two tiles of 64 rows deep. Two producers turn rows into bf16 panels in shared memory, one half of every
// tile each; a warp keeps its eight rows of the next tile in flight in registers, and asks for a pair of them as soon as
// it has decoded the pair before in their place. Two consumers split the work so that neither half of it is done twice:
// each multiplies the queries with one half of a tile (64 heads x 32 rows x 512), then, after exchanging maxima and
// probabilities through shared memory, each accumulates one half of the channels over all of it (64 heads x 256
// channels x 64 rows). Meanwhile the producers fill the other tile.
//
// A maximum is raised only where it grew by more than 2^8: until then probabilities above one are as exact as others,
// and the 128 accumulators of a thread need no rescaling.
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
constexpr int kShareHeads = 8;                   // of the heads that a block of a cluster finishes, or a part of them
constexpr int kShareBytes = kShareHeads * kHeadDim * sizeof(float);
constexpr int kMaxShares = 7;                    // that a block receives: up to 2 of 3 others, 4 of 1, 1 of 7

struct AttentionShared {
  uint8_t q[kPanels * kHeadPanel];  // [panel][head]; later the output
  uint8_t rows[kStages][2][kHalf];  // [stage][half of the tile][panel][row]; later shares of other blocks
  uint8_t p[kHeadPanel];            // [head], probabilities of a tile's rows
  float maximum[2][kBlockHeads];
  float sum[2][kBlockHeads];
  float2 stats[kMaxShares][kShareHeads];  // maxima and sums of other blocks
  uint8_t valid[kStages][2][4];           // [stage][half][producer warp]: which of its rows exist
  uint64_t full[kStages][2], empty[kStages];
  int last;
};
constexpr int kAttentionShared = sizeof(AttentionShared) + 1024;
static_assert(kAttentionShared <= 227 * 1024 && kMaxShares * kShareBytes <= kStages * 2 * kHalf);

// ---- producers ----

constexpr int kWarpRows = 8;  // of a half tile in a producer warp

// A warp's packed rows, as loaded. Two loads cover a pair of rows: eight lanes take four chunks of 16 codes of each, so
// that the panel units they store later lie in eight different bank groups. The second load's last lanes take the even
// units of the rotated channels, and one more load the odd ones of all rows.
struct PackedWarp {
  uint4 data[kWarpRows], rotated;
  uint2 scales;  // of row lane % 8

  static __device__ __forceinline__ const uint8_t* data_of(const RowPool<MainFp8>& pool, int id) {
    const unsigned row = static_cast<unsigned>(id);
    return pool.base + (row / kGroupRows) * pool.group_stride + (row % kGroupRows) * MainFp8::kDataBytes;
  }

  // `ids` holds in lane r the warp's row r % 8.
  __device__ __forceinline__ void load_pair(const RowPool<MainFp8>& pool, int ids, int pair, int lane) {
    const int chunk = 4 * (lane >> 3) + (lane & 3);
    const int id = __shfl_sync(kFullMask, ids, 2 * pair + ((lane >> 2) & 1));
    const uint8_t* source = data_of(pool, id);
    data[2 * pair] = load_once16_if(source + 16 * chunk, id >= 0);
    data[2 * pair + 1] = load_once16_if(source + (lane < 24 ? 16 * (16 + chunk) : kNopeDim + 32 * (lane & 3)), id >= 0);
  }
  // The scales, and the odd units of the rotated channels.
  __device__ __forceinline__ void load_rest(const RowPool<MainFp8>& pool, int ids, int lane) {
    const int id = __shfl_sync(kFullMask, ids, lane >> 2);
    rotated = load_once16_if(data_of(pool, id) + kNopeDim + 32 * (lane & 3) + 16, id >= 0);
    scales = load8_if(pool.scale(static_cast<unsigned>(ids)), ids >= 0);
  }
  __device__ __forceinline__ void load(const RowPool<MainFp8>& pool, int ids, int lane) {
    load_rest(pool, ids, lane);
#pragma unroll
    for (int pair = 0; pair < kWarpRows / 2; ++pair) load_pair(pool, ids, pair, lane);
  }

  // What the lane's two chunks of each pair are scaled with: byte `pair` of both.
  __device__ __forceinline__ uint2 scales_of_pairs(int lane) const {
    uint2 all = make_uint2(0, 0);
#pragma unroll
    for (int pair = 0; pair < kWarpRows / 2; ++pair) {
      const unsigned row = 2 * pair + ((lane >> 2) & 1);
      const unsigned low = __shfl_sync(kFullMask, scales.x, row) >> (lane & 24);
      const unsigned high = __shfl_sync(kFullMask, scales.y, row) >> (lane & 24);
      // Byte 0 of the new one to where `pair` says.
      const unsigned selector = 0x3210u & ~(0xfu << (4 * pair)) | 4u << (4 * pair);
      all.x = __byte_perm(all.x, low, selector);
      all.y = __byte_perm(all.y, high, selector);
    }
    return all;
  }

  // Where the warp's rows begin in the panels of a half tile, and a lane's place there: of unit 2 (lane % 4) in row
  // lane / 4 % 2. Another row and unit of the lane's is the same address with other bits, and a multiple of 256 more.
  static __device__ __forceinline__ unsigned place(unsigned half, int first_row, int lane) {
    const unsigned row = (lane >> 2) & 1;
    return half + (lane >> 3) * kRowPanel + first_row * 128 + panel_offset(row, 2 * (lane & 3));
  }
  __device__ __forceinline__ void store_pair(unsigned place, int pair, const uint2& of_pairs, int lane) const {
    const unsigned even = (place ^ (32 * pair)) + 256 * pair, odd = (place ^ (32 * pair + 16)) + 256 * pair;
    uint4 values[2];
    decode_chunk(data[2 * pair], (of_pairs.x >> (8 * pair)) & 255u, values);
    store_shared16(even, values[0]);
    store_shared16(odd, values[1]);
    if (lane < 24) {
      decode_chunk(data[2 * pair + 1], (of_pairs.y >> (8 * pair)) & 255u, values);
      store_shared16(even + 4 * kRowPanel, values[0]);
      store_shared16(odd + 4 * kRowPanel, values[1]);
    } else {
      store_shared16(even + 4 * kRowPanel, data[2 * pair + 1]);
    }
  }
  __device__ __forceinline__ void store_rotated(unsigned half, int first_row, int lane) const {
    store_shared16(half + 7 * kRowPanel + panel_offset(first_row + (lane >> 2), 2 * (lane & 3) + 1), rotated);
  }
};

// Where a producer warp stands.
struct ProducerWarp {
  int half, warp, lane, first_row;  // of its rows in the half

  __device__ __forceinline__ ProducerWarp(int half_of, int warp_of, int lane_of)
      : half(half_of), warp(warp_of), lane(lane_of), first_row(kWarpRows * warp_of) {}
  // The lane's column of a tile.
  __device__ __forceinline__ int column() const { return kHalfRows * half + first_row + (lane & 7); }

  // There is room for the `count`-th tile of the block.
  __device__ __forceinline__ void wait_room(AttentionShared& shared, int count) const {
    if (count >= kStages) mbarrier_wait(&shared.empty[count % kStages], (count / kStages - 1) & 1);
  }
  __device__ __forceinline__ void announce(AttentionShared& shared, int stage, int ids) const {
    const unsigned valid = __ballot_sync(kFullMask, ids >= 0);
    if (lane == 0) shared.valid[stage][half][warp] = static_cast<uint8_t>(valid & 255u);
  }
};

// Fills a half of tiles [begin, end).
__device__ __forceinline__ void produce(const PackedRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        const ProducerWarp& at) {
  if (begin >= end) return;
  const auto fetch = [&](int tile) { return rows.fetch(token, tile, at.column(), tile < end); };
  Column ahead = fetch(begin + 1);  // of the tile behind the one whose rows are under way
  int ids = rows.row_of(fetch(begin), begin);
  PackedWarp packed;
  packed.load(rows.pool(begin), ids, at.lane);
  // All loads of a turn share a scoreboard: what one waits for must have been asked for in the turn before.
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % kStages;
    const RowPool<MainFp8>& pool = rows.pool(tile + 1);
    const int next_ids = rows.row_of(ahead, tile + 1);
    at.wait_room(shared, tile - begin);
    at.announce(shared, stage, ids);
    const unsigned half = shared_address(shared.rows[stage][at.half]);
    const unsigned place = PackedWarp::place(half, at.first_row, at.lane);
    const uint2 of_pairs = packed.scales_of_pairs(at.lane);
    packed.store_rotated(half, at.first_row, at.lane);
    ahead = fetch(tile + 2);
    packed.load_rest(pool, next_ids, at.lane);
#pragma unroll
    for (int pair = 0; pair < kWarpRows / 2; ++pair) {
      packed.store_pair(place, pair, of_pairs, at.lane);
      packed.load_pair(pool, next_ids, pair, at.lane);
    }
    fence_async_shared();
    __syncwarp();
    if (at.lane == 0) mbarrier_arrive(&shared.full[stage][at.half]);
    ids = next_ids;
  }
}

__device__ __forceinline__ void produce(const DenseRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        const ProducerWarp& at) {
  const auto fetch = [&](int tile) { return rows.fetch(token, tile, at.column(), tile < end); };
  Column ahead = fetch(begin);
#pragma unroll 1
  for (int tile = begin; tile < end; ++tile) {
    const int stage = (tile - begin) % kStages;
    const int ids = rows.row_of(ahead, tile);
    ahead = fetch(tile + 1);
    at.wait_room(shared, tile - begin);
    at.announce(shared, stage, ids);
    const unsigned base = shared_address(shared.rows[stage][at.half]);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      const int id = __shfl_sync(kFullMask, ids, row);
      const __nv_bfloat16* source = rows.workspace + max(id, 0) * rows.row_stride + 8 * at.lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int unit = 32 * i + at.lane;
        copy_async16(base + (unit >> 3) * kRowPanel + panel_offset(at.first_row + row, unit & 7), source + 256 * i,
                     id >= 0);
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

// Asks for the queries, all of them by the consumers; wait_queries() ends it.
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
  copy_async_commit();
}
__device__ __forceinline__ void wait_queries() {
  copy_async_wait<0>();
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
  const unsigned valid = *reinterpret_cast<const unsigned*>(shared.valid[stage][at.group]) >> (2 * (at.lane & 3));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[4 * j + i];
      x = valid & (1u << (8 * j + (i & 1))) ? x * scale : -INFINITY;
      top[i >> 1] = fmaxf(top[i >> 1], x);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 1));
    top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 2));
  }
}

// Raises the maxima to those of a tile where that is due, and brings accumulators and sums along.
__device__ __forceinline__ void raise_maxima(ConsumerState& state, const float (&top)[2]) {
  float factor[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (top[i] > state.maximum[i] + kRaise || state.maximum[i] == -INFINITY) {
      // The first finite maximum meets accumulators that are zero.
      factor[i] = state.maximum[i] == -INFINITY ? 1.0f : exp2_fast(state.maximum[i] - top[i]);
      state.maximum[i] = top[i];
      state.sum[i] *= factor[i];
    }
  }
  if (__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) state.rescale(factor);
}

// Logits to probabilities in shared memory, summed as they were rounded.
__device__ __forceinline__ void weigh_half(AttentionShared& shared, const ConsumerThread& at, const float (&s)[16],
                                           ConsumerState& state) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float base = state.maximum[i] == -INFINITY ? 0.0f : state.maximum[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float even = exp2_fast(s[4 * j + 2 * i] - base), odd = exp2_fast(s[4 * j + 2 * i + 1] - base);
      const unsigned pair = pack_bf16(even, odd);
      const float2 rounded = unpack_bf16(pair);
      state.sum[i] += rounded.x + rounded.y;
      *reinterpret_cast<unsigned*>(shared.p + panel_offset(at.head + 8 * i, 4 * at.group + j) + 4 * (at.lane & 3)) = pair;
    }
  }
}

// o[64 heads x 256 channels] += the probabilities times the tile.
__device__ __forceinline__ void accumulate(AttentionShared& shared, int stage, int group, ConsumerState& state) {
  wgmma_registers(state.o[0]);
  wgmma_registers(state.o[1]);
  wgmma_fence();
  const uint64_t weights = panel_descriptor(shared_address(shared.p));
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
    if ((at.lane & 3) == 0) {
      shared.maximum[at.group][at.head] = top[0];
      shared.maximum[at.group][at.head + 8] = top[1];
    }
    ConsumerThread::all_meet();
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], shared.maximum[other][at.head + 8 * i]);
    raise_maxima(state, top);
    weigh_half(shared, at, s, state);
    fence_async_shared();
    ConsumerThread::all_meet();
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
  ConsumerThread::all_meet();  // also: no product reads queries or rows any more
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] += shared.sum[other][at.head + 8 * i];
}

// ---- the end ----

// Which block of a cluster finishes which heads, kShareHeads at a time.
struct Shares {
  int parts, rank, count;  // of the block's 64 heads: shares that hold any

  __device__ __forceinline__ int owner(int share) const { return share * parts / count; }
  __device__ __forceinline__ bool mine(int share) const { return share < count && owner(share) == rank; }
  // Where the share of a block lies in the owner's shared memory.
  __device__ __forceinline__ int slot(int share, int sender) const {
    const int to = owner(share), first = (to * count + parts - 1) / parts;
    return (share - first) * (parts - 1) + sender - (sender > to);
  }
};

// Sends what this block has of the heads that others finish.
__device__ __forceinline__ void send_shares(AttentionShared& shared, ConsumerState& state, const Shares& shares,
                                            const ConsumerThread& at) {
  const unsigned values = shared_address(shared.rows) + at.group * (kShareBytes / 2) + 16 * at.lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int share = 2 * at.warp + i;
    if (share >= shares.count || shares.owner(share) == shares.rank) continue;
    const int owner = shares.owner(share), slot = shares.slot(share, shares.rank);
    const unsigned target = cluster_address(values + slot * kShareBytes, owner);
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      cluster_store(target + 512 * k, make_float4(state.value(i, k, 0), state.value(i, k, 1), state.value(i, k, 2),
                                                  state.value(i, k, 3)));
    }
    if (at.group == 0 && (at.lane & 3) == 0) {
      const unsigned stat = shared_address(&shared.stats[slot][at.lane >> 2]);
      cluster_store(cluster_address(stat, owner), make_float2(state.maximum[i], state.sum[i]));
    }
  }
}

// Adds what the others sent of the heads that this block finishes.
__device__ __forceinline__ void add_shares(const AttentionShared& shared, ConsumerState& state, const Shares& shares,
                                           const ConsumerThread& at) {
  const unsigned values = shared_address(shared.rows) + at.group * (kShareBytes / 2) + 16 * at.lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int share = 2 * at.warp + i;
    if (!shares.mine(share)) continue;
    const int first = shares.slot(share, 0);
    const float2* const stats = &shared.stats[first][at.lane >> 2];
    float top = state.maximum[i];
    for (int other = 0; other < shares.parts - 1; ++other) top = fmaxf(top, stats[other * kShareHeads].x);
    const auto weight_of = [&](float maximum) { return maximum == -INFINITY ? 0.0f : exp2f(maximum - top); };
    const float own = weight_of(state.maximum[i]);
    state.maximum[i] = top;
    state.sum[i] *= own;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
#pragma unroll
      for (int c = 0; c < 4; ++c) state.value(i, k, c) *= own;
    }
#pragma unroll 1
    for (int other = 0; other < shares.parts - 1; ++other) {
      const float2 stat = stats[other * kShareHeads];
      const float weight = weight_of(stat.x);
      state.sum[i] += weight * stat.y;
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const uint4 raw = load_shared16(values + (first + other) * kShareBytes + 512 * k);
        state.value(i, k, 0) += weight * __uint_as_float(raw.x);
        state.value(i, k, 1) += weight * __uint_as_float(raw.y);
        state.value(i, k, 2) += weight * __uint_as_float(raw.z);
        state.value(i, k, 3) += weight * __uint_as_float(raw.w);
      }
    }
  }
}

// Normalises, derotates and stores the heads that this block finishes.
template <typename Rows>
__device__ __forceinline__ void store_heads(const AttentionParams<Rows>& p, AttentionShared& shared,
                                            ConsumerState& state, const Shares& shares, int token, int first_head,
                                            const ConsumerThread& at) {
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int global_head = min(first_head + at.head + 8 * i, p.heads - 1);
    factor[i] = normaliser(state.maximum[i], state.sum[i], p.sink[global_head]);
  }
  if (at.group == 1) {
    const float* rope = rope_of(p, token);
#pragma unroll
    for (int j = 24; j < 32; ++j) {
      const int pair = 4 * (j - 24) + (at.lane & 3);
      float(&o)[64] = state.o[1];
      derotate(rope, pair, o[4 * (j - 16)], o[4 * (j - 16) + 1]);
      derotate(rope, pair, o[4 * (j - 16) + 2], o[4 * (j - 16) + 3]);
    }
  }
  // Through shared memory, so that a warp stores whole rows: [head][256 channels] of this group.
  uint8_t* const staged = shared.q + at.group * kBlockHeads * 512;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!shares.mine(2 * at.warp + i)) continue;
    const int row = at.head + 8 * i;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float(&o)[64] = state.o[j >> 4];
      *reinterpret_cast<unsigned*>(staged + row * 512 + ((j ^ (row & 7)) << 4) + 4 * (at.lane & 3)) =
          pack_bf16(o[4 * (j & 15) + 2 * i] * factor[i], o[4 * (j & 15) + 2 * i + 1] * factor[i]);
    }
  }
  __syncwarp();  // a warp reads only the heads it wrote
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!shares.mine(2 * at.warp + i)) continue;
    const int first = 16 * at.warp + 8 * i;
#pragma unroll
    for (int r = 0; r < kShareHeads; ++r) {
      const int row = first + r;
      if (first_head + row >= p.heads) break;
      const uint4 v = *reinterpret_cast<const uint4*>(staged + row * 512 + ((at.lane ^ (row & 7)) << 4));
      __nv_bfloat16* target = p.out + (static_cast<int64_t>(token) * p.heads + first_head + row) * kHeadDim;
      *reinterpret_cast<uint4*>(target + 256 * at.group + 8 * at.lane) = v;
    }
  }
}

// Leaves the heads that this block finishes for combine_kernel, as the `split`-th of `splits`.
template <typename Rows>
__device__ __forceinline__ void store_partial(const AttentionParams<Rows>& p, ConsumerState& state, const Shares& shares,
                                              int token, int first_head, int split, int splits,
                                              const ConsumerThread& at) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + at.head + 8 * i;
    if (!shares.mine(2 * at.warp + i) || head >= p.heads) continue;
    const int64_t place = (static_cast<int64_t>(token) * p.heads + head) * splits + split;
    float* const target = p.partial + place * kHeadDim + 256 * at.group + 2 * (at.lane & 3);
    if (state.sum[i] > 0.0f) {
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const float(&o)[64] = state.o[j >> 4];
        *reinterpret_cast<float2*>(target + 8 * j) =
            make_float2(o[4 * (j & 15) + 2 * i], o[4 * (j & 15) + 2 * i + 1]);
      }
    }
    if (at.group == 0 && (at.lane & 3) == 0) p.partial_stat[place] = make_float2(state.maximum[i], state.sum[i]);
  }
}

// Grid: (parts of a cluster x tokens, blocks of 64 heads, groups of clusters).
template <typename Rows>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams<Rows> p, const int parts) {
#if DSV4_HOPPER
  extern __shared__ uint8_t raw_shared[];
  AttentionShared& shared =
      *reinterpret_cast<AttentionShared*>(raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023));
  // Known to be the same in a warp, so that descriptors of products are computed once.
  const int lane = threadIdx.x & 31, block_warp = __shfl_sync(kFullMask, threadIdx.x >> 5, 0);
  const int warp = block_warp & 3, group = block_warp >> 2;
  const int part = static_cast<int>(cluster_rank()), token = blockIdx.x / parts;
  const int first_head = blockIdx.y * kBlockHeads;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&shared.full[i][0], kFullArrivals<Rows>);
      mbarrier_init(&shared.full[i][1], kFullArrivals<Rows>);
      mbarrier_init(&shared.empty[i], 8);
    }
    mbarrier_init_fence();
  }
  grid_dependency_wait();
  if (group < 2) load_queries(p, shared, token, first_head);
  const int tiles = count_tiles(p.rows, token, &shared.last);
  const int splits = parts * gridDim.z, split = blockIdx.z * parts + part;
  const int begin = tiles * split / splits, end = tiles * (split + 1) / splits;

  if (group >= 2) {
    // These leave early: a barrier of the cluster waits for nobody who left.
    lower_registers<kProducerRegisters>();
    produce(p.rows, shared, token, begin, end, ProducerWarp(group - 2, warp, lane));
  } else {
    raise_registers<kConsumerRegisters>();
    const ConsumerThread at(group, warp, lane);
    ConsumerState state;
    state.start();
    wait_queries();
    consume(p, shared, state, begin, end, at);
    const Shares shares = {parts, part, (min(kBlockHeads, p.heads - first_head) + kShareHeads - 1) / kShareHeads};
    if (parts > 1) {
      cluster_sync();  // no block reads its rows any more
      send_shares(shared, state, shares, at);
      cluster_sync();
      add_shares(shared, state, shares, at);
    }
    if (gridDim.z > 1) {
      store_partial(p, state, shares, token, first_head, blockIdx.z, gridDim.z, at);
    } else {
      store_heads(p, shared, state, shares, token, first_head, at);
    }
  }
#endif
}

}  // namespace hopper
}  // namespace dsv4
