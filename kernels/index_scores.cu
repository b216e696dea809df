// Scores of all visible indexer keys for each query; contract in sglang_dsv4/ops/index_scores.py.
//
// Work is dealt to teams of four warps in tiles of 64 keys. A key is loaded once, straight into operand registers; the
// query's heads stand in shared memory as the other operand, so one product step gives 16 keys x 64 heads a warp.
//
// `score_few`  few queries a request (decode): the tiles of all queries, one after another, are cut into equal ranges,
//              one a block, so that mixed lengths balance and a block meets one or two queries. Nothing is known on the
//              host but the number of tokens.
// `score_many` many queries a request (prefill): a block holds 256 keys in registers and streams the images of its
//              queries past them; `make_images` wrote those once.
#include "dsv4/check.h"
#include "dsv4/grid.cuh"
#include "dsv4/index_keys.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kTeamThreads = 128;
constexpr int kCsaShift = 2;
constexpr int kFewTeams = 4;
constexpr int kFewThreads = kFewTeams * kTeamThreads;
constexpr int kFewTokens = 1024;  // tokens whose tile counts a block of score_few scans
constexpr int kFewPages = 1024;   // pages of a request that a block looks up at a time
constexpr int kManyTeams = 2;
constexpr int kManyThreads = kManyTeams * kTeamThreads;

template <typename Layout>
struct Params {
  StepMeta meta;
  RowPool<Layout> keys;
  const void* q;  // [tokens, heads, 128]
  const float* weights;
  float* out;
  uint8_t* images;        // score_many: [tokens, image bytes]
  float* image_weights;   // score_many: [tokens, 64]
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

  // First pool row of the page in column `column` of a request: always a row of the pool, whatever the table holds.
  __device__ __forceinline__ int page_of(int request, int column) const {
    return meta.page_table[request * meta.page_table_stride + min(column, meta.max_pages - 1)];
  }
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

  __device__ __forceinline__ void load(const Params<Layout>& p, int token, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = warp + kWarps * i;
      const bool real = head < p.heads;
      x[i] = real ? p.load_q(token, head, lane) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      weight[i] = real ? p.weights[token * p.weights_stride + head] : 0.0f;
    }
  }

  template <bool kHopper, bool kHalf>
  __device__ __forceinline__ void write(uint8_t* image, float* weights, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = warp + kWarps * i;
      const float scale = write_image_row<Layout, kHopper>(image, head, lane, x[i]);
      if (lane == 0) weights[head] = (kHalf ? 1.0f : 0.5f) * weight[i] * scale;  // weigh() sums 2 relu
    }
  }
};

