// The entries with the highest scores, ascending by id; contract in sglang_dsv4/ops/index_topk.py.
//
// A block owns a row. One that a block's registers hold, or those of a cluster of blocks where blocks are few, is loaded
// once (dsv4/topk_held.cuh); a longer one in each pass (dsv4/topk_reloaded.cuh); more than two rows a multiprocessor, as in
// prefill, stand in shared memory (dsv4/topk_staged.cuh). Nothing depends on how scores are spread: what is searched is
// always bounded by ranks, and there is no histogram to collide in. NaN ranks below every number.
#include "dsv4/check.h"
#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/topk.cuh"
#include "dsv4/topk_held.cuh"
#include "dsv4/topk_reloaded.cuh"
#include "dsv4/topk_staged.cuh"

namespace {

using namespace dsv4;
using namespace dsv4::topk;

// A block or, with kClustered, a cluster of 1 << `cluster_shift` blocks a row. `early_steps` are loaded whatever the row's
// length is.
template <int kThreads, bool kClustered>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    held_kernel(const __grid_constant__ Params p, const int cluster_shift, const int early_steps) {
  extern __shared__ __align__(128) char memory[];
  // What is looked at last of the one, while the other is begun, does not overlap.
  static_assert(sizeof(HeldShared) % 16 == 0 && sizeof(ReloadedShared) <= offsetof(HeldShared, pages));
  HeldShared& shared = *reinterpret_cast<HeldShared*>(memory);
  float* const list = reinterpret_cast<float*>(memory + sizeof(HeldShared));
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int token = kClustered ? blockIdx.x >> cluster_shift : blockIdx.x;
  const int part = kClustered ? blockIdx.x & ((1 << cluster_shift) - 1) : 0;
  const bool few = kThreads == kFewThreads || thread < kFewThreads;
  grid_dependency_launch();
  if (few) {
#pragma unroll
    for (int i = 0; i < kRounds * kWays; i += kFewThreads) {
      (&shared.counts[0][0])[i + thread] = 0;
      if (kClustered) (&shared.totals[0][0])[i + thread] = 0;
    }
    if (thread < 4) shared.overflow[thread] = 0;
  }
  const float* const row = p.scores + token * p.stride;
  const int skip = static_cast<int>(reinterpret_cast<uintptr_t>(row) >> 2 & 3);
  const float4* units = reinterpret_cast<const float4*>(row - skip) + thread;
  asm volatile("" : "+l"(units));  // computed here, not behind the wait
  grid_dependency_wait();

  const int request = p.meta.request_of(token), visible = visible_of(p, token, request), base = first_of(p, token);
  // What lies behind the row, and in front of it in its first unit, is never looked at.
  float4 early[kEarlySteps];
#pragma unroll
  for (int step = 0; step < kEarlySteps; ++step) {
    const int at = 4 * (step * kFewThreads + thread);
    early[step] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    load_here_if(early[step], units + step * kFewThreads, step < early_steps && few && part == 0 && at < skip + p.width);
  }
  HeldPart held = {units, skip, skip + visible, 0};
  if (visible <= p.topk) {
    if (part == 0) select_all<kThreads>(p, token, request, visible);
    return;
  }
  if (held.stop <= kBlockHolds<kFewThreads, kEarlySteps>) {
    if (part > 0 || !few) return;
    HeldTeam<kFewThreads, false> team = {shared, list, lane, warp, 0, 1};
    if (held.stop <= kBlockHolds<kFewThreads, 1>) {
      select_held<kFewThreads, 1>(p, team, token, request, held, base, early_steps, early);
    } else if (held.stop <= kBlockHolds<kFewThreads, 2>) {
      select_held<kFewThreads, 2>(p, team, token, request, held, base, early_steps, early);
    } else {
      select_held<kFewThreads, kEarlySteps>(p, team, token, request, held, base, early_steps, early);
    }
    return;
  }
  HeldTeam<kThreads, kClustered> team = {shared, list, lane, warp, part, 1};
  int longest = held.stop;  // of the parts
  if (longest <= kBlockHolds<kThreads>) {
    if (part > 0) return;
  } else if (kClustered) {
    team.blocks = 1 << cluster_shift;
    // Whole units, so that all parts but the first one begin where a unit does.
    longest = ((held.stop + team.blocks - 1) / team.blocks + 3) & ~3;
    const int from = min(part * longest, held.stop);
    held = {units + from / 4, part == 0 ? skip : 0, min(longest, held.stop - from), part == 0 ? 0 : from - skip};
  }
  if (kClustered && longest <= kBlockHolds<kFewThreads, kEarlySteps>) {
    if (!few) return;
    HeldTeam<kFewThreads, kClustered> few_team = {shared, list, lane, warp, part, team.blocks};
    select_held<kFewThreads, kEarlySteps>(p, few_team, token, request, held, base, part == 0 ? early_steps : 0, early);
    return;
  }
  bool selected = false;
  if (kThreads > kFewThreads && longest <= kBlockHolds<kThreads, 4>) {
    selected = select_held<kThreads, 4>(p, team, token, request, held, base, 0, early);
  } else if (kThreads > kFewThreads && longest <= kBlockHolds<kThreads, 5>) {
    selected = select_held<kThreads, 5>(p, team, token, request, held, base, 0, early);
  } else if (longest <= kBlockHolds<kThreads>) {
    selected = select_held<kThreads, kMostSteps>(p, team, token, request, held, base, 0, early);
  }
  if (selected) return;
  ReloadedTeam<kThreads, kClustered> reloaded = {*reinterpret_cast<ReloadedShared*>(memory), lane, warp, part, team.blocks};
  select_reloaded<kThreads, kClustered>(p, reloaded, token, request, visible);
}

template <int kThreads, bool kClustered>
void launch_held(const TensorView& out, const Params& p, int cluster_shift = 0) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.meta.num_tokens) << cluster_shift);
  shape.block = dim3(kThreads);
  shape.dynamic_smem = kHeldBytes<kThreads>;
  shape.cluster = 1u << cluster_shift;
  shape.overlap = true;
  if (kThreads == kFewThreads) {  // two rows a multiprocessor, whatever share of the cache the driver would choose
    cuda_check(cudaFuncSetAttribute(held_kernel<kThreads, kClustered>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared),
               "cudaFuncSetAttribute");
  }
  // Loads that a row turns out not to need cost bandwidth, which many rows share; in a narrow buffer they are few.
  const bool all = p.width <= kBlockHolds<kFewThreads, kEarlySteps> || p.meta.num_tokens <= 64;
  launch(out, shape, held_kernel<kThreads, kClustered>, p, cluster_shift, all ? kEarlySteps : 1);
}

