// What the attention kernels share: where a query's keys come from, and how partial results become the output.
//
// A query attends to a list of columns, 64 a tile; a column names a row or is masked by -1. Logits are kept in base 2.
#pragma once

#include "dsv4/codecs.cuh"
#include "dsv4/mma.cuh"
#include "dsv4/predicated.cuh"
#include "dsv4/rows.cuh"

namespace dsv4 {

constexpr int kTileRows = 64;
constexpr float kLog2e = 1.4426950408889634f;

// What a column holds, as loaded: asked for long before it is looked at, so nothing is computed from it here.
struct Column {
  unsigned low = ~0u, high = 0;  // no row; high is 0 but for int64 columns

  __device__ __forceinline__ void load(const int32_t* at, bool real) { load4_if(low, at, real); }
  __device__ __forceinline__ void load(const int64_t* at, bool real) {
    load4_if(low, at, real);
    load4_if(high, reinterpret_cast<const unsigned*>(at) + 1, real);
  }
  // The row it names, -1 where it is masked or no such row exists.
  __device__ __forceinline__ int row(int64_t num_rows) const {
    return high == 0 && low < min(num_rows, int64_t{1} << 31) ? static_cast<int>(low) : -1;
  }
};

// Decode: 128 window columns, then entry columns, packed rows of two pools.
struct PackedRows {
  RowPool<MainFp8> window, entries;
  const void* window_rows;  // int32 or int64 [tokens, 128]
  const int32_t* entry_rows;
  const int32_t* entry_lens;  // [tokens], no entries behind so many columns; null where that is not known
  int64_t window_stride, entry_stride;
  int num_entries;  // columns
  bool window_wide;

  static constexpr int kFixedTiles = kWindow / kTileRows;
  __device__ __forceinline__ int columns() const { return num_entries; }
  __device__ __forceinline__ int32_t column(int token, int i) const { return entry_rows[token * entry_stride + i]; }

  __device__ __forceinline__ const RowPool<MainFp8>& pool(int tile) const {
    return tile < kFixedTiles ? window : entries;
  }
  __device__ __forceinline__ bool knows_length() const { return entry_lens != nullptr; }
  __device__ __forceinline__ int length(int token) const { return min(max(entry_lens[token], 0), num_entries); }

  __device__ __forceinline__ Column fetch(int token, int tile, int i, bool real = true) const {
    Column x;
    if (tile < kFixedTiles) {
      const int64_t at = token * window_stride + tile * kTileRows + i;
      if (window_wide) {
        x.load(static_cast<const int64_t*>(window_rows) + at, real);
      } else {
        x.load(static_cast<const int32_t*>(window_rows) + at, real);
      }
    } else {
      const int column = (tile - kFixedTiles) * kTileRows + i;
      x.load(entry_rows + token * entry_stride + column, real && column < num_entries);
    }
    return x;
  }
  __device__ __forceinline__ int row_of(const Column& x, int tile) const { return x.row(pool(tile).num_rows); }
  // Row of column i of a tile, -1 where there is none.
  __device__ __forceinline__ int row(int token, int tile, int i) const { return row_of(fetch(token, tile, i), tile); }
};

// Prefill: columns name rows of a dense bf16 workspace.
struct DenseRows {
  const __nv_bfloat16* workspace;
  const int32_t* indices;
  int64_t row_stride, index_stride;
  int num_columns, num_rows;

  static constexpr int kFixedTiles = 0;
  __device__ __forceinline__ int columns() const { return num_columns; }
  __device__ __forceinline__ int32_t column(int token, int i) const { return indices[token * index_stride + i]; }
  __device__ __forceinline__ bool knows_length() const { return false; }
  __device__ __forceinline__ int length(int) const { return num_columns; }
  __device__ __forceinline__ Column fetch(int token, int tile, int i, bool real = true) const {
    Column x;
    const int at = tile * kTileRows + i;
    x.load(indices + token * index_stride + at, real && at < num_columns);
    return x;
  }
  __device__ __forceinline__ int row_of(const Column& x, int) const { return x.row(num_rows); }
  __device__ __forceinline__ int row(int token, int tile, int i) const { return row_of(fetch(token, tile, i), tile); }
};

template <typename Rows>
struct AttentionParams {
  Rows rows;
  const __nv_bfloat16* q;  // [tokens, heads, 512]
  int64_t q_stride;        // of a token, in elements; a head's is 512
  __nv_bfloat16* out;      // [tokens, heads, 512], contiguous
  const float* sink;
  const float* rope;  // [positions, 64]
  const int64_t* positions;
  int64_t rope_rows;
  float* partial;        // [tokens, heads, splits, 512], relative to 2^maximum
  float2* partial_stat;  // [tokens, heads, splits]: maximum, sum
  int num_tokens, heads;
  float scale;  // of the logits, times log2 e
};

// The tiles of a query: all up to its last valid column, or what its length says. Called by the whole block; ends in a
// barrier.
template <typename Rows>
__device__ __forceinline__ int count_tiles(const Rows& rows, int token, int* shared_last) {
  if (rows.knows_length()) {
    const int length = rows.length(token);
    __syncthreads();
    return Rows::kFixedTiles + (length + kTileRows - 1) / kTileRows;
  }
  if (threadIdx.x == 0) *shared_last = 0;
  __syncthreads();
  int last = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows.columns(); i += blockDim.x) {
    if (rows.column(token, i) >= 0) last = i + 1;
  }
  last = __reduce_max_sync(kFullMask, last);
  if ((threadIdx.x & 31) == 0 && last > 0) atomicMax(shared_last, last);
  __syncthreads();
  return Rows::kFixedTiles + (*shared_last + kTileRows - 1) / kTileRows;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What a query's accumulated values are multiplied by: 1 / (sum + the sink's share); 0 where nothing is valid.