// dots[16 keys of the warp x 64 heads]; with kHopper a product of the whole team.
template <bool kHopper, typename Layout>
__device__ __forceinline__ void multiply(const KeyShare<Layout>& key, unsigned image, int lane, float (&dots)[32],
                                         float (&factor)[2]) {
  if constexpr (kHopper) {
    unsigned a[4][4];
    operand_e4m3(key, lane, a, factor);
    hopper::wgmma_operands(a);
    hopper::wgmma_registers(dots);
    hopper::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      hopper::wgmma_e4m3_64x64x32(dots, a[s], hopper::panel_descriptor(image + 32 * s), s > 0);
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

// `out` is the token's row of scores.
__device__ __forceinline__ void store_scores(float* out, int visible, int first, int lane, const float (&sum)[2],
                                             const float (&factor)[2]) {
  // The quad's first thread stores key lane / 4, its second key lane / 4 + 8.
  const int which = lane & 3, entry = first + (lane >> 2) + 8 * which;
  if (which < 2 && entry < visible) out[entry] = which ? sum[1] * factor[1] : sum[0] * factor[0];
}

// ---- few queries a request ----

// Stages of a team. Elsewhere than on Hopper a block may have 99 KB of shared memory.
template <typename Layout, bool kHopper>
constexpr int kFewStages = kHopper ? (KeyShare<Layout>::kPieces == 1 ? 8 : 5) : (KeyShare<Layout>::kPieces == 1 ? 4 : 2);
template <typename Layout, bool kHopper>
constexpr int kFewShared =
    kImageBytes<kHopper> + kFewTeams * kFewStages<Layout, kHopper> * KeyShare<Layout>::kStageBytes + 1024;

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kFewThreads, 1) score_few(const __grid_constant__ Params<Layout> p) {
  constexpr int kStages = kFewStages<Layout, kHopper>, kStageBytes = KeyShare<Layout>::kStageBytes;
  constexpr int kWarps = kFewThreads / 32;
  extern __shared__ uint8_t raw_shared[];
  __shared__ int tiles_before[kFewTokens + 1];
  __shared__ int visible_of[kFewTokens], request_of[kFewTokens];
  __shared__ unsigned page_rows[kFewPages];
  __shared__ int warp_sums[kWarps];
  __shared__ __align__(16) float weights[kMaxHeads];

  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x & 31, block_warp = threadIdx.x >> 5;
  const int team = block_warp >> 2, warp = block_warp & 3;
  uint8_t* const image = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  const unsigned image_address = shared_address(image);
  typename KeyShare<Layout>::Places places;
  places.start(image_address + kImageBytes<kHopper> + team * kStages * kStageBytes, warp, lane);

  // Tiles before each token: a block-wide prefix sum, kFewTokens / kFewThreads tokens a thread.
  constexpr int kPerThread = kFewTokens / kFewThreads;
  int counts[kPerThread], own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = threadIdx.x * kPerThread + i;
    int visible = 0, request = -1;
    if (token < p.meta.num_tokens) {
      request = p.meta.request_of(token);
      const int64_t position = p.meta.positions[token];
      if (request >= 0) visible = static_cast<int>(min((position + 1) >> kCsaShift, static_cast<int64_t>(p.max_entries)));
    }
    visible_of[token] = visible;
    request_of[token] = request;
    counts[i] = (visible + kKeyTile - 1) / kKeyTile;
    own += counts[i];
  }
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kFullMask, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) warp_sums[block_warp] = before;
  before -= own;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const int sum = warp_sums[i];
    before += i < block_warp ? sum : 0;
    total += sum;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    tiles_before[threadIdx.x * kPerThread + i] = before;
    before += counts[i];
  }
  if (threadIdx.x == 0) tiles_before[kFewTokens] = total;
  __syncthreads();

  const int begin = static_cast<int>(static_cast<int64_t>(total) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(total) * (blockIdx.x + 1) / gridDim.x);
  const int rows_shift = p.meta.page_shift - kCsaShift;

  int low = 0, high = kFewTokens;  // the last token with tiles_before <= begin
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    (tiles_before[middle] <= begin ? low : high) = middle;
  }

  int token = low;
  for (int tile = begin; tile < end;) {
    while (tiles_before[token + 1] <= tile) ++token;
    const int token_tile = tile - tiles_before[token];
    const int first_page = token_tile * kKeyTile >> rows_shift;
    const int most_tiles = ((first_page + kFewPages) << rows_shift) / kKeyTile - token_tile;
    const int block_count = min(min(end, tiles_before[token + 1]) - tile, most_tiles);
    const int first_tile = token_tile + team;  // the team's; it takes every kFewTeams-th
    const int count = (block_count - team + kFewTeams - 1) / kFewTeams;
    tile += block_count;

    ImageShare<Layout, kWarps> share;
    share.load(p, token, block_warp, lane);
    const int visible = visible_of[token], request = request_of[token];
    float* const out = p.out + token * p.out_stride;
    const int first_entry = first_tile * kKeyTile + 16 * warp;
    // The pool row that each page starts at; any table leads to rows of the pool.
    const int last_page = (min((token_tile + block_count) * kKeyTile, visible) - 1) >> rows_shift;
    __syncthreads();  // the last rows and the last image have been read
    for (int page = first_page + threadIdx.x; page <= last_page; page += kFewThreads) {
      const unsigned row = static_cast<unsigned>(p.page_of(request, page)) << rows_shift;
      page_rows[page - first_page] = min(row, static_cast<unsigned>(p.keys.num_rows) - (1u << rows_shift));
    }
    __syncthreads();
    const auto copy = [&](int i, unsigned stage) {
      if (i < count) {
        const int entry = first_entry + i * kFewTeams * kKeyTile;
        // Warps behind the last page score keys of it that nobody asks for.
        const int page = min(entry >> rows_shift, last_page) - first_page;
        KeyShare<Layout>::copy(places, stage, p.keys, page_rows[page] + (entry & ((1 << rows_shift) - 1)), lane);
      }
      copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) copy(i, i * kStageBytes);

    share.template write<kHopper, kHalfSums<Layout, kHopper>>(image, weights, block_warp, lane);
    if constexpr (kHopper) hopper::fence_async_shared();
    __syncthreads();

    unsigned stage = 0, next_stage = (kStages - 1) * kStageBytes;
    // Reads the key of turn i and starts a copy into the stage that the warp read in the turn before.
    const auto next_key = [&](int i, KeyShare<Layout>& key) {
      copy_async_wait<kStages - 2>();
      __syncwarp();
      key.read(places, stage);
      copy(i + kStages - 1, next_stage);
      next_stage = stage;
      stage = stage == (kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
    };
    const int turn_entries = kFewTeams * kKeyTile;
    if constexpr (kHalfSums<Layout, kHopper>) {
      // The next key is converted while this one is multiplied.
      ReluSum relu;
      relu.start(weights, lane);
      unsigned a[2][4][4];
      float factor[2][2], dots[32];
      const auto prepare = [&](int i, int which) {
        KeyShare<Layout> key;
        next_key(i, key);
        operand_e4m3(key, lane, a[which], factor[which]);
        hopper::wgmma_operands(a[which]);  // converted here, not behind the wait that follows
      };
      const auto issue = [&](int which) {
        hopper::wgmma_registers(dots);
        hopper::wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          hopper::wgmma_e4m3_64x64x32(dots, a[which][s], hopper::panel_descriptor(image_address + 32 * s), s > 0);
        }
        hopper::wgmma_commit();
      };
      const auto collect = [&](unsigned(&packed)[4][4]) {
        hopper::wgmma_wait<0>();
        hopper::wgmma_registers(dots);
        ReluSum::pack(dots, packed);
      };
      const auto finish = [&](int i, int which, const unsigned(&packed)[4][4]) {
        float sum[2];
        relu.sum(packed, sum);
        if ((lane & 3) == 0) {
          const int entry = first_entry + i * turn_entries + (lane >> 2);
          if (entry < visible) out[entry] = sum[0] * factor[which][0];
          if (entry + 8 < visible) out[entry + 8] = sum[1] * factor[which][1];
        }
      };
      const auto turn = [&](int i, int which) {
        unsigned packed[4][4];
        prepare(i + 1, which ^ 1);
        collect(packed);
        issue(which ^ 1);
        finish(i, which, packed);
      };
      // No product is in flight where a branch begins or ends: the compiler would let each wait for the one before.
      if (count > 0) {
        prepare(0, 0);
        issue(0);
        int i = 0;
#pragma unroll 1
        for (; i + 2 < count; i += 2) {
          turn(i, 0);
          turn(i + 1, 1);
        }
        unsigned packed[4][4];
        collect(packed);
        finish(i, 0, packed);
        if (i + 1 < count) {
          prepare(i + 1, 1);
          issue(1);
          collect(packed);
          finish(i + 1, 1, packed);
        }
      }
    } else {
      float weight[16];
      load_weights(weights, lane, weight);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        KeyShare<Layout> key;
        next_key(i, key);
        float dots[32], factor[2], sum[2];
        multiply<kHopper>(key, image_address, lane, dots, factor);
        weigh(dots, weight, sum);
        store_scores(out, visible, first_entry + i * turn_entries, lane, sum, factor);
      }
    }
    copy_async_wait<0>();
  }
}

