// Indexer keys as operands of a matrix product.
//
// Four threads (a quad) share a key. A thread loads its share of a row and turns it into operand registers itself: keys
// are never rearranged. That the registers then hold the channels in an order of their own
// does no harm as long as the query's image in shared memory has the same order: `column()` gives it.
//
// A key's common factor leaves the product (relu(f x) = f relu(x) for f > 0), so what is multiplied are codes:
//   MXFP4  code * 2^(its scale - the row's largest scale), the factor is the largest scale
//   FP8    code, the factor is the row's float32 scale
// On Hopper the operands are e4m3, elsewhere bf16. In e4m3 the codes of an MXFP4 row are exact while its scales lie
// within 2^10 of each other (a query's: 2^8); smaller channels are rounded to 2^-14 of the largest possible one, about
// what the tensor cores' sum of e4m3 products keeps. Their largest products are kept within half precision, in which
// `ReluSum` goes on.
#pragma once

#include "dsv4/codecs.cuh"
#include "dsv4/mma.cuh"

namespace dsv4 {

constexpr int kKeyTile = 64;  // keys per step of a team of four warps; 16 a warp

// One thread's share of keys `row` and `row + 8` of a warp's 16.
template <typename Layout>
struct KeyShare {
  static constexpr int kPieces = Layout::kDataBytes / 64;  // 16-byte pieces of a key in a thread
  // What operand_e4m3 takes of a key's scales: that of the thread's own channels, or all.
  static constexpr bool kOwnScale = kPieces == 1;
  uint4 data[2][kPieces];  // MXFP4: channels 32 t ..; FP8: channels 64 piece + 16 t ..; t the thread's place in its quad
  unsigned scale[2];

  // Straight from the pool.
  template <bool kOwn>
  __device__ __forceinline__ void load(const RowPool<Layout>& pool, int64_t first, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = first + (lane >> 2) + 8 * i;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        data[i][piece] = load_once16(pool.data(row) + 64 * piece + 16 * (lane & 3));
      }
      scale[i] = kOwn ? load_once1(pool.scale(row) + (lane & 3)) : load_once4(pool.scale(row));
    }
  }
};

// A value that the compiler keeps where it would compute it again for every tile.
__device__ __forceinline__ unsigned keep(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ unsigned word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ int largest_byte(unsigned word) {
  return max(max(word & 255u, (word >> 8) & 255u), max((word >> 16) & 255u, word >> 24));
}

// 2^exponent, subnormal results included.
__device__ __forceinline__ float power_of_two(int exponent) {
  const int field = exponent + 127;
  return __uint_as_float(field > 0 ? static_cast<unsigned>(field) << 23 : field > -23 ? 1u << (22 + field) : 0u);
}

// The e4m3 codes of -{0, .5, 1, 1.5, 2, 3, 4, 6} * 2^(d - 6), low and high four, for d >= 1 and for smaller d, where the
// codes become subnormal and the conversion rounds.
__device__ __forceinline__ uint2 negative_e2m1_codes(int d) {
  return make_uint2(0x8c888080u + 0x08080800u * d, 0x9c989490u + 0x08080808u * d);
}
__device__ __forceinline__ uint2 subnormal_e2m1_codes(int d) {
  const float unit = power_of_two(d - 6);
  return make_uint2(0x80808080u | e4m3_encode4(0.0f, 0.5f * unit, unit, 1.5f * unit),
                    0x80808080u | e4m3_encode4(2.0f * unit, 3.0f * unit, 4.0f * unit, 6.0f * unit));
}

// __byte_perm without its own masking of the selector.
__device__ __forceinline__ unsigned permute(unsigned low, unsigned high, unsigned selector) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// ---- e4m3 operands (Hopper): a[k-step of 32][register] ----

constexpr int kLargestShift = 8;  // the largest code is 6 * 2^(8 - 6) = 24, and a query's at most 7: 128 * 24 * 7 < 2^15

// The bits of 2^(scale - bias + 6 - kLargestShift) while that is a normal number, and for any scale.
constexpr int kLeastNormal = kUe8m0Bias - 6 + kLargestShift - 126;
__device__ __forceinline__ float normal_factor(unsigned scale) {
  return __uint_as_float((scale << 23) + (static_cast<unsigned>(1 - kLeastNormal) << 23));
}
__device__ __forceinline__ float any_factor(unsigned scale) {
  return power_of_two(static_cast<int>(scale) - kUe8m0Bias + 6 - kLargestShift);
}

// What the fast path of operand_e4m3 leaves out: keys, or channels of a key, 2^7 apart, for which codes relative to the
// warp's largest scale would be subnormal, go by their own largest scale; and factors that are subnormal numbers.
__device__ __forceinline__ void adjust_codes(const unsigned (&own)[2], unsigned common, bool apart, uint2 (&codes)[2],
                                             float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) factor[i] = any_factor(common);
  if (!__any_sync(kFullMask, apart)) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned largest = max(own[i], __shfl_xor_sync(kFullMask, own[i], 1));
    largest = max(largest, __shfl_xor_sync(kFullMask, largest, 2));
    const int d = kLargestShift + static_cast<int>(own[i]) - static_cast<int>(largest);
    codes[i] = d < 1 ? subnormal_e2m1_codes(d) : negative_e2m1_codes(d);
    factor[i] = any_factor(largest);
  }
}

