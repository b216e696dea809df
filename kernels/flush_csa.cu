// CSA compressor, main rows and indexer keys in one launch; contract in sglang_dsv4/ops/flush.py.
//
// A thread owns four of the 640 channels (512 main, 128 indexer) of every row that its CTA touches, so a state row is
// read and later overwritten by the same thread and needs no barrier in between.
//
// Two kinds of CTA:
//   * one per request: the at most two blocks that read state (a row of theirs stands before the step), then the
//     state that the step leaves behind. Reading before writing is what makes one CTA do both;
//   * one per four tokens: the block that ends there, if all its eight rows stand in the step.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/compress.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kThreads = (kHeadDim + kIndexDim) / 4;
constexpr int kMainThreads = kHeadDim / 4;
constexpr int kStateDim = kHeadDim + kIndexDim;
constexpr int kRows = 2 * kCsaRatio;
constexpr int kRatioShift = 2;

// State rows are float [.., offset, half (tail only), (C, Z), 640].
struct CsaState {
  float* overlap;
  int64_t overlap_stride;  // floats a slot
  int64_t num_slots;
  float* tail;
  int64_t tail_stride;  // floats a request row
  int64_t num_rows;
};

template <typename T>
struct CsaInput {
  const T* main;
  int64_t main_stride;
  const T* index;
  int64_t index_stride;
};

// The input as one thread sees it: its four channels of a token, in four parts (C overlap, C normal, Z overlap, Z normal).
template <typename T>
struct Channels {
  const T* base;
  int64_t stride;
  const float* ape;
  int width;

  // C, and Z without ape.
  __device__ __forceinline__ Row4 raw_row(int token, int half) const {
    const T* source = base + token * stride + half * width;
    return {stream4(source), stream4(source + 2 * width)};
  }
  __device__ __forceinline__ void add_ape(Row4& row, int offset, int half) const {
    row.z = add4(row.z, load4(ape + (2 * offset + half) * width));
  }
  __device__ __forceinline__ Row4 row(int token, int offset, int half) const {
    Row4 out = raw_row(token, half);
    add_ape(out, offset, half);
    return out;
  }
};

__device__ __forceinline__ Row4 kept_row(const float* source) { return {load4(source), load4(source + kStateDim)}; }

__device__ __forceinline__ void keep_row(float* target, const Row4& row) {
  store4(target, row.c);
  store4(target + kStateDim, row.z);
}

// The state rows of one request, at the thread's channels.
struct Kept {
  float* overlap;  // overlap halves of odd blocks
  float* tail;     // [0] overlap halves of even blocks, [1] normal halves

  __device__ __forceinline__ float* overlap_half(int block, int offset) const {
    return block & 1 ? overlap + offset * 2 * kStateDim : tail + offset * 4 * kStateDim;
  }
  __device__ __forceinline__ float* normal_half(int offset) const { return tail + (offset * 4 + 2) * kStateDim; }
};

// What an entry needs beside its rows, at the thread's channels: loaded with the rows, used long after them. (The norm's
// weights are the same for all entries and lie in the L1 cache.)
struct Finish {
  float2 turns[2];  // of the thread's two pairs, if it owns rotated channels
  int64_t row;
};

__device__ __forceinline__ bool owns_rope() {
  const int thread = threadIdx.x;
  return thread < kMainThreads ? thread >= kNopeDim / 4 : thread >= kMainThreads + (kIndexDim - kRopeDim) / 4;
}

__device__ __forceinline__ Finish load_finish(const StepMeta& meta, int request, int block, const Compressor& weights) {
  const int thread = threadIdx.x, group = thread < kMainThreads ? thread : thread - kMainThreads;
  Finish finish;
  finish.row = meta.entry_row(request, block, kRatioShift);
  if (owns_rope()) {
    const int pair = 2 * (group % (kRopeDim / 4));
#pragma unroll
    for (int i = 0; i < 2; ++i) finish.turns[i] = rotation(weights, int64_t{kCsaRatio} * block, pair + i);
  }
  return finish;
}