// ---- many queries a request ----

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kManyThreads) make_images(const __grid_constant__ Params<Layout> p) {
  const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (p.meta.request_of(token) < 0) return;
  ImageShare<Layout, kManyThreads / 32> share;
  share.load(p, token, warp, lane);
  share.template write<kHopper, false>(p.images + static_cast<int64_t>(token) * kImageBytes<kHopper>,
                                       p.image_weights + static_cast<int64_t>(token) * kMaxHeads, warp, lane);
}

constexpr int kQueryTile = 64;  // queries of one request a block
constexpr int kManyTiles = 2;   // key tiles a team holds
constexpr int kBlockKeys = kManyTeams * kManyTiles * kKeyTile;

template <bool kHopper>
struct ManyShared {
  static constexpr int kStages = kHopper ? 4 : 2;
  static constexpr int kStage = kImageBytes<kHopper> + 1024;  // image, weights, alignment of the next image
  static constexpr int kBytes = kStages * kStage + 1024;
};

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kManyThreads, kHopper ? 2 : 1) score_many(const __grid_constant__ Params<Layout> p) {
  constexpr int kStages = ManyShared<kHopper>::kStages, kStage = ManyShared<kHopper>::kStage;
  constexpr int kImage = kImageBytes<kHopper>;
  extern __shared__ uint8_t raw_shared[];
  const int lane = threadIdx.x & 31, team = threadIdx.x / kTeamThreads, warp = (threadIdx.x >> 5) & 3;
  const unsigned base = (shared_address(raw_shared) + 1023) & ~1023u;
  uint8_t* const aligned = raw_shared + (base - shared_address(raw_shared));

  // Which request's query tile this is: requests have ceil(tokens / kQueryTile) each. Every warp searches for itself.
  int request = -1, first_token = 0, last_token = 0;
  for (int start = 0, before = 0; start < p.meta.num_requests && request < 0; start += 32) {
    const int candidate = start + lane;
    int offset = 0, tokens = 0;
    if (candidate < p.meta.num_requests) {
      offset = p.meta.token_offsets[candidate];
      tokens = p.meta.token_offsets[candidate + 1] - offset;
    }
    const int tiles = (max(tokens, 0) + kQueryTile - 1) / kQueryTile;
    int upto = tiles;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(kFullMask, upto, step);
      if (lane >= step) upto += other;
    }
    const int local = static_cast<int>(blockIdx.y) - before - (upto - tiles);
    const unsigned found = __ballot_sync(kFullMask, local >= 0 && local < tiles);
    if (found) {
      const int source = __ffs(found) - 1;
      request = start + source;
      first_token = __shfl_sync(kFullMask, offset + local * kQueryTile, source);
      last_token = min(__shfl_sync(kFullMask, offset + tokens, source), first_token + kQueryTile);
    }
    before += __shfl_sync(kFullMask, upto, 31);
  }
  if (request < 0) return;
  const int block_entry = blockIdx.x * kBlockKeys;
  const int most = p.visible(last_token - 1);
  if (block_entry >= most) return;
  // The first query that sees a key of this block: positions ascend by one within a request.
  while (first_token < last_token - 1 && p.visible(first_token) <= block_entry) ++first_token;

  const int rows_shift = p.meta.page_shift - kCsaShift;
  const int first_entry = block_entry + team * kManyTiles * kKeyTile + 16 * warp;
  using Operand = unsigned[kHopper ? 4 : 8][4];
  Operand a[kManyTiles];
  float factor[kManyTiles][2];
