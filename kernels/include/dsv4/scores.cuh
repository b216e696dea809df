// What the kernels of index_scores share: their arguments, a query's image from its heads, the product of 16 keys a warp
// with it, and where the scores go.
#pragma once

#include "dsv4/grid.cuh"
#include "dsv4/index_keys.cuh"
#include "dsv4/meta.cuh"
#include "dsv4/score_plan.cuh"

namespace dsv4 {

constexpr int kTeamThreads = 128;
constexpr int kCsaShift = 2;

template <typename Layout>
struct ScoreParams {
  StepMeta meta;
  ScorePlan plan;  // score_planned
  RowPool<Layout> keys;
  const void* q;  // [tokens, heads, 128]
  const float* weights;
  float* out;
  uint8_t* images;        // [tokens, image bytes]; on Hopper and in score_many
  float* image_weights;   // [tokens, 64]
  int64_t q_stride;       // elements a token
  int64_t weights_stride;
  int64_t out_stride;
  int heads;
  int max_entries;
  bool q_bf16;

  __device__ __forceinline__ int visible(int token) const {
    if (meta.request_of(token) < 0) return 0;
    return static_cast<int>(min((meta.positions[token] + 1) >> kCsaShift, static_cast<int64_t>(max_entries)));
  }

  // The same of a step whose numbers may be written meanwhile; between 0 and max_entries whatever they are.
  __device__ __forceinline__ int visible_ahead(int token) const {
    const int request = load_ahead(meta.token_to_req + token);
    const int64_t position = load_ahead(meta.positions + token);
    if (request < 0 || request >= meta.num_requests) return 0;
    return static_cast<int>(min(max((position + 1) >> kCsaShift, int64_t{0}), static_cast<int64_t>(max_entries)));
  }

  // Where the page in column `column` of a request stands: always in the table.
  __device__ __forceinline__ const int32_t* page_at(int request, int column) const {
    return meta.page_table + request * meta.page_table_stride + min(column, meta.max_pages - 1);
  }
  __device__ __forceinline__ int page_of(int request, int column) const { return *page_at(request, column); }
  __device__ __forceinline__ int64_t row_of(int page, int offset) const {
    const int64_t row = (static_cast<int64_t>(page) << (meta.page_shift - kCsaShift)) + offset;
    return min(max(row, int64_t{0}), keys.num_rows - 16);
  }

  __device__ __forceinline__ float4 load_q(int token, int head, int lane) const {
    const int64_t at = token * q_stride + head * kIndexDim + 4 * lane;
    if (!q_bf16) return *reinterpret_cast<const float4*>(static_cast<const float*>(q) + at);
    const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(q) + at);
    const float2 low = unpack_bf16(v.x), high = unpack_bf16(v.y);
    return make_float4(low.x, low.y, high.x, high.y);
  }
};

// MXFP4 keys of few queries are summed on the tensor cores (ReluSum): their scoring is bound by instructions, that of FP8
// keys by memory. Many queries a key keep the tensor cores busy with products, so there the sums are float32.
template <typename Layout, bool kHopper>
constexpr bool kHalfSums = kHopper && KeyShare<Layout>::kPieces == 1;

// The heads of one token that warp `warp` of `kWarps` brings into the image: loaded first, written when there is room.
template <typename Layout, int kWarps>
struct ImageShare {
  static constexpr int kRows = kMaxHeads / kWarps;
  float4 x[kRows];
  float weight[kRows];

  __device__ __forceinline__ void load(const ScoreParams<Layout>& p, int token, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = warp + kWarps * i;
      const bool real = head < p.heads;
      x[i] = real ? p.load_q(token, head, lane) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      weight[i] = real ? p.weights[token * p.weights_stride + head] : 0.0f;
    }
  }

  template <bool kHopper>
  __device__ __forceinline__ void write(uint8_t* image, float* weights, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = warp + kWarps * i;
      const float scale = write_image_row<Layout, kHopper>(image, head, lane, x[i]);
      if (lane == 0) weights[head] = image_weight(weight[i], scale);
    }
  }
};

// dots[16 keys of the warp x 64 heads]; with kHopper a product of the whole team, and `image` its hopper::panel_start.
template <bool kHopper, typename Layout>
__device__ __forceinline__ void multiply(const KeyShare<Layout>& key, unsigned image, int lane, float (&dots)[32],
                                         float (&factor)[2]) {
  if constexpr (kHopper) {
    unsigned a[4][4];
    operand_e4m3(key, SignedCodes{SignedCodes::kHalfSigns}, a, factor);
    hopper::wgmma_operands(a);
    hopper::wgmma_registers(dots);
    hopper::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      hopper::wgmma_e4m3_64x64x32(dots, a[s], hopper::panel_at(image + 2 * s), s > 0);
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
    hopper::wgmma_registers(dots);
  } else {
    unsigned a[8][4];
    operand_bf16(key, lane, a, factor);
    multiply_image(a, image, lane, dots);
  }
}

__device__ __forceinline__ void store_if(float* at, float value, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.global.f32 [%0], %1;\n"
      "}" ::"l"(at),
      "f"(value), "r"(static_cast<int>(condition))
      : "memory");
}

// `out` is the token's row of scores.
__device__ __forceinline__ void store_scores(float* out, int visible, int first, int lane, const float (&sum)[2],
                                             const float (&factor)[2]) {
  // The quad's first thread stores key lane / 4, its second key lane / 4 + 8.
  const int which = lane & 3, entry = first + (lane >> 2) + 8 * which;
  if (which < 2 && entry < visible) out[entry] = which ? sum[1] * factor[1] : sum[0] * factor[0];
}

}  // namespace dsv4
