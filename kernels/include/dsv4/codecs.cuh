// Row codecs, bit for bit those of sglang_dsv4/formats.py.
//
// Scalars first (scales, e4m3, e2m1), then whole main rows spread over a warp: lane l holds channels 16 l .. 16 l + 15,
// so lanes 0..27 hold the e4m3 part (4 lanes share a scale) and lanes 28..31 the bf16 part.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "dsv4/rows.cuh"
#include "dsv4/warp.cuh"

namespace dsv4 {

constexpr float kE4m3Max = 448.0f;
constexpr float kFp8AmaxFloor = 1e-4f;
constexpr int kUe8m0Bias = 127;

// ---- scales ----

// Code of the smallest power of two >= amax / (2^exponent * (1 + mantissa / 2^23)); amax is a positive normal float.
template <int kExponent, unsigned kMantissa>
__device__ __forceinline__ int ue8m0_ceil(float amax) {
  const unsigned bits = __float_as_uint(amax);
  return static_cast<int>(bits >> 23) - kExponent + ((bits & 0x7fffffu) > kMantissa ? 1 : 0);
}

// Scale code of 64 channels of a main row (limit 448) and of 32 channels of an MXFP4 key (limit 6).
__device__ __forceinline__ int fp8_scale_code(float amax) {
  return ue8m0_ceil<8, 0x600000u>(fmaxf(amax, kFp8AmaxFloor));
}
__device__ __forceinline__ int fp4_scale_code(float amax) {
  return ue8m0_ceil<2, 0x400000u>(fmaxf(amax, 7.052966104933725e-38f));  // 6 * 2^-126
}

// 2^(code - 127) and its inverse, exact. The inverse needs code <= 253, which every finite input gives.
__device__ __forceinline__ float ue8m0_decode(unsigned code) {
  return __uint_as_float(code == 0 ? 1u << 22 : code << 23);
}
__device__ __forceinline__ float ue8m0_inverse(int code) {
  return __uint_as_float(static_cast<unsigned>(2 * kUe8m0Bias - code) << 23);
}

// ---- e4m3 ----

// Two floats to two codes (low byte first): saturating, ties to even.
__device__ __forceinline__ unsigned e4m3_encode2(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ unsigned e4m3_encode4(float a, float b, float c, float d) {
  return e4m3_encode2(a, b) | (e4m3_encode2(c, d) << 16);
}
__device__ __forceinline__ float2 e4m3_decode2(unsigned codes) {
  const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes & 0xffffu), __NV_E4M3);
  return __half22float2(__half2(raw));
}

// ---- e2m1 ----

// Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with ties to the even code; the sign is bit 3 and is kept for zero.
__device__ __forceinline__ unsigned e2m1_encode(float x) {
  const float a = fabsf(x);
  const unsigned code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
  return code | (__float_as_uint(x) >> 31 << 3);
}
__device__ __forceinline__ float e2m1_decode(unsigned code) {
  const unsigned exponent = (code >> 1) & 3u, mantissa = code & 1u;
  const float magnitude = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                        : __uint_as_float(((exponent + 126u) << 23) | (mantissa << 22));
  return code & 8u ? -magnitude : magnitude;
}

// ---- small vectors ----

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float2 unpack_bf16(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// 16 consecutive values as float, from 32-byte (bf16) or 64-byte (float) aligned memory.
__device__ __forceinline__ void load16(const __nv_bfloat16* source, float (&x)[16]) {
  const uint4* vectors = reinterpret_cast<const uint4*>(source);
  const uint4 v[2] = {vectors[0], vectors[1]};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack_bf16(words[j]);
      x[8 * i + 2 * j] = pair.x;
      x[8 * i + 2 * j + 1] = pair.y;
    }
  }
}
__device__ __forceinline__ void load16(const float* source, float (&x)[16]) {
  const float4* vectors = reinterpret_cast<const float4*>(source);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = vectors[i];
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}

// ---- main rows over a warp ----

constexpr int kNopeLanes = kNopeDim / 16;

// One lane's share of an encoded main row: 16 e4m3 bytes in v[0], or 16 bf16 in v[0] and v[1].
struct MainLane {
  uint4 v[2];
  int scale;  // ue8m0 code of the lane's channels; 0 in the bf16 lanes
};

