// Attention with the products that every tensor core since sm_80 has: a block takes up to 64 heads of a query and a range
// of its columns, 32 rows at a time.
//
// The rows of the next step are already in registers while those of this one, decoded to bf16 in shared memory, are
// multiplied. Logits: each warp a piece of heads x 32 rows; softmax: each warp its own heads; values: each warp 64
// channels of all heads.
#pragma once

#include "dsv4/attention.cuh"

namespace dsv4 {
namespace portable {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 32;
constexpr int kLogitStride = kRows + 1;      // floats
constexpr int kWeightStride = kRows + 8;     // bf16: eight rows start in eight different bank groups
constexpr int kRowUnits = kHeadDim / 8;      // 16-byte units of a bf16 row

template <int kHeads>
struct Shared {
  uint4 q[kHeads * kRowUnits];
  uint4 rows[kRows * kRowUnits];
  float logits[kHeads * kLogitStride];
  __nv_bfloat16 weights[kHeads * kWeightStride];
  float rescale[kHeads], maximum[kHeads], sum[kHeads];
  int ids[kRows];
  int last;
};
template <int kHeads>
constexpr size_t shared_bytes() {
  return sizeof(Shared<kHeads>);
}

// 16-byte units XORed with row % 8, so that eight rows of a matrix lie in eight different bank groups.
__device__ __forceinline__ int unit_of(int row, int unit) { return row * kRowUnits + (unit ^ (row & 7)); }

// A thread's share of the next 32 rows, in registers.
template <typename Rows>
struct Next;

template <>
struct Next<PackedRows> {
  static constexpr int kChunks = kRows * (kNopeDim / 16);
  uint4 codes[(kChunks + kThreads - 1) / kThreads], rotated;
  unsigned scales[(kChunks + kThreads - 1) / kThreads];
  int id;  // of row threadIdx.x, for the first threads

  __device__ __forceinline__ void load(const PackedRows& rows, int token, int step) {
    const int tile = step >> 1, offset = (step & 1) * kRows;
    const RowPool<MainFp8>& pool = rows.pool(tile);
#pragma unroll
    for (int i = 0; i * kThreads < kChunks; ++i) {
      const int at = i * kThreads + threadIdx.x, row = at / 28, chunk = at - 28 * row;
      codes[i] = make_uint4(0, 0, 0, 0);
      scales[i] = 0;
      const int source = at < kChunks ? rows.row(token, tile, offset + row) : -1;
      if (source >= 0) {
        codes[i] = load_once16(pool.data(source) + 16 * chunk);
        scales[i] = pool.scale(source)[chunk >> 2];
      }
    }
    const int source = rows.row(token, tile, offset + (threadIdx.x >> 3));
    rotated = make_uint4(0, 0, 0, 0);
    if (source >= 0) rotated = load_once16(pool.data(source) + kNopeDim + 16 * (threadIdx.x & 7));
    id = threadIdx.x < kRows ? rows.row(token, tile, offset + threadIdx.x) : -1;
  }

  __device__ __forceinline__ void store(uint4* target) const {
#pragma unroll
    for (int i = 0; i * kThreads < kChunks; ++i) {
      const int at = i * kThreads + threadIdx.x, row = at / 28, chunk = at - 28 * row;
      if (at < kChunks) {
        uint4 values[2];
        decode_chunk(codes[i], scales[i], values);
        target[unit_of(row, 2 * chunk)] = values[0];
        target[unit_of(row, 2 * chunk + 1)] = values[1];
      }
    }
    target[unit_of(threadIdx.x >> 3, kNopeDim / 8 + (threadIdx.x & 7))] = rotated;
  }
};

template <>
struct Next<DenseRows> {
  static constexpr int kUnits = kRows * kRowUnits / kThreads;
  uint4 values[kUnits];
  int id;