// Both halves the upper one, by an addition of half-precision numbers: shifts run on the integer pipe, of which the
// conversion of keys takes most, and the high half of an integer product stalls dispatch. Only for halves that are
// numbers: 0x7777 has an exponent bit too few for infinity and NaN.
__device__ __forceinline__ unsigned upper_half_twice(unsigned word) {
  unsigned both;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 twice;\n"
      "mov.b32 {low, high}, %1;\n"
      "mov.b32 twice, {high, high};\n"
      "add.f16x2 %0, twice, %2;\n"
      "}"
      : "=r"(both)
      : "r"(word), "r"(0x80008000u));
  return both;
}

// Four of a word's codes at a time. `half_signs` is kHalfSigns; in a loop it comes from memory, or the compiler, knowing
// it, would fetch it for each permutation.
struct SignedCodes {
  static constexpr unsigned kHalfSigns = 0x40404040u;
  unsigned half_signs;

  // `magnitudes` and `word` are the same low 16 bits without their signs and with. A selector whose bit 3 is set takes
  // the sign of a byte instead of it: 0x40 of a positive code, 0 of a negative one. All codes begin as negative ones,
  // and a product and sum clear the sign of the others.
  __device__ __forceinline__ unsigned operator()(const uint2& negative, unsigned magnitudes, unsigned word) const {
    return permute(negative.x, negative.y, magnitudes) - 2 * permute(half_signs, half_signs, word);
  }
};

// The first half of operand_e4m3, which needs no more than a key's scales.
struct KeyCodes {
  uint2 negative[2];

  __device__ __forceinline__ void start(const KeyShare<IndexFp4>& key, float (&factor)[2]) {
    // Codes relative to the largest scale of the warp's 16 keys, which is theirs in common.
    const unsigned common = __reduce_max_sync(kFullMask, max(key.scale[0], key.scale[1]));
    int d[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      d[i] = static_cast<int>(key.scale[i] + (kLargestShift - common));
      negative[i] = negative_e2m1_codes(d[i]);
      factor[i] = normal_factor(common);
    }
    const bool apart = min(d[0], d[1]) < 1;
    if (__any_sync(kFullMask, apart || common < kLeastNormal)) adjust_codes(key.scale, common, apart, negative, factor);
  }

  __device__ __forceinline__ void convert(const KeyShare<IndexFp4>& key, const SignedCodes& signed_codes,
                                          unsigned (&a)[4][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const unsigned word = word_of(key.data[i][0], s), magnitudes = word & 0x77777777u;
        a[s][i] = signed_codes(negative[i], magnitudes, word);
        a[s][2 + i] = signed_codes(negative[i], upper_half_twice(magnitudes), word >> 16);
      }
    }
  }
};

