// Attention on Hopper: a block takes 64 heads of a query and a range of its tiles.
//
// Four warpgroups. Two producers turn rows into bf16 panels in shared memory, two tiles of 64 rows deep; a warp keeps its
// eight rows of the next tile in flight in registers while it waits for room. (One batch a warp: a warp waits for all of
// its loads together, so more batches in fewer warps would not overlap.) Two consumers split the work so that neither
// half of it is done twice and every product is a wide one: of a pair of tiles each
// multiplies the queries with one tile (64 heads x 64 rows x 512), then, after exchanging maxima and probabilities
// through shared memory, each accumulates one half of the channels over both tiles (64 heads x 256 channels x 128 rows).
// While the first tile's product runs the producer may still be writing the second one.
//
// A maximum is raised only where it grew by more than 2^8: until then probabilities above one are as exact as others,
// and the 128 accumulators of a thread need no rescaling.
//
// A query's tiles may be cut among the blocks of a cluster. They then read each other's accumulators from shared memory,
// each block finishing its share of the heads: no workspace, no second launch. Groups of clusters (few queries, very
// many columns) leave partial results for combine_kernel.
#pragma once

#include "dsv4/attention.cuh"

namespace dsv4 {
namespace hopper {

constexpr int kBlockHeads = 64;
constexpr int kAttentionThreads = 512;
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;  // 4 x 128 in all
constexpr int kPanel = 64 * 128;          // bytes: 64 rows x 64 channels of bf16
constexpr int kTile = 8 * kPanel;         // 64 rows x 512 channels
constexpr float kRaise = 8.0f;            // base-2 growth of a maximum that is let pass

struct AttentionShared {
  uint8_t q[kTile];        // [panel][head]
  uint8_t rows[2][kTile];  // [tile of the pair][panel][row]; later the accumulators
  uint8_t p[2][kPanel];    // [tile of the pair][head], probabilities of its 64 rows
  float maximum[2][kBlockHeads];
  float sum[2][kBlockHeads];
  float total_maximum[kBlockHeads], total_sum[kBlockHeads];  // read by the cluster
  uint8_t valid[2][8];     // [tile][producer warp]: which of its rows exist
  uint64_t full[2], empty[2];
  int last;
};
constexpr int kAttentionShared = sizeof(AttentionShared) + 1024;

// ---- producer ----

constexpr int kWarpRows = 8;  // of a tile in a producer warp

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
  __device__ __forceinline__ void load(const RowPool<MainFp8>& pool, int ids, int lane) {
    const int chunk = 4 * (lane >> 3) + (lane & 3);
#pragma unroll
    for (int pair = 0; pair < kWarpRows / 2; ++pair) {
      const int id = __shfl_sync(kFullMask, ids, 2 * pair + ((lane >> 2) & 1));
      const uint8_t* source = data_of(pool, max(id, 0));
      data[2 * pair] = data[2 * pair + 1] = make_uint4(0, 0, 0, 0);
      if (id >= 0) {
        data[2 * pair] = load_once16(source + 16 * chunk);
        data[2 * pair + 1] = load_once16(source + (lane < 24 ? 16 * (16 + chunk) : kNopeDim + 32 * (lane & 3)));
      }
    }
    const int id = __shfl_sync(kFullMask, ids, lane >> 2);
    rotated = make_uint4(0, 0, 0, 0);
    if (id >= 0) rotated = load_once16(data_of(pool, id) + kNopeDim + 32 * (lane & 3) + 16);
    scales = make_uint2(0, 0);
    if (ids >= 0) scales = *reinterpret_cast<const uint2*>(pool.scale(static_cast<unsigned>(ids)));
  }