#pragma unroll
  for (int i = 0; i < kManyTiles; ++i) {
    const int entry = first_entry + i * kKeyTile;
    const int page = p.page_of(request, min(entry, most - 1) >> rows_shift);
    KeyShare<Layout> key;
    key.load(p.keys, p.row_of(page, entry & ((1 << rows_shift) - 1)), lane);
    if constexpr (kHopper) {
      operand_e4m3(key, lane, a[i], factor[i]);
    } else {
      operand_bf16(key, lane, a[i], factor[i]);
    }
  }

  const int count = last_token - first_token;
  const auto fetch = [&](int i) {
    if (i < count) {
      const int64_t token = first_token + i;
      const unsigned stage = base + (i % kStages) * kStage;
      const uint8_t* source = p.images + token * kImage;
#pragma unroll
      for (int at = 0; at < kImage; at += 16 * kManyThreads) {
        copy_async16(stage + at + 16 * threadIdx.x, source + at + 16 * threadIdx.x);
      }
      if (threadIdx.x < kMaxHeads / 4) {
        copy_async16(stage + kImage + 16 * threadIdx.x, p.image_weights + token * kMaxHeads + 4 * threadIdx.x);
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(i);

  for (int i = 0; i < count; ++i) {
    copy_async_wait<kStages - 2>();
    if constexpr (kHopper) hopper::fence_async_shared();
    __syncthreads();
    fetch(i + kStages - 1);  // into the stage that every warp has left
    const int token = first_token + i, visible = p.visible(token);
    float* const out = p.out + token * p.out_stride;
    const unsigned image = base + (i % kStages) * kStage;
    const float* weights = reinterpret_cast<const float*>(aligned + (i % kStages) * kStage + kImage);
    if constexpr (kHopper) {
      float dots[kManyTiles][32];
      hopper::wgmma_registers(dots[0]);
      hopper::wgmma_registers(dots[1]);
      hopper::wgmma_fence();
#pragma unroll
      for (int t = 0; t < kManyTiles; ++t) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          hopper::wgmma_e4m3_64x64x32(dots[t], a[t][s], hopper::panel_descriptor(image + 32 * s), s > 0);
        }
        hopper::wgmma_commit();
      }
      float weight[16];
      load_weights(weights, lane, weight);
      const auto finish = [&](const float(&dot)[32], int t) {
        float sum[2];
        weigh(dot, weight, sum);
        store_scores(out, visible, first_entry + t * kKeyTile, lane, sum, factor[t]);
      };
      hopper::wgmma_wait<1>();
      hopper::wgmma_registers(dots[0]);
      finish(dots[0], 0);
      hopper::wgmma_wait<0>();
      hopper::wgmma_registers(dots[1]);
      finish(dots[1], 1);
    } else {
      float weight[16];
      load_weights(weights, lane, weight);
#pragma unroll
      for (int t = 0; t < kManyTiles; ++t) {
        float dots[32], sum[2];
        multiply_image(a[t], image, lane, dots);
        weigh(dots, weight, sum);
        store_scores(out, visible, first_entry + t * kKeyTile, lane, sum, factor[t]);
      }
    }
  }
}