// Encodes a row that the warp holds 16 channels a lane. All 32 lanes must call it.
__device__ __forceinline__ MainLane encode_main(const float (&x)[16], int lane) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(x[i]));
  amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, 2));
  MainLane out;
  if (lane < kNopeLanes) {
    out.scale = fp8_scale_code(amax);
    const float inverse = ue8m0_inverse(out.scale);
    unsigned words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = e4m3_encode4(x[4 * j] * inverse, x[4 * j + 1] * inverse, x[4 * j + 2] * inverse,
                              x[4 * j + 3] * inverse);
    }
    out.v[0] = make_uint4(words[0], words[1], words[2], words[3]);
    out.v[1] = make_uint4(0, 0, 0, 0);
  } else {
    out.scale = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.v[i] = make_uint4(pack_bf16(x[8 * i], x[8 * i + 1]), pack_bf16(x[8 * i + 2], x[8 * i + 3]),
                            pack_bf16(x[8 * i + 4], x[8 * i + 5]), pack_bf16(x[8 * i + 6], x[8 * i + 7]));
    }
  }
  return out;
}

// The eight scale bytes of an encoded row, in every lane.
__device__ __forceinline__ uint2 main_scales(const MainLane& row) {
  uint2 bytes = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bytes.x |= static_cast<unsigned>(__shfl_sync(kFullMask, row.scale, 4 * i)) << (8 * i);
    bytes.y |= static_cast<unsigned>(__shfl_sync(kFullMask, row.scale, 16 + 4 * i)) << (8 * i);
  }
  return bytes;
}

// Stores an encoded row; `scales` are those of main_scales().
__device__ __forceinline__ void store_main(const RowPool<MainFp8>& pool, int64_t row, const MainLane& value,
                                           uint2 scales, int lane) {
  uint8_t* data = pool.data(row);
  if (lane < kNopeLanes) {
    reinterpret_cast<uint4*>(data)[lane] = value.v[0];
  } else {
    uint4* rope = reinterpret_cast<uint4*>(data + kNopeDim) + 2 * (lane - kNopeLanes);
    rope[0] = value.v[0];
    rope[1] = value.v[1];
  }
  if (lane == 0) *reinterpret_cast<uint2*>(pool.scale(row)) = scales;
}

// One lane's share of a stored row, as loaded: the inverse of store_main.
__device__ __forceinline__ MainLane load_main(const RowPool<MainFp8>& pool, int64_t row, int lane) {
  const uint8_t* data = pool.data(row);
  MainLane out;
  if (lane < kNopeLanes) {
    out.v[0] = reinterpret_cast<const uint4*>(data)[lane];
    out.v[1] = make_uint4(0, 0, 0, 0);
    out.scale = pool.scale(row)[lane >> 2];
  } else {
    const uint4* rope = reinterpret_cast<const uint4*>(data + kNopeDim) + 2 * (lane - kNopeLanes);
    out.v[0] = rope[0];
    out.v[1] = rope[1];
    out.scale = 0;
  }
  return out;
}

// The lane's 16 channels as bf16, which holds every stored value exactly.
__device__ __forceinline__ void decode_main_bf16(const MainLane& row, int lane, uint4 (&out)[2]) {
  if (lane >= kNopeLanes) {
    out[0] = row.v[0];
    out[1] = row.v[1];
    return;
  }
  const float scale = ue8m0_decode(row.scale);
  const unsigned words[4] = {row.v[0].x, row.v[0].y, row.v[0].z, row.v[0].w};
  unsigned pairs[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 low = e4m3_decode2(words[j]), high = e4m3_decode2(words[j] >> 16);
    pairs[2 * j] = pack_bf16(low.x * scale, low.y * scale);
    pairs[2 * j + 1] = pack_bf16(high.x * scale, high.y * scale);
  }
  out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The lane's 16 channels as float.
__device__ __forceinline__ void decode_main(const MainLane& row, int lane, float (&x)[16]) {
  if (lane >= kNopeLanes) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned words[4] = {row.v[i].x, row.v[i].y, row.v[i].z, row.v[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack_bf16(words[j]);
        x[8 * i + 2 * j] = pair.x;
        x[8 * i + 2 * j + 1] = pair.y;
      }
    }
    return;
  }
  const float scale = ue8m0_decode(row.scale);
  const unsigned words[4] = {row.v[0].x, row.v[0].y, row.v[0].z, row.v[0].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 low = e4m3_decode2(words[j]), high = e4m3_decode2(words[j] >> 16);
    x[4 * j] = low.x * scale;
    x[4 * j + 1] = low.y * scale;
    x[4 * j + 2] = high.x * scale;
    x[4 * j + 3] = high.y * scale;
  }
}

}  // namespace dsv4
