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

#include "dsv4/attention_finish.cuh"
#include "dsv4/attention_produce.cuh"

namespace dsv4 {
namespace hopper {

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
