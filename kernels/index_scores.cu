// Scores of all visible indexer keys for each query; contract in sglang_dsv4/ops/index_scores.py.
//
// Work is dealt to teams of four warps in tiles of 64 keys. A key is loaded once, straight into operand registers; the
// query's heads stand in shared memory as the other operand, its image, so one product step gives 16 keys x 64 heads a
// warp. index_query or `make_images` wrote the images once, except for score_few on other targets than Hopper.
//
// `score_few`  few queries a request (decode): the tiles of all queries, one after another, are cut into equal ranges,
//              one a block, so that mixed lengths balance and a block meets one or two queries. Nothing is known on the
//              host but the number of tokens. In dsv4/scores_few.cuh.
// `score_planned`  the same where a plan says which requests share pages (Hopper). In dsv4/scores_shared.cuh.
// `score_many` many queries a request (prefill): a block holds 256 keys in registers and streams the images of its
//              queries past them. In dsv4/scores_many.cuh.
#include "dsv4/check.h"
#include "dsv4/scores_few.cuh"
#include "dsv4/scores_many.cuh"
#include "dsv4/scores_shared.cuh"

namespace {

using namespace dsv4;

template <typename Layout, bool kHopper>
__global__ void __launch_bounds__(kManyThreads) make_images(const __grid_constant__ ScoreParams<Layout> p) {
  const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (p.meta.request_of(token) < 0) return;
  ImageShare<Layout, kManyThreads / 32> share;
  share.load(p, token, warp, lane);
  share.template write<kHopper>(p.images + static_cast<int64_t>(token) * kImageBytes<kHopper>,
                                p.image_weights + static_cast<int64_t>(token) * kMaxHeads, warp, lane);
}

// ---- host ----

template <typename Layout, bool kHopper>
void launch_scores(const TensorView& anchor, const ScoreParams<Layout>& p, bool many, bool made) {
  LaunchShape shape;
  if ((many || kHopper) && !made) {
    shape.block = dim3(kManyThreads);
    shape.grid = dim3(p.meta.num_tokens);
    launch(anchor, shape, make_images<Layout, kHopper>, p);
  }
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
  shape.grid = dim3((p.max_entries + kBlockKeys - 1) / kBlockKeys, p.meta.num_tokens / kQueryTile + p.meta.num_requests);
  if constexpr (kHopper) {
    shape.dynamic_smem = ImageRing::kBytes;
    launch(anchor, shape, score_many_hopper<Layout>, p);
  } else {
    shape.dynamic_smem = ManyShared::kBytes;
    launch(anchor, shape, score_many<Layout>, p);
  }
}

template <typename Layout>
void score(const TensorView& q, const TensorView& weights, const TensorView& keys, const TensorView& out,
           const TensorView& images, const TensorView& image_weights, const StepMeta& meta, const ScorePlan& plan, bool many,
           bool hopper) {
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
  const bool made = q.dtype().bits == 8;
  if (hopper && DSV4_ARCH == 90) {
    launch_scores<Layout, DSV4_ARCH == 90>(out, p, many, made);
  } else {
    launch_scores<Layout, false>(out, p, many, made);
  }
}

// `images` and `image_weights` hold no rows where no kernel takes them, a plan none where there is no plan. A `q` of bytes
// is `images` itself, made by index_query.
void index_scores(TensorView q, TensorView weights, TensorView keys, TensorView out, TensorView images,
                  TensorView image_weights, TensorView cost_before, TensorView shared, TensorView members, bool fp4,
                  bool many, bool hopper, DSV4_META_PARAMS) {
  const DeviceGuard guard(out);
  const StepMeta meta = DSV4_META;
  const bool planned = members.size(0) > 0;
  const ScorePlan plan = {planned ? data_of<const int32_t>(cost_before) : nullptr,
                          planned ? data_of<const int32_t>(shared) : nullptr,
                          planned ? data_of<const int32_t>(members) : nullptr};
  if (fp4) {
    score<IndexFp4>(q, weights, keys, out, images, image_weights, meta, plan, many, hopper);
  } else {
    score<IndexFp8>(q, weights, keys, out, images, image_weights, meta, plan, many, hopper);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_scores, index_scores);