__device__ __forceinline__ void operand_e4m3(const KeyShare<IndexFp4>& key, const SignedCodes& signed_codes,
                                             unsigned (&a)[4][4], float (&factor)[2]) {
  KeyCodes codes;
  codes.start(key, factor);
  codes.convert(key, signed_codes, a);
}

__device__ __forceinline__ void operand_e4m3(const KeyShare<IndexFp8>& key, const SignedCodes&, unsigned (&a)[4][4],
                                             float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factor[i] = __uint_as_float(key.scale[i]);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      a[s][i] = word_of(key.data[i][s >> 1], 2 * (s & 1));
      a[s][2 + i] = word_of(key.data[i][s >> 1], 2 * (s & 1) + 1);
    }
  }
}

// ---- bf16 operands: a[k-step of 16][register] ----

__device__ __forceinline__ void operand_bf16(const KeyShare<IndexFp4>& key, int lane, unsigned (&a)[8][4],
                                             float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int largest = largest_byte(key.scale[i]);
    const int own = (key.scale[i] >> (8 * (lane & 3))) & 255;
    factor[i] = power_of_two(largest - kUe8m0Bias);
    // The three code bits at the bottom of exponent and mantissa read as 2^-126 of the value.
    const unsigned shift = power_bf16(max(126 + own - largest, -126));
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const unsigned w = word_of(key.data[i][0], s);
      const unsigned pairs[4] = {
          ((w << 6) & 0x01c001c0u) | ((w << 12) & 0x80008000u), ((w << 2) & 0x01c001c0u) | ((w << 8) & 0x80008000u),
          ((w >> 2) & 0x01c001c0u) | ((w << 4) & 0x80008000u), ((w >> 6) & 0x01c001c0u) | (w & 0x80008000u)};
#pragma unroll
      for (int p = 0; p < 4; ++p) a[2 * s + p / 2][i + 2 * (p & 1)] = multiply_bf16(pairs[p], shift);
    }
  }
}

__device__ __forceinline__ void operand_bf16(const KeyShare<IndexFp8>& key, int, unsigned (&a)[8][4],
                                             float (&factor)[2]) {
  const unsigned shift = power_bf16(kE4m3Shift);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factor[i] = __uint_as_float(key.scale[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned word = word_of(key.data[i][half], j);
        a[4 * half + j][i] = multiply_bf16(e4m3_as_bf16<false>(word), shift);
        a[4 * half + j][2 + i] = multiply_bf16(e4m3_as_bf16<true>(word), shift);
      }
    }
  }
}

// ---- the query's image ----

constexpr int kMaxHeads = 64;

// Bytes of one query's image: a row of 128 channels per head, 16-byte units XORed with head % 8.
template <bool kHopper>
constexpr int kImageBytes = kMaxHeads * kIndexDim * (kHopper ? 1 : 2);

// Byte offset in the image of channel `c` of a head, c a multiple of 4 (FP8 rows: of 2 on bf16 operands).
template <typename Layout>
__device__ __forceinline__ int e4m3_image_offset(int head, int c) {
  int column;
  if constexpr (Layout::kScaleBytes == 4 && Layout::kDataBytes == kIndexDim / 2) {
    column = 32 * ((c & 31) >> 3) + 16 * ((c >> 2) & 1) + 4 * (c >> 5);
  } else {
    const int word = (c & 15) >> 2;
    column = 32 * (2 * (c >> 6) + (word >> 1)) + 16 * (word & 1) + 4 * ((c & 63) >> 4);
  }
  return head * 128 + ((((column >> 4) ^ head) & 7) << 4) + (column & 15);
}

