// Rotates indexer queries, transforms them, rounds them like keys, and scales the head weights; contract in
// sglang_dsv4/ops/index_query.py. Either the rounded numbers come out, or the images that index_scores multiplies.
//
// Half a warp a head: lane l holds channels 8 l .. 8 l + 7, so a load or store instruction moves whole 256-byte rows and
// the upper eight lanes hold the rotated channels. A block serves heads of one token, which share its row of the table.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/index_keys.cuh"

namespace {

using namespace dsv4;

constexpr int kThreads = 128;
constexpr int kLanes = kIndexDim / 8;
constexpr int kHeads = kThreads / kLanes;  // heads a block treats at a time
constexpr int kFewTokens = 64;             // tokens up to which a block treats no more: blocks are few, latency counts

struct Params {
  const void* q;
  const void* weights;
  const float* rope;
  const int64_t* positions;
  void* out;           // [tokens, heads, 128], or images [tokens, image bytes]
  float* out_weights;  // [tokens, heads], or of images [tokens, 64]
  int64_t q_token_stride, q_head_stride, weights_stride, rope_stride, rope_positions;
  double scale;
  int tokens, heads;
  int weights_bits;  // 16: bf16, 32: float, 64: double
};

__device__ __forceinline__ void load8(const __nv_bfloat16* source, float (&x)[8]) {
  const uint4 v = *reinterpret_cast<const uint4*>(source);
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void load8(const float* source, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 v = reinterpret_cast<const float4*>(source)[i];
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}

// The order of formats.hadamard: strides 1, 2, 4 in the thread, 8 .. 64 across half a warp. a + b and a - b are written
// as one fused operation with an exact product, so they round as sums do.
__device__ __forceinline__ void hadamard(float (&x)[8], int lane) {
#pragma unroll
  for (int stride = 1; stride < 8; stride <<= 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = __fadd_rn(a, b);
      x[i + stride] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int step = 1; step < kLanes; step <<= 1) {
    const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = fmaf(sign, x[i], __shfl_xor_sync(kFullMask, x[i], step));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], 0.08838834764831845f);  // 1 / sqrt(128)
}

template <int kShare>
__device__ __forceinline__ float largest(const float (&x)[8]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int step = 1; step < kShare; step <<= 1) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
  return amax;
}

// The e2m1 number nearest to x, |x| <= 6, ties to the even code, sign kept for zero. Its grid is 0.5 below 2 and half the
// leading power of two above: adding 1.5 * 2^23 such steps rounds to it, ties to even, and even steps are even codes.
__device__ __forceinline__ float e2m1_round(float x) {
  const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const float magnet = __uint_as_float(max(bits & 0x7f800000u, 0x3f800000u) + ((22u << 23) | 0x400000u));
  const float rounded = __fsub_rn(__fadd_rn(__uint_as_float(magnitude), magnet), magnet);
  return __uint_as_float(__float_as_uint(rounded) | (bits & 0x80000000u));
}

// A lane's channels of a head, rounded as keys are.
template <typename Layout>
__device__ __forceinline__ void round_as_key(float (&x)[8]) {
  if constexpr (Layout::kDataBytes == IndexFp4::kDataBytes) {
    const int code = fp4_scale_code(largest<kFp4Quant / 8>(x));
    const float inverse = ue8m0_inverse(code), scale = ue8m0_decode(code);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(e2m1_round(__fmul_rn(x[i], inverse)), scale);
  } else {
    const float scale = __fdiv_rn(fmaxf(largest<kLanes>(x), kFp8AmaxFloor), kE4m3Max);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const unsigned codes = e4m3_encode4(__fdiv_rn(x[4 * j], scale), __fdiv_rn(x[4 * j + 1], scale),
                                          __fdiv_rn(x[4 * j + 2], scale), __fdiv_rn(x[4 * j + 3], scale));
      const float2 low = e4m3_decode2(codes), high = e4m3_decode2(codes >> 16);
      x[4 * j] = __fmul_rn(low.x, scale), x[4 * j + 1] = __fmul_rn(low.y, scale);
      x[4 * j + 2] = __fmul_rn(high.x, scale), x[4 * j + 3] = __fmul_rn(high.y, scale);
    }
  }
}

