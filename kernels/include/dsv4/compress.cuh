// What both compressors share: four-channel loads, the running softmax of a channel, the norm's rotation.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "dsv4/codecs.cuh"
#include "dsv4/meta.cuh"

namespace dsv4 {

// Weights of one compressor. norm_weight is bf16 or float; rope is float [positions, 64], cos of 32 pairs then sin.
struct Compressor {
  const float* ape;
  const void* norm_weight;
  const float* rope;
  int64_t rope_stride;
  int64_t rope_positions;
  float eps;
  bool norm_is_bf16;

  __device__ __forceinline__ float4 weight4(int channel) const;
  // Weights of an even channel and the next as they lie in memory, by loads that depend on nothing, and their values.
  __device__ __forceinline__ uint2 weight2_words(int channel) const {
    const unsigned* words = static_cast<const unsigned*>(norm_weight) + (norm_is_bf16 ? channel / 2 : channel);
    return make_uint2(words[0], words[norm_is_bf16 ? 0 : 1]);
  }
  __device__ __forceinline__ float2 weight2(uint2 words) const {
    return norm_is_bf16 ? unpack_bf16(words.x) : make_float2(__uint_as_float(words.x), __uint_as_float(words.y));
  }
};

inline Compressor make_compressor(const TensorView& ape, const TensorView& norm_weight, const TensorView& rope,
                                  double eps) {
  return {data_of<const float>(ape),  norm_weight.data_ptr(), data_of<const float>(rope), rope.stride(0), rope.size(0),
          static_cast<float>(eps), is_bf16(norm_weight)};
}

__device__ __forceinline__ float4 load4(const float* source) { return *reinterpret_cast<const float4*>(source); }
__device__ __forceinline__ float4 load4(const __nv_bfloat16* source) {
  const uint2 v = *reinterpret_cast<const uint2*>(source);
  const float2 low = unpack_bf16(v.x), high = unpack_bf16(v.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
// The same for rows that are read once: they pass the L1 cache by, so that the weights stay in it.
__device__ __forceinline__ float4 stream4(const float* source) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(source));
  return v;
}
__device__ __forceinline__ float4 stream4(const __nv_bfloat16* source) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source));
  const float2 low = unpack_bf16(v.x), high = unpack_bf16(v.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float4 Compressor::weight4(int channel) const {
  return norm_is_bf16 ? load4(static_cast<const __nv_bfloat16*>(norm_weight) + channel)
                      : load4(static_cast<const float*>(norm_weight) + channel);
}
__device__ __forceinline__ void store4(float* target, float4 v) { *reinterpret_cast<float4*>(target) = v; }

// Arithmetic is spelled out (fmaf, __fmul_rn) wherever the compiler could fuse it one way here and another way there:
// an entry must be the same bits whichever of a kernel's paths made it.

// One rounding, never fused with what follows: Z is stored with ape added, so a row must be the same bits whether it
// comes from this step or from the state.
__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// C and Z of four channels of one token.
struct Row4 {
  float4 c;
  float4 z;
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Softmax-weighted sum of rows for one channel. `max` is the largest score times log2(e), rounded: weights are
// 2^(score * log2(e) - max) with one rounding, so what that rounding moves is the same for all rows and cancels.
struct Pooled {
  float max;
  float sum;
  float value;
};

constexpr float kLog2e = 1.4426950408889634f;

template <int kRows>
__device__ __forceinline__ Pooled pool_rows(const float (&c)[kRows], const float (&z)[kRows]) {
  float top = z[0];
#pragma unroll
  for (int j = 1; j < kRows; ++j) top = fmaxf(top, z[j]);
  Pooled out = {__fmul_rn(top, kLog2e), 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const float weight = exp2_fast(fmaf(z[j], kLog2e, -out.max));  // 0 for z = -inf
    out.sum = __fadd_rn(out.sum, weight);
    out.value = fmaf(weight, c[j], out.value);
  }
  return out;
}

// The same for rows that follow those of `pooled`.
template <int kRows>
__device__ __forceinline__ void pool_more(Pooled& pooled, const float (&c)[kRows], const float (&z)[kRows]) {
  float top = z[0];
#pragma unroll
  for (int j = 1; j < kRows; ++j) top = fmaxf(top, z[j]);
  const float max = fmaxf(pooled.max, __fmul_rn(top, kLog2e));
  const float before = exp2_fast(__fsub_rn(pooled.max, max));
  pooled = {max, __fmul_rn(pooled.sum, before), __fmul_rn(pooled.value, before)};
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const float weight = exp2_fast(fmaf(z[j], kLog2e, -max));
    pooled.sum = __fadd_rn(pooled.sum, weight);
    pooled.value = fmaf(weight, c[j], pooled.value);
  }
}

__device__ __forceinline__ float component(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kFullMask, x, step);
  return x;
}

// Cosine and sine of `pair` at `position`.
__device__ __forceinline__ float2 rotation(const Compressor& weights, int64_t position, int pair) {
  const float* table = weights.rope + position * weights.rope_stride;
  return make_float2(table[pair], table[kRopeDim / 2 + pair]);
}

__device__ __forceinline__ void rotate_pair(float2 turn, float& even, float& odd) {
  const float turned = __fsub_rn(__fmul_rn(even, turn.x), __fmul_rn(odd, turn.y));
  odd = __fadd_rn(__fmul_rn(even, turn.y), __fmul_rn(odd, turn.x));
  even = turned;
}

// A request's share of a step. `tokens` is what the offsets really grant, whatever the lengths claim.
struct RequestSpan {
  int prefix;       // tokens before the step
  int end;          // tokens after it
  int first_token;  // index of the token at position `prefix`
};

__device__ __forceinline__ RequestSpan request_span(const StepMeta& meta, int request) {
  RequestSpan span;
  span.first_token = meta.token_offsets[request];
  const int granted = min(meta.token_offsets[request + 1], meta.num_tokens) - span.first_token;
  span.prefix = meta.prefix_lens[request];
  const int claimed = meta.seq_lens[request] - span.prefix;
  span.end = span.prefix + max(0, min(claimed, granted));
  return span;
}

}  // namespace dsv4