// More than two rows a multiprocessor, each in shared memory.
template <int kThreads, int kBlocks>
void launch_staged(const TensorView& out, const Params& p) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.meta.num_tokens));
  shape.block = dim3(kThreads);
  shape.dynamic_smem = staged_bytes<kThreads>(staged_positions(p));
  shape.overlap = true;
  // As many rows as the kernel's registers allow, whatever share of the cache the driver would choose.
  cuda_check(cudaFuncSetAttribute(staged_kernel<kThreads, kBlocks>, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute");
  launch(out, shape, staged_kernel<kThreads, kBlocks>, p, sampled_rank<kThreads>(p.topk));
}

// `first` holds no element where nothing is added to ids.
void index_topk(TensorView scores, TensorView out, TensorView first, bool physical, DSV4_META_PARAMS) {
  const DeviceGuard guard(out);
  Params p = {};
  p.meta = DSV4_META;
  p.scores = data_of<const float>(scores);
  p.out = data_of<int32_t>(out);
  p.first = first.size(0) > 0 ? data_of<const int32_t>(first) : nullptr;
  p.stride = scores.stride(0);
  p.out_stride = out.stride(0);
  p.width = static_cast<int>(scores.size(1));
  p.topk = static_cast<int>(out.size(1));
  p.physical = physical;
  p.aligned = p.stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0;
  const int tokens = p.meta.num_tokens, blocks = multiprocessors();
  // Rows that all run at once finish sooner with more threads each.
  const bool many = tokens > 2 * blocks && p.topk <= kList / 2;
  if (many && staged_positions(p) <= kStagedHolds<128>) {
    launch_staged<128, 6>(out, p);
  } else if (many && staged_positions(p) <= kStagedHolds<256>) {
    launch_staged<256, 3>(out, p);
  } else if (staged_positions(p) <= (tokens > blocks ? kBlockHolds<512> : kBlockHolds<512, kEarlySteps>)) {
    launch_held<512, false>(out, p);  // two rows a multiprocessor, if there are as many
  } else if (staged_positions(p) <= kBlockHolds<1024>) {
    launch_held<1024, false>(out, p);
  } else {
    // As many blocks a row as still run at once; of larger clusters fewer fit. A buffer is as wide as a captured graph's
    // longest context, while most rows may be short.
    int shift = 0;
    if (DSV4_ARCH == 90) {
      if (2 * tokens <= blocks) shift = 1;
      while (shift > 0 && 1 << shift < kMaxCluster && (2 << shift) * tokens <= blocks * 3 / 4) ++shift;
    }
    if (shift > 0) {
      launch_held<1024, true>(out, p, shift);
    } else {
      launch_held<1024, false>(out, p);
    }
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_topk, index_topk);