__device__ __forceinline__ float scaled_weight(const Params& p, int token, int head) {
  const int64_t at = token * p.weights_stride + head;
  if (p.weights_bits == 64) return static_cast<float>(__dmul_rn(static_cast<const double*>(p.weights)[at], p.scale));
  const float narrow = p.weights_bits == 32 ? static_cast<const float*>(p.weights)[at]
                                            : __bfloat162float(static_cast<const __nv_bfloat16*>(p.weights)[at]);
  return __fmul_rn(narrow, static_cast<float>(p.scale));
}

template <typename Layout>
__device__ __forceinline__ void store_rounded(const Params& p, int token, int head, int lane, const float (&x)[8]) {
  const int64_t at = (static_cast<int64_t>(token) * p.heads + head) * kIndexDim + 8 * lane;
  if constexpr (Layout::kDataBytes == IndexFp4::kDataBytes) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + at) =
        make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  } else {
    float4* const target = reinterpret_cast<float4*>(static_cast<float*>(p.out) + at);
    target[0] = make_float4(x[0], x[1], x[2], x[3]);
    target[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// A lane's channels of a head as codes of an image's row: what HeadScale makes of the rounded numbers, without going
// through them. Rounding keeps order, so the largest rounded channel is the largest one rounded.
template <typename Layout>
struct HeadCodes {
  unsigned codes[2];
  float scale;  // HeadScale's

  __device__ __forceinline__ explicit HeadCodes(const float (&x)[8]) {
    if constexpr (Layout::kDataBytes == IndexFp4::kDataBytes) {
      const float amax = largest<kFp4Quant / 8>(x);
      const int group = fp4_scale_code(amax);
      const float inverse = ue8m0_inverse(group), group_scale = ue8m0_decode(group);
      float top = __fmul_rn(e2m1_round(__fmul_rn(amax, inverse)), group_scale);
#pragma unroll
      for (int step = kFp4Quant / 8; step < kLanes; step <<= 1) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
      const HeadScale<Layout> of(top);
      scale = of.scale;
      const float factor = __fmul_rn(group_scale, of.inverse);  // powers of two
      float code[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) code[i] = __fmul_rn(e2m1_round(__fmul_rn(x[i], inverse)), factor);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        codes[j] = e4m3_encode4(code[4 * j], code[4 * j + 1], code[4 * j + 2], code[4 * j + 3]);
      }
    } else {
      const float amax = largest<kLanes>(x), first = __fdiv_rn(fmaxf(amax, kFp8AmaxFloor), kE4m3Max);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        codes[j] = e4m3_encode4(__fdiv_rn(x[4 * j], first), __fdiv_rn(x[4 * j + 1], first),
                                __fdiv_rn(x[4 * j + 2], first), __fdiv_rn(x[4 * j + 3], first));
      }
      // The numbers' own scale may differ from it in the last bits, which moves no code.
      const float top = e4m3_decode2(e4m3_encode4(__fdiv_rn(amax, first), 0.0f, 0.0f, 0.0f)).x;
      scale = HeadScale<Layout>(__fmul_rn(top, first)).scale;
    }
  }
};

// A head's row of the token's image and its weight, of the scaled `weight`; zeros for a head that does not exist.
template <typename Layout>
__device__ __forceinline__ void store_image(const Params& p, int token, int head, int lane, const float (&x)[8],
                                            float weight) {
  const HeadCodes<Layout> of(x);
  const bool real = head < p.heads;
  // A lane's two words stand in two neighbouring units of the row, beside those of another lane: they trade, so that each
  // has eight bytes of one unit and one instruction writes whole rows.
  constexpr int kPartner = Layout::kDataBytes == IndexFp4::kDataBytes ? 4 : 2;
  const bool upper = lane & kPartner;
  const unsigned got = __shfl_xor_sync(kFullMask, upper ? of.codes[0] : of.codes[1], kPartner);
  const uint2 pair = upper ? make_uint2(got, of.codes[1]) : make_uint2(of.codes[0], got);
  const int at = e4m3_image_offset<Layout>(head, upper ? 8 * (lane - kPartner) + 4 : 8 * lane);
  uint8_t* const image = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(token) * kImageBytes<true>;
  *reinterpret_cast<uint2*>(image + at) = real ? pair : make_uint2(0, 0);
  if (lane == 0) {
    p.out_weights[static_cast<int64_t>(token) * kMaxHeads + head] = real ? image_weight(weight, of.scale) : 0.0f;
  }
}

