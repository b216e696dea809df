// The end of the Hopper attention kernel: blocks of a cluster send each other what they have of the heads that the other
// one finishes; heads are normalised, derotated and stored.
#pragma once

#include "dsv4/attention_block.cuh"

namespace dsv4 {
namespace hopper {

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

}  // namespace hopper
}  // namespace dsv4