  __device__ __forceinline__ void store(uint8_t* tile, int first_row, int lane) const {
    uint8_t* const base = tile + (lane >> 3) * kPanel + first_row * 128;
    const unsigned unit = 2 * (lane & 3);
#pragma unroll
    for (int pair = 0; pair < kWarpRows / 2; ++pair) {
      const unsigned row = 2 * pair + ((lane >> 2) & 1);
      const unsigned low = __shfl_sync(kFullMask, scales.x, row), high = __shfl_sync(kFullMask, scales.y, row);
      uint4 values[2];
      decode_chunk(data[2 * pair], (low >> (lane & 24)) & 255u, values);
      *reinterpret_cast<uint4*>(base + panel_offset(row, unit)) = values[0];
      *reinterpret_cast<uint4*>(base + panel_offset(row, unit + 1)) = values[1];
      uint8_t* const upper = base + 4 * kPanel;
      if (lane < 24) {
        decode_chunk(data[2 * pair + 1], (high >> (lane & 24)) & 255u, values);
        *reinterpret_cast<uint4*>(upper + panel_offset(row, unit)) = values[0];
        *reinterpret_cast<uint4*>(upper + panel_offset(row, unit + 1)) = values[1];
      } else {
        *reinterpret_cast<uint4*>(upper + panel_offset(row, unit)) = data[2 * pair + 1];
      }
    }
    *reinterpret_cast<uint4*>(tile + 7 * kPanel + panel_offset(first_row + (lane >> 2), unit + 1)) = rotated;
  }
};

__device__ __forceinline__ void announce(AttentionShared& shared, int buffer, int ids, int warp, int lane) {
  const unsigned valid = __ballot_sync(kFullMask, ids >= 0);
  if (lane == 0) shared.valid[buffer][warp] = static_cast<uint8_t>(valid & 255u);
}

// Fills tiles [begin, end). `warp` is the warp's place among the eight producers.
__device__ __forceinline__ void produce(const PackedRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        int warp, int lane) {
  const int first_row = kWarpRows * warp;
  const auto ids_of = [&](int tile) { return tile < end ? rows.row(token, tile, first_row + (lane & 7)) : -1; };
  int ids = ids_of(begin);
  PackedWarp packed;
  if (begin < end) packed.load(rows.pool(begin), ids, lane);
  for (int tile = begin; tile < end; ++tile) {
    const int buffer = (tile - begin) & 1, round = (tile - begin) >> 1;
    const int next_ids = ids_of(tile + 1);
    if (round > 0) mbarrier_wait(&shared.empty[buffer], (round - 1) & 1);
    announce(shared, buffer, ids, warp, lane);
    packed.store(shared.rows[buffer], first_row, lane);
    fence_async_shared();
    mbarrier_arrive(&shared.full[buffer]);
    ids = next_ids;
    if (tile + 1 < end) packed.load(rows.pool(tile + 1), ids, lane);
  }
}

__device__ __forceinline__ void produce(const DenseRows& rows, AttentionShared& shared, int token, int begin, int end,
                                        int warp, int lane) {
  const int first_row = kWarpRows * warp;
  const auto ids_of = [&](int tile) { return tile < end ? rows.row(token, tile, first_row + (lane & 7)) : -1; };
  int ids = ids_of(begin);
  for (int tile = begin; tile < end; ++tile) {
    const int buffer = (tile - begin) & 1, round = (tile - begin) >> 1;
    const int next_ids = ids_of(tile + 1);
    if (round > 0) mbarrier_wait(&shared.empty[buffer], (round - 1) & 1);
    announce(shared, buffer, ids, warp, lane);
    const unsigned base = shared_address(shared.rows[buffer]);
#pragma unroll
    for (int row = 0; row < kWarpRows; ++row) {
      const int id = __shfl_sync(kFullMask, ids, row);
      const __nv_bfloat16* source = rows.workspace + max(id, 0) * rows.row_stride + 8 * lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int unit = 32 * i + lane;
        copy_async16(base + (unit >> 3) * kPanel + panel_offset(first_row + row, unit & 7), source + 256 * i, id >= 0);
      }
    }
    // One arrival when the copies have landed, one for the valid bits.
    mbarrier_arrive_copied(&shared.full[buffer]);
    mbarrier_arrive(&shared.full[buffer]);
    ids = next_ids;
  }
}

template <typename Rows>
constexpr int kFullArrivals = Rows::kFixedTiles ? 256 : 512;

// ---- consumers ----

struct ConsumerState {
  // Heads 16 warp + lane / 4 and 8 more, channels 256 group + 128 half + 8 j + 2 (lane % 4) and the next. (Two products
  // of 128 channels: one of 256 would need more registers than a thread starts with.)
  float o[2][64];
  float maximum[2];  // of the two heads, base 2
  float sum[2];      // over this thread's columns
};

