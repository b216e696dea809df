// Scores of all visible indexer keys for each query; contract in sglang_dsv4/ops/index_scores.py.
//
// Work is dealt to teams of four warps in tiles of 64 keys. A key is loaded once, straight into operand registers; the
// query's heads stand in shared memory as the other operand, so one product step gives 16 keys x 64 heads a warp.
//
// `score_few`  few queries a request (decode): the tiles of all queries, one after another, are cut into equal ranges,
//              one a block, so that mixed lengths balance and a block meets one or two queries. Nothing is known on the
//              host but the number of tokens. In dsv4/scores_few.cuh.
// `score_planned`  the same where a plan says which requests share pages (Hopper). In dsv4/scores_shared.cuh.
// `score_many` many queries a request (prefill): a block holds 256 keys in registers and streams the images of its
//              queries past them; index_query or `make_images` wrote those once.
#include "dsv4/check.h"
#include "dsv4/scores_few.cuh"
#include "dsv4/scores_shared.cuh"

namespace {

using namespace dsv4;

constexpr int kManyTeams = 2;
constexpr int kManyThreads = kManyTeams * kTeamThreads;

// ---- many queries a request ----

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kManyThreads) make_images(const __grid_constant__ ScoreParams<Layout> p) {
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
__global__ void __launch_bounds__(kManyThreads, kHopper ? 2 : 1) score_many(const __grid_constant__ ScoreParams<Layout> p) {
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
    const int upto = inclusive_sum(tiles, lane);
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
    constexpr bool kOwn = kHopper && KeyShare<Layout>::kOwnScale;
    key.template load<kOwn>(p.keys, p.row_of(page, entry & ((1 << rows_shift) - 1)), lane);
    if constexpr (kHopper) {
      operand_e4m3(key, SignedCodes{SignedCodes::kHalfSigns}, a[i], factor[i]);
    } else {
      operand_bf16(key, lane, a[i], factor[i]);
    }
  }

  const int count = last_token - first_token;
  const int first_position = static_cast<int>(p.meta.positions[first_token]) + 1;
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
    const int token = first_token + i;
    // As positions ascend by one: two loads, one behind the other, would stand between the products.
    const int visible = min((first_position + i) >> kCsaShift, p.max_entries);
    float* const out = p.out + token * p.out_stride;
    const unsigned image = base + (i % kStages) * kStage;
    const float* weights = reinterpret_cast<const float*>(aligned + (i % kStages) * kStage + kImage);
    if constexpr (kHopper) {
      const unsigned start = hopper::panel_start(image);
      float dots[kManyTiles][32];
      hopper::wgmma_registers(dots[0]);
      hopper::wgmma_registers(dots[1]);
      hopper::wgmma_fence();
#pragma unroll
      for (int t = 0; t < kManyTiles; ++t) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          hopper::wgmma_e4m3_64x64x32(dots[t], a[t][s], hopper::panel_at(start + 2 * s), s > 0);
        }
        hopper::wgmma_commit();
      }
      __syncwarp();  // else the compiler spreads the products over what follows
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
void launch_scores(const TensorView& anchor, const ScoreParams<Layout>& p, bool many, bool made) {
  LaunchShape shape;
  if (!many) {
    // Whole blocks a token where there are few: with equal lengths no block then meets two queries.
    const int blocks = multiprocessors(), tokens = p.meta.num_tokens;
    shape.grid = dim3(tokens > 0 && tokens <= blocks ? blocks / tokens * tokens : blocks);
    shape.block = dim3(kFewBlock<kHopper>);
    shape.dynamic_smem = kFewShared<Layout, kHopper>;
    shape.overlap = true;
    if constexpr (kHopper) {
      if (p.plan.members != nullptr) {
        launch(anchor, shape, score_planned<Layout>, p);
        return;
      }
    }
    launch(anchor, shape, score_few<Layout, kHopper>, p);
    return;
  }
  shape.block = dim3(kManyThreads);
  if (!made) {
    shape.grid = dim3(p.meta.num_tokens);
    launch(anchor, shape, make_images<Layout, kHopper>, p);
  }
  shape.grid = dim3((p.max_entries + kBlockKeys - 1) / kBlockKeys, p.meta.num_tokens / kQueryTile + p.meta.num_requests);
  shape.dynamic_smem = ManyShared<kHopper>::kBytes;
  launch(anchor, shape, score_many<Layout, kHopper>, p);
}

template <typename Layout>
void score(const TensorView& q, const TensorView& weights, const TensorView& keys, const TensorView& out,
           const TensorView& images, const TensorView& image_weights, const StepMeta& meta, const ScorePlan& plan, bool hopper) {
  ScoreParams<Layout> p = {};
  p.meta = meta;
  p.plan = plan;
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
  const bool many = images.size(0) > 0, made = q.dtype().bits == 8;
  if (hopper && DSV4_ARCH == 90) {
    launch_scores<Layout, DSV4_ARCH == 90>(out, p, many, made);
  } else {
    launch_scores<Layout, false>(out, p, many, made);
  }
}

// `images` and `image_weights` hold no rows where each request has few tokens, a plan none where there is no plan. A `q` of
// bytes is `images` itself, made by index_query.
void index_scores(TensorView q, TensorView weights, TensorView keys, TensorView out, TensorView images,
                  TensorView image_weights, TensorView cost_before, TensorView shared, TensorView members, bool fp4,
                  bool hopper, DSV4_META_PARAMS) {
  const DeviceGuard guard(out);
  const StepMeta meta = DSV4_META;
  const bool planned = members.size(0) > 0;
  const ScorePlan plan = {planned ? data_of<const int32_t>(cost_before) : nullptr,
                          planned ? data_of<const int32_t>(shared) : nullptr,
                          planned ? data_of<const int32_t>(members) : nullptr};
  if (fp4) {
    score<IndexFp4>(q, weights, keys, out, images, image_weights, meta, plan, hopper);
  } else {
    score<IndexFp8>(q, weights, keys, out, images, image_weights, meta, plan, hopper);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_scores, index_scores);