  __device__ __forceinline__ void load(const DenseRows& rows, int token, int step) {
    const int tile = step >> 1, offset = (step & 1) * kRows;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = i * kThreads + threadIdx.x;
      const int source = rows.row(token, tile, offset + at / kRowUnits);
      values[i] = make_uint4(0, 0, 0, 0);
      if (source >= 0) {
        values[i] = *reinterpret_cast<const uint4*>(rows.workspace + source * rows.row_stride + 8 * (at % kRowUnits));
      }
    }
    id = threadIdx.x < kRows ? rows.row(token, tile, offset + threadIdx.x) : -1;
  }
  __device__ __forceinline__ void store(uint4* target) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int at = i * kThreads + threadIdx.x;
      target[unit_of(at / kRowUnits, at % kRowUnits)] = values[i];
    }
  }
};

// Logits of one step: warps tile kHeads x 32 as (16 heads) x (kColumns rows).
template <int kHeads>
__device__ __forceinline__ void multiply_queries(Shared<kHeads>& shared, int warp, int lane) {
  constexpr int kHeadTiles = kHeads / 16;
  constexpr int kColumns = kHeads == 64 ? 16 : 8;
  if (warp >= kHeadTiles * (kRows / kColumns)) return;
  const int head = 16 * (warp % kHeadTiles), column = kColumns * (warp / kHeadTiles);
  const int matrix = lane >> 3, within = lane & 7;
  float d[kColumns / 8][4] = {};
#pragma unroll 4
  for (int k = 0; k < kRowUnits; k += 4) {
    unsigned a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(a[i], shared_address(&shared.q[unit_of(head + 8 * (matrix & 1) + within,
                                                           k + 2 * i + (matrix >> 1))]));
    }
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      unsigned b[4];
      load_matrices(b, shared_address(&shared.rows[unit_of(column + 8 * c + within, k + matrix)]));
      mma_bf16(d[c], a[0], b[0], b[1]);
      mma_bf16(d[c], a[1], b[2], b[3]);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns / 8; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = head + (lane >> 2) + 8 * (i >> 1), at = column + 8 * c + 2 * (lane & 3) + (i & 1);
      shared.logits[row * kLogitStride + at] = d[c][i];
    }
  }
}

// A lane is a column; a warp owns kHeads / 8 heads. True where a head's maximum grew.
template <int kHeads>
__device__ __forceinline__ bool weigh_rows(Shared<kHeads>& shared, float scale, int warp, int lane) {
  bool grew = false;
  const bool valid = shared.ids[lane] >= 0;
#pragma unroll
  for (int i = 0; i < kHeads / kWarps; ++i) {
    const int head = warp * (kHeads / kWarps) + i;
    const float x = valid ? shared.logits[head * kLogitStride + lane] * scale : -INFINITY;
    float top = x;
#pragma unroll
    for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(kFullMask, top, step));
    const float before = shared.maximum[head], after = fmaxf(before, top);
    const float base = after == -INFINITY ? 0.0f : after;
    const __nv_bfloat16 weight = __float2bfloat16_rn(exp2_fast(x - base));
    float sum = __bfloat162float(weight);  // what is multiplied is what is summed
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(kFullMask, sum, step);
    const float rescale = before == -INFINITY ? 1.0f : exp2_fast(before - after);
    shared.weights[head * kWeightStride + lane] = weight;
    __syncwarp();
    if (lane == 0) {
      shared.rescale[head] = rescale;
      shared.maximum[head] = after;
      shared.sum[head] = shared.sum[head] * rescale + sum;
    }
    grew |= rescale != 1.0f;
  }
  return grew;
}