// Element of channel `c` in a head's row of the bf16 image.
template <typename Layout>
__device__ __forceinline__ int bf16_column(int c) {
  if constexpr (Layout::kDataBytes == kIndexDim / 2) {
    const int thread = c >> 5, word = (c & 31) >> 3, nibble = c & 7, pair = nibble & 3;
    return 16 * (2 * word + (pair >> 1)) + 8 * (pair & 1) + 2 * thread + (nibble >> 2);
  }
  const int half = c >> 6, thread = (c & 63) >> 4, word = (c & 15) >> 2, byte = c & 3;
  return 16 * (4 * half + word) + 8 * (byte >> 1) + 2 * thread + (byte & 1);
}
__device__ __forceinline__ int bf16_image_offset(int head, int column) {
  return head * 256 + (((column >> 3) ^ (head & 7)) << 4) + 2 * (column & 7);
}

// What makes a head's channels codes, given their largest magnitude: exactly, if they were rounded as keys are.
template <typename Layout>
struct HeadScale {
  float scale, inverse;

  __device__ __forceinline__ explicit HeadScale(float amax) {
    if constexpr (Layout::kDataBytes == kIndexDim / 2) {
      // A power of two that puts the largest channel into (3.5, 7].
      const int exponent = ue8m0_ceil<2, 0x600000u>(fmaxf(amax, 1e-30f));
      scale = ue8m0_decode(exponent);
      inverse = ue8m0_inverse(exponent);
    } else {
      scale = fmaxf(amax, kFp8AmaxFloor) / kE4m3Max;
      inverse = 0.0f;
    }
  }
  __device__ __forceinline__ float code(float x) const {
    return Layout::kDataBytes == kIndexDim / 2 ? x * inverse : x / scale;
  }
};

// What twice a head's relu is multiplied with, of its weight and its HeadScale.
__device__ __forceinline__ float image_weight(float weight, float scale) { return 0.5f * weight * scale; }

// One warp writes a head's row: lane l holds channels 4 l .. 4 l + 3. Returns the factor that goes into the head's
// weight.
template <typename Layout, bool kHopper>
__device__ __forceinline__ float write_image_row(uint8_t* image, int head, int lane, float4 x) {
  float amax = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
#pragma unroll
  for (int step = 16; step; step >>= 1) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
  const HeadScale<Layout> of(amax);
  const float code[4] = {of.code(x.x), of.code(x.y), of.code(x.z), of.code(x.w)};
  const int c = 4 * lane;
  if constexpr (kHopper) {
    *reinterpret_cast<unsigned*>(image + e4m3_image_offset<Layout>(head, c)) =
        e4m3_encode4(code[0], code[1], code[2], code[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<__nv_bfloat16*>(image + bf16_image_offset(head, bf16_column<Layout>(c + i))) =
          __float2bfloat16_rn(code[i]);
    }
  }
  return of.scale;
}

// ---- scores of 16 keys a warp ----

__device__ __forceinline__ float twice_relu(float x) { return x + fabsf(x); }

// A thread's share of sum[i], of keys lane / 4 + 8 i over its heads. The image's weights are halved, as
// 2 relu(x) = x + |x| needs one addition, which runs beside the conversions of keys where a maximum would not.
__device__ __forceinline__ void weigh_share(const float (&dots)[32], const float (&weight)[16], float (&sum)[2]) {
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[0] = fmaf(twice_relu(dots[4 * j + i]), weight[2 * j + i], sum[0]);
      sum[1] = fmaf(twice_relu(dots[4 * j + 2 + i]), weight[2 * j + i], sum[1]);
    }
  }
}

// The sums over all heads, in every thread of a quad.
__device__ __forceinline__ void weigh(const float (&dots)[32], const float (&weight)[16], float (&sum)[2]) {
  weigh_share(dots, weight, sum);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 1);
    sum[i] += __shfl_xor_sync(kFullMask, sum[i], 2);
  }
}

// The weights of a thread's heads 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void load_weights(const float* weights, int lane, float (&weight)[16]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = *reinterpret_cast<const float2*>(weights + 8 * j + 2 * (lane & 3));
    weight[2 * j] = pair.x;
    weight[2 * j + 1] = pair.y;
  }
}