// Pooled channels of `thread`, normalised, rotated, quantised and stored. All threads call it.
template <typename IndexLayout>
__device__ __forceinline__ void finish_entry(float (&x)[4], const Finish& finish, const Compressor& weights,
                                             const RowPool<MainFp8>& entries, const RowPool<IndexLayout>& keys,
                                             float* partial) {
  const int thread = threadIdx.x, lane = thread & 31;
  const bool is_main = thread < kMainThreads;
  const int channel = 4 * (is_main ? thread : thread - kMainThreads);
  const int width = is_main ? kHeadDim : kIndexDim;
  const int64_t row = finish.row;

  float squares = warp_sum(fmaf(x[0], x[0], fmaf(x[1], x[1], fmaf(x[2], x[2], __fmul_rn(x[3], x[3])))));
  if (lane == 0) partial[thread >> 5] = squares;
  __syncthreads();
  if (is_main) squares = (partial[0] + partial[1]) + (partial[2] + partial[3]);
  const float scale = rsqrtf(fmaf(squares, 1.0f / static_cast<float>(width), weights.eps));
  const float4 norm = weights.weight4(channel);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], scale), component(norm, i));
  if (owns_rope()) {
    rotate_pair(finish.turns[0], x[0], x[1]);
    rotate_pair(finish.turns[1], x[2], x[3]);
  }

  const bool stored = entries.contains(row) && keys.contains(row);
  if (is_main) {
    float amax = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
#pragma unroll
    for (int step = 1; step < 16; step <<= 1) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
    if (!stored) return;
    if (channel < kNopeDim) {
      const int code = fp8_scale_code(amax);
      const float inverse = ue8m0_inverse(code);
      *reinterpret_cast<unsigned*>(entries.data(row) + channel) =
          e4m3_encode4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
      if ((lane & 15) == 0) entries.scale(row)[channel / kFp8Quant] = static_cast<uint8_t>(code);
    } else {
      *reinterpret_cast<uint2*>(entries.data(row) + kNopeDim + 2 * (channel - kNopeDim)) =
          make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
      if (channel == kNopeDim) entries.scale(row)[kNopeDim / kFp8Quant] = 0;
    }
    return;
  }

  // Hadamard, strides 1, 2 in the thread and 4 .. 64 across the warp: the order that formats.hadamard fixes.
  const float s01 = x[0] + x[1], d01 = x[0] - x[1], s23 = x[2] + x[3], d23 = x[2] - x[3];
  x[0] = s01 + s23, x[1] = d01 + d23, x[2] = s01 - s23, x[3] = d01 - d23;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(kFullMask, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
  }
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = __fmul_rn(x[i], 0.08838834764831845f);  // 1 / sqrt(128)
    amax = fmaxf(amax, fabsf(x[i]));
  }
  constexpr bool kIsFp4 = IndexLayout::kDataBytes == IndexFp4::kDataBytes;
#pragma unroll
  for (int step = 1; step < (kIsFp4 ? kFp4Quant / 4 : 32); step <<= 1) {
    amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
  }
  if (!stored) return;
  if constexpr (kIsFp4) {
    const int code = fp4_scale_code(amax);
    const float inverse = ue8m0_inverse(code);
    const unsigned codes = e2m1_encode(x[0] * inverse) | e2m1_encode(x[1] * inverse) << 4 |
                           e2m1_encode(x[2] * inverse) << 8 | e2m1_encode(x[3] * inverse) << 12;
    *reinterpret_cast<uint16_t*>(keys.data(row) + channel / 2) = static_cast<uint16_t>(codes);
    if ((lane & 7) == 0) keys.scale(row)[channel / kFp4Quant] = static_cast<uint8_t>(code);
  } else {
    const float key_scale = __fdiv_rn(fmaxf(amax, kFp8AmaxFloor), kE4m3Max);
    *reinterpret_cast<unsigned*>(keys.data(row) + channel) =
        e4m3_encode4(__fdiv_rn(x[0], key_scale), __fdiv_rn(x[1], key_scale), __fdiv_rn(x[2], key_scale),
                     __fdiv_rn(x[3], key_scale));
    if (lane == 0) *reinterpret_cast<float*>(keys.scale(row)) = key_scale;
  }
}