// ---- host ----

template <typename Layout, bool kHopper>
void launch_scores(const TensorView& anchor, const Params<Layout>& p, bool many) {
  LaunchShape shape;
  if (!many) {
    // Whole blocks a token where there are few: with equal lengths no block then meets two queries.
    const int blocks = multiprocessors(), tokens = p.meta.num_tokens;
    shape.grid = dim3(tokens > 0 && tokens <= blocks ? blocks / tokens * tokens : blocks);
    shape.block = dim3(kFewThreads);
    shape.dynamic_smem = kFewShared<Layout, kHopper>;
    shape.overlap = true;
    if (tokens > 0) launch(anchor, shape, score_few<Layout, kHopper>, p);
    return;
  }
  shape.grid = dim3(p.meta.num_tokens);
  shape.block = dim3(kManyThreads);
  launch(anchor, shape, make_images<Layout, kHopper>, p);
  shape.grid = dim3((p.max_entries + kBlockKeys - 1) / kBlockKeys, p.meta.num_tokens / kQueryTile + p.meta.num_requests);
  shape.dynamic_smem = ManyShared<kHopper>::kBytes;
  launch(anchor, shape, score_many<Layout, kHopper>, p);
}

template <typename Layout>
void score(const TensorView& q, const TensorView& weights, const TensorView& keys, const TensorView& out,
           const TensorView& images, const TensorView& image_weights, const StepMeta& meta, bool hopper) {
  Params<Layout> p = {};
  p.meta = meta;
  p.keys = make_pool<Layout>(keys);
  p.q = data_of<const void>(q);
  p.weights = data_of<const float>(weights);
  p.out = data_of<float>(out);
  p.images = data_of<uint8_t>(images);
  p.image_weights = data_of<float>(image_weights);
  p.q_stride = q.stride(0);
  p.weights_stride = weights.stride(0);
  p.out_stride = out.stride(0);
  p.heads = static_cast<int>(q.size(1));
  p.max_entries = static_cast<int>(out.size(1));
  p.q_bf16 = is_bf16(q);
  const bool many = images.size(0) > 0;
  if (hopper && DSV4_ARCH == 90) {
    launch_scores<Layout, DSV4_ARCH == 90>(out, p, many);
  } else {
    launch_scores<Layout, false>(out, p, many);
  }
}

// `images` and `image_weights` hold no rows where each request has few tokens.
void index_scores(TensorView q, TensorView weights, TensorView keys, TensorView out, TensorView images,
                  TensorView image_weights, bool fp4, bool hopper, DSV4_META_PARAMS) {
  const DeviceGuard guard(out);
  const StepMeta meta = DSV4_META;
  if (fp4) {
    score<IndexFp4>(q, weights, keys, out, images, image_weights, meta, hopper);
  } else {
    score<IndexFp8>(q, weights, keys, out, images, image_weights, meta, hopper);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_scores, index_scores);