template <typename Rows>
__device__ __forceinline__ void load_queries(const AttentionParams<Rows>& p, AttentionShared& shared, int token,
                                             int first_head) {
  for (int at = threadIdx.x; at < kBlockHeads * 64; at += 256) {
    const int head = at >> 6, unit = at & 63;
    const bool real = first_head + head < p.heads;
    const __nv_bfloat16* source = p.q + token * p.q_stride + (first_head + (real ? head : 0)) * kHeadDim + 8 * unit;
    copy_async16(shared_address(shared.q) + (unit >> 3) * kPanel + panel_offset(head, unit & 7), source, real);
  }
  copy_async_commit();
  copy_async_wait<0>();
  fence_async_shared();
  named_barrier(1, 256);
}

template <typename Rows>
__device__ __forceinline__ void consume(const AttentionParams<Rows>& p, AttentionShared& shared, ConsumerState& state,
                                        int begin, int end, int group, int warp, int lane) {
  const int head = 16 * warp + (lane >> 2);
  const uint64_t queries = panel_descriptor(shared_address(shared.q));
  const uint64_t own_rows = panel_descriptor(shared_address(shared.rows[group]));

  for (int tile = begin; tile < end; tile += 2) {
    const unsigned parity = ((tile - begin) >> 1) & 1;
    const bool both = tile + 1 < end, mine = group == 0 || both;
    float s[32];
    float top[2] = {-INFINITY, -INFINITY};
    if (mine) {
      mbarrier_wait(&shared.full[group], parity);
      fence_async_shared();
      wgmma_registers(s);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 32; ++k) {
        const int step = ((k >> 2) * kPanel + (k & 3) * 32) >> 4;
        wgmma_bf16_64x64x16(s, queries + step, own_rows + step, k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_registers(s);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned bits = shared.valid[group][j] >> (2 * (lane & 3));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& x = s[4 * j + i];
          x = bits & (1u << (i & 1)) ? x * p.scale : -INFINITY;
          top[i >> 1] = fmaxf(top[i >> 1], x);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(kFullMask, top[i], 2));
      }
    }
    if ((lane & 3) == 0) {
      shared.maximum[group][head] = top[0];
      shared.maximum[group][head + 8] = top[1];
    }
    named_barrier(1, 256);

    float rescale[2], base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float highest = fmaxf(top[i], shared.maximum[1 - group][head + 8 * i]);
      rescale[i] = 1.0f;
      if (highest > state.maximum[i] + kRaise || state.maximum[i] == -INFINITY) {
        // The first finite maximum meets accumulators that are zero.
        rescale[i] = state.maximum[i] == -INFINITY ? 1.0f : exp2_fast(state.maximum[i] - highest);
        state.maximum[i] = highest;
        state.sum[i] *= rescale[i];
      }
      base[i] = state.maximum[i] == -INFINITY ? 0.0f : state.maximum[i];
    }
    if (mine) {
      uint8_t* const probabilities = shared.p[group];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float even = exp2_fast(s[4 * j + 2 * i] - base[i]), odd = exp2_fast(s[4 * j + 2 * i + 1] - base[i]);
          const unsigned pair = pack_bf16(even, odd);
          const float2 rounded = unpack_bf16(pair);  // what is multiplied is what is summed
          state.sum[i] += rounded.x + rounded.y;
          *reinterpret_cast<unsigned*>(probabilities + panel_offset(head + 8 * i, j) + 4 * (lane & 3)) = pair;
        }
      }
    }
    if (__any_sync(kFullMask, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int j = 0; j < 128; ++j) state.o[j >> 6][j & 63] *= rescale[(j >> 1) & 1];
    }
    fence_async_shared();
    named_barrier(1, 256);

    // The other group has met its tile, so this does not wait; it orders that tile before this group's products.
    if (group == 1 || both) mbarrier_wait(&shared.full[1 - group], parity);
    fence_async_shared();
    wgmma_registers(state.o[0]);
    wgmma_registers(state.o[1]);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      if (t == 0 || both) {
        wgmma_fence();
        const uint64_t weights = panel_descriptor(shared_address(shared.p[t]));
        const uint64_t values = panel_descriptor(shared_address(shared.rows[t]) + 4 * group * kPanel, kPanel);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            wgmma_bf16_64x128x16(state.o[half], weights + (32 * k >> 4),
                                 values + ((2 * half * kPanel + 16 * 128 * k) >> 4));
          }
        }
        wgmma_commit();
      }
    }
    if (both) {
      wgmma_wait<1>();
      if (lane == 0) mbarrier_arrive(&shared.empty[0]);
    }
    wgmma_wait<0>();
    wgmma_registers(state.o[0]);
    wgmma_registers(state.o[1]);
    if (lane == 0) mbarrier_arrive(&shared.empty[both ? 1 : 0]);
  }

  // Sums over all columns, in every thread of a head's quad.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    state.sum[i] += __shfl_xor_sync(kFullMask, state.sum[i], 1);
    state.sum[i] += __shfl_xor_sync(kFullMask, state.sum[i], 2);
    if ((lane & 3) == 0) shared.sum[group][head + 8 * i] = state.sum[i];
  }
  named_barrier(1, 256);  // also: no product reads the tiles any more
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] += shared.sum[1 - group][head + 8 * i];
}