// Grid: (tokens, blocks of kHeads heads, splits).
template <int kHeads, typename Rows>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionParams<Rows> p) {
  constexpr int kHeadTiles = kHeads / 16;
  extern __shared__ __align__(16) uint8_t raw_shared[];
  Shared<kHeads>& shared = *reinterpret_cast<Shared<kHeads>*>(raw_shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, matrix = lane >> 3, within = lane & 7;
  const int token = blockIdx.x, first_head = blockIdx.y * kHeads;

  const int tiles = count_tiles(p.rows, token, &shared.last);
  const int splits = gridDim.z, split = blockIdx.z;
  const int begin = 2 * (tiles * split / splits), end = 2 * (tiles * (split + 1) / splits);

  for (int at = threadIdx.x; at < kHeads * kRowUnits; at += kThreads) {
    const int head = at / kRowUnits, unit = at % kRowUnits;
    const bool real = first_head + head < p.heads;
    const __nv_bfloat16* source = p.q + token * p.q_stride + (first_head + (real ? head : 0)) * kHeadDim + 8 * unit;
    shared.q[unit_of(head, unit)] = real ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
  }
  for (int head = threadIdx.x; head < kHeads; head += kThreads) {
    shared.maximum[head] = -INFINITY;
    shared.sum[head] = 0.0f;
  }

  float o[kHeadTiles][8][4] = {};  // [16 heads][8 channels]: channels 64 warp + 8 j
  Next<Rows> next;
  if (begin < end) next.load(p.rows, token, begin);
  for (int step = begin; step < end; ++step) {
    next.store(shared.rows);
    if (threadIdx.x < kRows) shared.ids[threadIdx.x] = next.id;
    __syncthreads();
    if (step + 1 < end) next.load(p.rows, token, step + 1);
    multiply_queries(shared, warp, lane);
    __syncthreads();
    const bool grew = weigh_rows(shared, p.scale, warp, lane);
    if (__syncthreads_or(grew)) {
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        const float first = shared.rescale[16 * m + (lane >> 2)], second = shared.rescale[16 * m + 8 + (lane >> 2)];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          o[m][j][0] *= first, o[m][j][1] *= first, o[m][j][2] *= second, o[m][j][3] *= second;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; k += 16) {
      unsigned b[4][4];  // two groups of 8 channels each
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        load_matrices_transposed(
            b[j], shared_address(&shared.rows[unit_of(k + 8 * (matrix & 1) + within, 8 * warp + 2 * j + (matrix >> 1))]));
      }
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        unsigned a[4];
        load_matrices(a, shared_address(&shared.weights[(16 * m + 8 * (matrix & 1) + within) * kWeightStride + k +
                                                        8 * (matrix >> 1)]));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          mma_bf16(o[m][2 * j], a, b[j][0], b[j][1]);
          mma_bf16(o[m][2 * j + 1], a, b[j][2], b[j][3]);
        }
      }
    }
    __syncthreads();
  }
  if (begin == end) __syncthreads();  // maxima and sums are set

#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = 16 * m + 8 * i + (lane >> 2), head = first_head + local;
      if (head >= p.heads) continue;
      const int64_t at = static_cast<int64_t>(token) * p.heads + head;
      const float maximum = shared.maximum[local], sum = shared.sum[local];
      if (splits > 1) {
        const int64_t slot = at * splits + split;
        if (warp == 0 && (lane & 3) == 0) p.partial_stat[slot] = make_float2(maximum, sum);
        if (!(sum > 0.0f)) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          *reinterpret_cast<float2*>(p.partial + slot * kHeadDim + 64 * warp + 8 * j + 2 * (lane & 3)) =
              make_float2(o[m][j][2 * i], o[m][j][2 * i + 1]);
        }
        continue;
      }
      const float factor = normaliser(maximum, sum, p.sink[head]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float even = o[m][j][2 * i], odd = o[m][j][2 * i + 1];
        if (warp == kWarps - 1) derotate(rope_of(p, token), 4 * j + (lane & 3), even, odd);
        *reinterpret_cast<unsigned*>(p.out + at * kHeadDim + 64 * warp + 8 * j + 2 * (lane & 3)) =
            pack_bf16(even * factor, odd * factor);
      }
    }
  }
}

}  // namespace portable
}  // namespace dsv4