__device__ __forceinline__ float normaliser(float maximum, float sum, float sink) {
  if (!(sum > 0.0f)) return 0.0f;
  return 1.0f / (sum + exp2f(sink * kLog2e - maximum));
}

// Undoes the rotation of the channel pair `pair` of the last 64 channels.
__device__ __forceinline__ void derotate(const float* rope, int pair, float& even, float& odd) {
  const float cos = rope[pair], sin = rope[kRopeDim / 2 + pair];
  const float turned = even * cos + odd * sin;
  odd = odd * cos - even * sin;
  even = turned;
}

template <typename Rows>
__device__ __forceinline__ const float* rope_of(const AttentionParams<Rows>& p, int token) {
  // A padded token's position is untrusted.
  const int64_t position = p.positions[token];
  return p.rope + kRopeDim * min(max(position, int64_t{0}), p.rope_rows - 1);
}

// One warp a query and head: weighs the partial results of all splits.
template <typename Rows>
__global__ void __launch_bounds__(128) combine_kernel(const __grid_constant__ AttentionParams<Rows> p,
                                                      const int splits) {
  const int lane = threadIdx.x & 31;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 4 + (threadIdx.x >> 5);
  if (at >= static_cast<int64_t>(p.num_tokens) * p.heads) return;
  const int token = static_cast<int>(at / p.heads), head = static_cast<int>(at % p.heads);
  const float2* stat = p.partial_stat + at * splits;
  float maximum = -INFINITY, sum = 0.0f;
  for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, stat[s].x);
  float x[4][4] = {};
  for (int s = 0; s < splits; ++s) {
    if (!(stat[s].y > 0.0f)) continue;  // its values were never written
    const float weight = exp2f(stat[s].x - maximum);
    sum += weight * stat[s].y;
    const float4* values = reinterpret_cast<const float4*>(p.partial + (at * splits + s) * kHeadDim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = values[lane + 32 * i];
      x[i][0] += weight * v.x, x[i][1] += weight * v.y, x[i][2] += weight * v.z, x[i][3] += weight * v.w;
    }
  }
  const float factor = normaliser(maximum, sum, p.sink[head]);
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

// Whether one of four ue8m0 codes passes kPlainScale, the largest whose power of two, times 2^kE4m3Shift, is a bf16.
constexpr unsigned kPlainScale = 254 - kE4m3Shift;
__device__ __forceinline__ bool any_large(unsigned scales) {
  constexpr unsigned kCarries = 0x7f - (kPlainScale & 0x7f);  // into a byte's highest bit
  return (((scales & 0x7f7f7f7fu) + 0x01010101u * kCarries) & scales & 0x80808080u) != 0;
}
static_assert(kPlainScale >= 0x80);

// 16 e4m3 codes as bf16 in `out`; `scale` is their ue8m0 code. Codes above kPlainScale, which no trained model has, take
// a second product, if kLarge.
template <bool kLarge = true>
__device__ __forceinline__ void decode_chunk(const uint4& codes, unsigned scale, uint4 (&out)[2]) {
  const unsigned factor = min(scale + kE4m3Shift, 254u) * 0x00800080u;
  unsigned pairs[8];
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    pairs[2 * j] = multiply_bf16(e4m3_as_bf16<false>(words[j]), factor);
    pairs[2 * j + 1] = multiply_bf16(e4m3_as_bf16<true>(words[j]), factor);
  }
  if (kLarge && scale > kPlainScale) {
    const unsigned rest = power_bf16(static_cast<int>(scale) - static_cast<int>(kPlainScale));
#pragma unroll
    for (unsigned& pair : pairs) pair = multiply_bf16(pair, rest);
  }
  out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

}  // namespace dsv4