// One block a query and 64 heads: normalise, derotate, store.
template <typename Rows>
__device__ __forceinline__ void finish_alone(const AttentionParams<Rows>& p, AttentionShared& shared,
                                             ConsumerState& state, int token, int first_head, int group, int warp,
                                             int lane) {
  const int head = 16 * warp + (lane >> 2);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int global_head = min(first_head + head + 8 * i, p.heads - 1);
    factor[i] = normaliser(state.maximum[i], state.sum[i], p.sink[global_head]);
  }
  if (group == 1) {
    const float* rope = rope_of(p, token);
#pragma unroll
    for (int j = 24; j < 32; ++j) {
      const int pair = 4 * (j - 24) + (lane & 3);
      float(&o)[64] = state.o[1];
      derotate(rope, pair, o[4 * (j - 16)], o[4 * (j - 16) + 1]);
      derotate(rope, pair, o[4 * (j - 16) + 2], o[4 * (j - 16) + 3]);
    }
  }
  // Through shared memory, so that a warp stores whole rows: [head][256 channels] of this group.
  uint8_t* const staged = shared.rows[group];
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = head + 8 * i;
      *reinterpret_cast<unsigned*>(staged + row * 512 + ((j ^ (row & 7)) << 4) + 4 * (lane & 3)) =
          pack_bf16(state.o[j >> 4][4 * (j & 15) + 2 * i] * factor[i], state.o[j >> 4][4 * (j & 15) + 2 * i + 1] * factor[i]);
    }
  }
  __syncwarp();  // a warp reads only the heads it wrote
  for (int row = 16 * warp; row < 16 * warp + 16 && first_head + row < p.heads; ++row) {
    const uint4 v = *reinterpret_cast<const uint4*>(staged + row * 512 + ((lane ^ (row & 7)) << 4));
    __nv_bfloat16* target = p.out + (static_cast<int64_t>(token) * p.heads + first_head + row) * kHeadDim;
    *reinterpret_cast<uint4*>(target + 256 * group + 8 * lane) = v;
  }
}

__device__ __forceinline__ int accumulator_offset(int head, int chunk) {
  return head * 2048 + ((chunk ^ (head & 7)) << 5);  // 32-byte chunks of 8 channels
}