// Pools block `block` of a request and stores its entry. kInStep: no row stands before the step.
template <bool kInStep, typename T, typename IndexLayout>
__device__ __forceinline__ void make_entry(const StepMeta& meta, int request, int block, int first_token, int prefix,
                                           const Channels<T>& input, const Kept& kept, const Compressor& weights,
                                           const RowPool<MainFp8>& entries, const RowPool<IndexLayout>& keys,
                                           float* partial) {
  const int base = first_token - prefix + kCsaRatio * block;  // token at the block's first position
  Row4 rows[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int half = j < kCsaRatio ? 0 : 1, offset = j % kCsaRatio;
    if (kInStep) {
      // Block 0 has no predecessor: its own rows stand in for the addresses, and are masked below.
      const int back = half == 0 && block > 0 ? kCsaRatio : 0;
      rows[j] = input.raw_row(base - back + offset, half);
    } else if (half == 0) {
      if (block == 0) continue;
      const int position = kCsaRatio * (block - 1) + offset;
      rows[j] = position >= prefix ? input.row(base - kCsaRatio + offset, offset, 0)
                                   : kept_row(kept.overlap_half(block - 1, offset));
    } else {
      const int position = kCsaRatio * block + offset;
      rows[j] = position >= prefix ? input.row(base + offset, offset, 1) : kept_row(kept.normal_half(offset));
    }
  }
  const Finish finish = load_finish(meta, request, block, weights);
  if (kInStep) {
    // Behind a fence for the compiler: registers are for rows under way, ape waits in the L1 cache.
    asm volatile("" ::: "memory");
#pragma unroll
    for (int j = 0; j < kRows; ++j) input.add_ape(rows[j], j % kCsaRatio, j / kCsaRatio);
  }
  if (block == 0) {
    constexpr float kNone = -INFINITY;
#pragma unroll
    for (int j = 0; j < kCsaRatio; ++j) {
      rows[j].c = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      rows[j].z = make_float4(kNone, kNone, kNone, kNone);
    }
  }
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float c[kRows], z[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) c[j] = component(rows[j].c, i), z[j] = component(rows[j].z, i);
    const Pooled pooled = pool_rows(c, z);
    x[i] = __fdividef(pooled.value, pooled.sum);
  }
  finish_entry(x, finish, weights, entries, keys, partial);
}

// Whether every row that block `block` pools stands in the step.
__device__ __forceinline__ bool in_step(int block, int prefix) {
  return kCsaRatio * (block == 0 ? 0 : block - 1) >= prefix;
}

template <typename T, typename IndexLayout>
__global__ void __launch_bounds__(kThreads, 4)
    flush_csa_kernel(const __grid_constant__ StepMeta meta, const CsaInput<T> in, const __grid_constant__ Compressor main,
                     const __grid_constant__ Compressor index, const CsaState state, const RowPool<MainFp8> entries,
                     const RowPool<IndexLayout> keys) {
  __shared__ float partial[2][kThreads / 32];
  grid_dependency_launch();
  grid_dependency_wait();
  const int thread = threadIdx.x;
  const bool is_main = thread < kMainThreads;
  const Compressor& weights = is_main ? main : index;
  const int channel = 4 * (is_main ? thread : thread - kMainThreads);
  const Channels<T> input = {is_main ? in.main + channel : in.index + channel,
                             is_main ? in.main_stride : in.index_stride, weights.ape + channel,
                             is_main ? kHeadDim : kIndexDim};

  if (blockIdx.x >= static_cast<unsigned>(meta.num_requests)) {
    // Two such blocks end at least four tokens apart, so four tokens hold at most one.
    const int first = (blockIdx.x - meta.num_requests) * kCsaRatio;
    int found = -1, request = 0, block = 0, prefix = 0;
#pragma unroll
    for (int i = 0; i < kCsaRatio; ++i) {
      const int token = first + i;
      if (token >= meta.num_tokens) break;
      const int owner = meta.request_of(token);
      const int position = static_cast<int>(meta.positions[token]);
      if (owner < 0 || (position + 1) % kCsaRatio != 0) continue;
      const int before = meta.prefix_lens[owner];
      if (!in_step(position / kCsaRatio, before)) continue;
      found = token, request = owner, block = position / kCsaRatio, prefix = before;
    }
    if (found < 0 || int64_t{kCsaRatio} * block >= main.rope_positions) return;
    const int first_token = found - (kCsaRatio * block + kCsaRatio - 1 - prefix);
    make_entry<true>(meta, request, block, first_token, prefix, input, Kept{}, weights, entries, keys, partial[0]);
    return;
  }

  const int request = blockIdx.x;
  const RequestSpan span = request_span(meta, request);
  const int slot = meta.slots[request], req_row = meta.req_rows[request];
  if (span.end <= span.prefix) return;
  if (slot < 0 || slot >= state.num_slots || req_row < 0 || req_row >= state.num_rows) return;
  const Kept kept = {state.overlap + slot * state.overlap_stride + 4 * thread,
                     state.tail + req_row * state.tail_stride + 4 * thread};

  const int before = span.prefix / kCsaRatio, current = span.end / kCsaRatio;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int block = before + i;
    if (block >= current || in_step(block, span.prefix)) break;
    if (int64_t{kCsaRatio} * block >= main.rope_positions) break;
    make_entry<false>(meta, request, block, span.first_token, span.prefix, input, kept, weights, entries, keys,
                      partial[i]);
  }

  // Overlap halves of the last complete and of the unfinished block, normal halves of the unfinished one.
  for (int position = max(span.prefix, kCsaRatio * (current - 1)); position < span.end; ++position) {
    const int token = span.first_token + position - span.prefix;
    const int block = position / kCsaRatio, offset = position % kCsaRatio;
    const Row4 overlap_half = input.row(token, offset, 0);
    if (block == current) {
      const Row4 normal_half = input.row(token, offset, 1);
      keep_row(kept.normal_half(offset), normal_half);
    }
    keep_row(kept.overlap_half(block, offset), overlap_half);
  }
  for (int s = 0; s < meta.max_snapshots; ++s) {
    const int target = meta.snapshot_slots[request * meta.snapshot_stride + s];
    const int length = meta.snapshot_lens[request * meta.snapshot_stride + s];
    if (target < 0 || target >= state.num_slots) continue;
    if (length - kCsaRatio < span.prefix || length > span.end) continue;
    float* snapshot = state.overlap + target * state.overlap_stride + 4 * thread;
#pragma unroll
    for (int offset = 0; offset < kCsaRatio; ++offset) {
      const int token = span.first_token + length - kCsaRatio + offset - span.prefix;
      keep_row(snapshot + offset * 2 * kStateDim, input.row(token, offset, 0));
    }
  }
}