// dots[16 keys of the warp x 64 heads] with the bf16 image at shared address `image`.
__device__ __forceinline__ void multiply_image(const unsigned (&a)[8][4], unsigned image, int lane, float (&dots)[32]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int head = 8 * j + (lane & 7);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned b[4];  // k-steps 2 k and 2 k + 1
      load_matrices(b, image + head * 256 + (((4 * k + (lane >> 3)) ^ (head & 7)) << 4));
      mma_bf16(d, a[2 * k], b[0], b[1]);
      mma_bf16(d, a[2 * k + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) dots[4 * j + i] = d[i];
  }
}

// The same on the tensor cores, for products within half precision: relu(dots) [16 keys x 64 heads] times the weights,
// each split into a half-precision number and the rest, as columns 0 and 1 of the other operand. Weights, twice the
// image's as this is relu itself, are scaled together so that the largest lies in (0.5, 1].
struct ReluSum {
  unsigned b[4][2];
  float scale;

  // `weights` are the image's 64, in shared memory.
  __device__ __forceinline__ void set(const float* weights, int lane) {
    float largest = fmaxf(fabsf(weights[lane]), fabsf(weights[lane + 32]));
#pragma unroll
    for (int step = 16; step; step >>= 1) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
    const int exponent = ue8m0_ceil<0, 0u>(fmaxf(2.0f * largest, 1e-30f));
    const float twice_inverse = 2.0f * ue8m0_inverse(exponent);
    scale = ue8m0_decode(exponent);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 w = *reinterpret_cast<const float2*>(weights + 16 * k + 8 * i + 2 * (lane & 3));
        const float x = w.x * twice_inverse, y = w.y * twice_inverse;
        const __half2 high = __floats2half2_rn(x, y);
        const __half2 rest = __floats2half2_rn(x - __low2float(high), y - __high2float(high));
        const unsigned column = lane >> 2;
        b[k][i] = column == 0   ? *reinterpret_cast<const unsigned*>(&high)
                  : column == 1 ? *reinterpret_cast<const unsigned*>(&rest)
                                : 0u;
      }
    }
  }

  // The operand's other columns are zero: a warp finds it again in what its first kLanes lanes leave, and in a zero.
  static constexpr int kLanes = 8;
  __device__ __forceinline__ void store(uint4 (*stored)[2], int lane) const {
    if (lane >= kLanes) return;
    stored[lane][0] = make_uint4(b[0][0], b[0][1], b[1][0], b[1][1]);
    stored[lane][1] = make_uint4(b[2][0], b[2][1], b[3][0], b[3][1]);
  }
  // `address` of the lane's two units in shared memory.
  __device__ __forceinline__ void load(unsigned address, float scale_of) {
    const uint4 low = load_shared16(address), high = load_shared16(address + 16);
    b[0][0] = low.x, b[0][1] = low.y, b[1][0] = low.z, b[1][1] = low.w;
    b[2][0] = high.x, b[2][1] = high.y, b[3][0] = high.z, b[3][1] = high.w;
    scale = scale_of;
  }

  __device__ __forceinline__ static void pack(const float (&dots)[32], unsigned (&a)[4][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (2 * k + (i >> 1)) + 2 * (i & 1);
        a[k][i] = pack_relu_f16(dots[at], dots[at + 1]);
      }
    }
  }

  // The products under way, in two chains, as each waits for what it adds to.
  struct Parts {
    float of[2][4];
  };
  __device__ __forceinline__ void start(const unsigned (&a)[4][4], Parts& parts) const {
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts.of[chain][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int chain = 0; chain < 2; ++chain) {
        const int k = 2 * chain + step;
        mma_f16(parts.of[chain], a[k], b[k][0], b[k][1]);
      }
    }
  }
  // Of key lane / 4 + 8 i, in the first thread of a quad.
  __device__ __forceinline__ float sum(const Parts& parts, int i) const {
    const float(&low)[4] = parts.of[0];
    const float(&high)[4] = parts.of[1];
    return ((low[2 * i] + low[2 * i + 1]) + (high[2 * i] + high[2 * i + 1])) * scale;
  }
};

}  // namespace dsv4