// A block of a cluster leaves its accumulators and then finishes its share of the heads.
template <typename Rows>
__device__ __forceinline__ void finish_cluster(const AttentionParams<Rows>& p, AttentionShared& shared,
                                               const ConsumerState& state, int token, int first_head, int parts,
                                               int split_group, int split_groups, int group, int warp, int lane) {
  const int head = 16 * warp + (lane >> 2);
  uint8_t* const accumulators = shared.rows[0];
#pragma unroll
  for (int j = 0; j < 32; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(accumulators + accumulator_offset(head + 8 * i, 32 * group + j) + 8 * (lane & 3)) =
          make_float2(state.o[j >> 4][4 * (j & 15) + 2 * i], state.o[j >> 4][4 * (j & 15) + 2 * i + 1]);
    }
  }
  if (group == 0 && (lane & 3) == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      shared.total_maximum[head + 8 * i] = state.maximum[i];
      shared.total_sum[head + 8 * i] = state.sum[i];
    }
  }
  cluster_sync();

  const int real = min(kBlockHeads, p.heads - first_head), share = (real + parts - 1) / parts;
  const int rank = static_cast<int>(cluster_rank());
  const unsigned maxima = shared_address(shared.total_maximum), sums = shared_address(shared.total_sum);
  const unsigned values = shared_address(accumulators);
  for (int row = rank * share + 4 * group + warp; row < min((rank + 1) * share, real); row += 8) {
    // A lane asks one block for its maximum and sum; remote loads take long, so all are under way at once.
    float own_maximum = -INFINITY, own_sum = 0.0f;
    if (lane < parts) {
      own_maximum = cluster_load(cluster_address(maxima, lane) + 4 * row);
      own_sum = cluster_load(cluster_address(sums, lane) + 4 * row);
    }
    float top = own_maximum;
#pragma unroll
    for (int step = 4; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
    top = __shfl_sync(kFullMask, top, 0);
    const float own_weight = own_maximum == -INFINITY ? 0.0f : exp2f(own_maximum - top);
    float sum = own_weight * own_sum;
#pragma unroll
    for (int step = 4; step; step >>= 1) sum += __shfl_xor_sync(kFullMask, sum, step);
    sum = __shfl_sync(kFullMask, sum, 0);
    float x[4][4] = {};
    for (int first = 0; first < parts; first += 2) {
      float4 v[2][4];
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const unsigned remote = cluster_address(values, min(first + other, parts - 1));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = lane + 32 * i;  // four channels
          v[other][i] = cluster_load4(remote + accumulator_offset(row, at >> 1) + 16 * (at & 1));
        }
      }
#pragma unroll
      for (int other = 0; other < 2; ++other) {
        const float weight = __shfl_sync(kFullMask, own_weight, first + other);
        if (weight > 0.0f) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[i][0] += weight * v[other][i].x, x[i][1] += weight * v[other][i].y;
            x[i][2] += weight * v[other][i].z, x[i][3] += weight * v[other][i].w;
          }
        }
      }
    }
    const int64_t at = static_cast<int64_t>(token) * p.heads + first_head + row;
    if (split_groups > 1) {
      float4* target = reinterpret_cast<float4*>(p.partial + (at * split_groups + split_group) * kHeadDim);
      if (sum > 0.0f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) target[lane + 32 * i] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
      }
      if (lane == 0) p.partial_stat[at * split_groups + split_group] = make_float2(top, sum);
      continue;
    }
    const float factor = normaliser(top, sum, p.sink[first_head + row]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = 4 * (lane + 32 * i);
      if (channel >= kNopeDim) {
        const float* rope = rope_of(p, token);
        derotate(rope, (channel - kNopeDim) / 2, x[i][0], x[i][1]);
        derotate(rope, (channel - kNopeDim) / 2 + 1, x[i][2], x[i][3]);
      }
      *reinterpret_cast<uint2*>(p.out + at * kHeadDim + channel) =
          make_uint2(pack_bf16(x[i][0] * factor, x[i][1] * factor), pack_bf16(x[i][2] * factor, x[i][3] * factor));
    }
  }
  cluster_meet();  // nobody leaves while its memory is read
}

// Grid: (parts of a cluster x tokens, blocks of 64 heads, groups of clusters).
template <typename Rows>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_kernel(const __grid_constant__ AttentionParams<Rows> p, const int parts) {
#if DSV4_HOPPER
  extern __shared__ uint8_t raw_shared[];
  AttentionShared& shared =
      *reinterpret_cast<AttentionShared*>(raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023));
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, group = threadIdx.x >> 7;
  const int token = blockIdx.x / parts, part = blockIdx.x % parts;
  const int first_head = blockIdx.y * kBlockHeads;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&shared.full[i], kFullArrivals<Rows>);
      mbarrier_init(&shared.empty[i], 8);
    }
    mbarrier_init_fence();
  }
  const int tiles = count_tiles(p.rows, token, &shared.last);
  const int splits = parts * gridDim.z, split = blockIdx.z * parts + part;
  const int begin = tiles * split / splits, end = tiles * (split + 1) / splits;

  if (group >= 2) {
    lower_registers<kProducerRegisters>();
    produce(p.rows, shared, token, begin, end, 4 * (group - 2) + warp, lane);
    if (parts > 1) {
      cluster_sync();
      cluster_meet();
    }
  } else {
    raise_registers<kConsumerRegisters>();
    load_queries(p, shared, token, first_head);
    ConsumerState state;
#pragma unroll
    for (int j = 0; j < 128; ++j) state.o[j >> 6][j & 63] = 0.0f;
    state.maximum[0] = state.maximum[1] = -INFINITY;
    state.sum[0] = state.sum[1] = 0.0f;
    consume(p, shared, state, begin, end, group, warp, lane);
    if (parts > 1) {
      finish_cluster(p, shared, state, token, first_head, parts, blockIdx.z, gridDim.z, group, warp, lane);
    } else {
      finish_alone(p, shared, state, token, first_head, group, warp, lane);
    }
  }
#endif
}

}  // namespace hopper
}  // namespace dsv4