template <typename T, typename IndexLayout>
void launch_flush(const TensorView& main_kv_score, const TensorView& index_kv_score, const Compressor& main,
                  const Compressor& index, const CsaState& state, const TensorView& entries,
                  const TensorView& index_keys, const StepMeta& meta) {
  LaunchShape shape;
  shape.grid = dim3(meta.num_requests + (meta.num_tokens + kCsaRatio - 1) / kCsaRatio);
  shape.block = dim3(kThreads);
  shape.overlap = true;
  const CsaInput<T> input = {data_of<const T>(main_kv_score), main_kv_score.stride(0),
                             data_of<const T>(index_kv_score), index_kv_score.stride(0)};
  launch(main_kv_score, shape, flush_csa_kernel<T, IndexLayout>, meta, input, main, index, state,
         make_pool<MainFp8>(entries), make_pool<IndexLayout>(index_keys));
}

void flush_csa(TensorView main_kv_score, TensorView main_ape, TensorView main_norm, TensorView main_rope,
               double main_eps, TensorView index_kv_score, TensorView index_ape, TensorView index_norm,
               TensorView index_rope, double index_eps, TensorView overlap, TensorView tail, TensorView entries,
               TensorView index_keys, bool keys_are_fp4, DSV4_META_PARAMS) {
  const DeviceGuard guard(main_kv_score);
  const StepMeta meta = DSV4_META;
  const Compressor main = make_compressor(main_ape, main_norm, main_rope, main_eps);
  const Compressor index = make_compressor(index_ape, index_norm, index_rope, index_eps);
  const CsaState state = {data_of<float>(overlap), overlap.stride(0), overlap.size(0),
                          data_of<float>(tail),    tail.stride(0),    tail.size(0)};
  const auto dispatch = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if (keys_are_fp4) {
      launch_flush<T, IndexFp4>(main_kv_score, index_kv_score, main, index, state, entries, index_keys, meta);
    } else {
      launch_flush<T, IndexFp8>(main_kv_score, index_kv_score, main, index, state, entries, index_keys, meta);
    }
  };
  if (is_bf16(main_kv_score)) {
    dispatch(static_cast<__nv_bfloat16*>(nullptr));
  } else {
    dispatch(static_cast<float*>(nullptr));
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flush_csa, flush_csa);