template <typename T, typename Layout, int kRounds, bool kImages>
__global__ void __launch_bounds__(kThreads) index_query_kernel(const __grid_constant__ Params p) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x % kLanes, token = blockIdx.x;
  const int block_head = blockIdx.y * kHeads * kRounds, first = block_head + threadIdx.x / kLanes;

  float x[kRounds][8], weight[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    // A head that does not exist repeats the last one: every lane takes part in the exchanges.
    const int head = min(first + i * kHeads, p.heads - 1);
    load8(static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + 8 * lane, x[i]);
    // With the channels, as the image's weight is wanted when they have become codes.
    weight[i] = kImages ? scaled_weight(p, token, head) : 0.0f;
  }
  const int scaled_head = block_head + threadIdx.x;
  if (!kImages && threadIdx.x < kHeads * kRounds && scaled_head < p.heads) {
    p.out_weights[static_cast<int64_t>(token) * p.heads + scaled_head] = scaled_weight(p, token, scaled_head);
  }

  if (lane >= kLanes - kRopeDim / 8) {
    const int64_t position = min(max(p.positions[token], int64_t{0}), p.rope_positions - 1);
    const float* table = p.rope + position * p.rope_stride + 4 * (lane - (kLanes - kRopeDim / 8));
    const float4 cosines = *reinterpret_cast<const float4*>(table);
    const float4 sines = *reinterpret_cast<const float4*>(table + kRopeDim / 2);
    const float c[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, s[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float even = x[i][2 * pair], odd = x[i][2 * pair + 1];
        x[i][2 * pair] = __fsub_rn(__fmul_rn(even, c[pair]), __fmul_rn(odd, s[pair]));
        x[i][2 * pair + 1] = __fadd_rn(__fmul_rn(even, s[pair]), __fmul_rn(odd, c[pair]));
      }
    }
  }
  __syncwarp();

#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    hadamard(x[i], lane);
    const int head = first + i * kHeads;
    if constexpr (kImages) {
      store_image<Layout>(p, token, head, lane, x[i], weight[i]);
    } else {
      round_as_key<Layout>(x[i]);
      if (head < p.heads) store_rounded<Layout>(p, token, head, lane, x[i]);
    }
  }
}

template <typename T, typename Layout, bool kImages>
void launch_rounds(const TensorView& anchor, const Params& p) {
  LaunchShape shape;
  shape.block = dim3(kThreads);
  shape.overlap = true;
  const int rounds = p.tokens <= kFewTokens ? 1 : 4, heads = kImages ? kMaxHeads : p.heads;
  shape.grid = dim3(p.tokens, static_cast<unsigned>((heads + kHeads * rounds - 1) / (kHeads * rounds)));
  if (rounds == 1) {
    launch(anchor, shape, index_query_kernel<T, Layout, 1, kImages>, p);
  } else {
    launch(anchor, shape, index_query_kernel<T, Layout, 4, kImages>, p);
  }
}

template <typename T, typename Layout>
void launch_query(const TensorView& anchor, const Params& p, bool images) {
  if (images) {
    launch_rounds<T, Layout, true>(anchor, p);
  } else {
    launch_rounds<T, Layout, false>(anchor, p);
  }
}

template <typename T>
void launch_query(const TensorView& anchor, const Params& p, bool fp4, bool images) {
  if (fp4) {
    launch_query<T, IndexFp4>(anchor, p, images);
  } else {
    launch_query<T, IndexFp8>(anchor, p, images);
  }
}

// With `images` the result is what index_scores multiplies on Hopper, of 64 heads.
void index_query(TensorView q, TensorView weights, TensorView rope, TensorView positions, TensorView out,
                 TensorView out_weights, double scale, bool fp4, bool images) {
  const DeviceGuard guard(out);
  Params p = {};
  p.q = data_of<const void>(q);
  p.weights = data_of<const void>(weights);
  p.rope = data_of<const float>(rope);
  p.positions = data_of<const int64_t>(positions);
  p.out = data_of<void>(out);
  p.out_weights = data_of<float>(out_weights);
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.weights_stride = weights.stride(0);
  p.rope_stride = rope.stride(0);
  p.rope_positions = rope.size(0);
  p.scale = scale;
  p.tokens = static_cast<int>(q.size(0));
  p.heads = static_cast<int>(q.size(1));
  p.weights_bits = weights.dtype().bits;
  if (is_bf16(q)) {
    launch_query<__nv_bfloat16>(out, p, fp4, images);
  } else {
    launch_query<float>(out, p, fp4, images);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_query, index_query);
