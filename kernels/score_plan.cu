// Which requests of a decode step share leading pages; contract in sglang_dsv4/ops/score_plan.py.
//
// `compare_prefixes`, a block a request, finds its class (the requests with the same page in the column in which the least
// shared part ends), its place there and how many leading pages it has in common with the class's first request.
// `form_groups`, one block, cuts classes into groups and adds up their costs. Neither depends on an order of arrival.
#include "dsv4/check.h"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"
#include "dsv4/score_plan.cuh"
#include "dsv4/warp.cuh"

namespace {

using namespace dsv4;

constexpr int kCsaShift = 2;
constexpr int kCompareThreads = 512;
constexpr int kWords = kPlanRequests / 32;

struct Params {
  StepMeta meta;
  int32_t* scratch;  // [requests, 3]: group's first request, place in the group, pages in common with the class's first
  int32_t* cost_before;
  int32_t* shared;
  int32_t* members;
  int least_tiles;  // of a step with groups

  __device__ __forceinline__ int rows_shift() const { return meta.page_shift - kCsaShift; }
  __device__ __forceinline__ int visible(int request) const {
    return meta.request_of(request) < 0 ? 0 : static_cast<int>((meta.positions[request] + 1) >> kCsaShift);
  }
  // Pages whose entries are all visible.
  __device__ __forceinline__ int full_pages(int request) const {
    return min(visible(request) >> rows_shift(), meta.max_pages);
  }
  __device__ __forceinline__ int least_pages() const { return kLeastShared * kScoreTile >> rows_shift(); }
  __device__ __forceinline__ const int32_t* pages_of(int request) const {
    return meta.page_table + request * meta.page_table_stride;
  }
};

// Index of the set bit number `rank` of all words, a word a lane, in every lane.
__device__ __forceinline__ int bit_of_rank(unsigned word, int before, int rank, int lane) {
  int local = rank - before;
  const bool holds = local >= 0 && local < __popc(word);
  for (; holds && local > 0; --local) word &= word - 1;
  const int source = __ffs(__ballot_sync(kFullMask, holds)) - 1;
  return __shfl_sync(kFullMask, 32 * lane + __ffs(word) - 1, source);
}

__global__ void __launch_bounds__(kCompareThreads) compare_prefixes(const __grid_constant__ Params p) {
  __shared__ unsigned same[kWords];
  __shared__ int class_first, group_first, place, differs;
  grid_dependency_launch();
  grid_dependency_wait();
  const int request = blockIdx.x, lane = threadIdx.x & 31;
  const int full = p.full_pages(request), least = p.least_pages();
  if (full < least) {  // the whole block
    if (threadIdx.x == 0) {
      p.scratch[3 * request] = request;
      p.scratch[3 * request + 1] = p.scratch[3 * request + 2] = 0;
    }
    return;
  }
  const int page = p.pages_of(request)[least - 1];
  for (int other = threadIdx.x; other < kPlanRequests; other += kCompareThreads) {
    const bool match =
        other < p.meta.num_requests && p.full_pages(other) >= least && p.pages_of(other)[least - 1] == page;
    const unsigned word = __ballot_sync(kFullMask, match);
    if (lane == 0) same[other >> 5] = word;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const unsigned word = same[lane];
    const int upto = inclusive_sum(__popc(word), lane);
    const int before = upto - __popc(word);
    const int below = before + __popc(word & ((1u << (request & 31)) - 1));
    const int rank = __shfl_sync(kFullMask, below, request >> 5);
    const int first = bit_of_rank(word, before, 0, lane);
    const int head = bit_of_rank(word, before, rank / kGroupMembers * kGroupMembers, lane);
    if (lane == 0) {
      class_first = first;
      group_first = head;
      place = rank % kGroupMembers;
    }
  }
  __syncthreads();
  const int limit = min(full, p.full_pages(class_first));
  if (threadIdx.x == 0) differs = limit;
  __syncthreads();
  if (class_first != request) {
    const int32_t *mine = p.pages_of(request), *others = p.pages_of(class_first);
    int found = limit;
#pragma unroll 8
    for (int column = threadIdx.x; column < limit; column += kCompareThreads) {
      if (mine[column] != others[column]) found = min(found, column);
    }
    found = __reduce_min_sync(kFullMask, found);
    if (lane == 0 && found < limit) atomicMin(&differs, found);  // the least in any order
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    p.scratch[3 * request] = group_first;
    p.scratch[3 * request + 1] = place;
    p.scratch[3 * request + 2] = differs;
  }
}

__global__ void __launch_bounds__(kPlanRequests) form_groups(const __grid_constant__ Params p) {
  constexpr int kWarps = kPlanRequests / 32;
  __shared__ int16_t members[kPlanRequests][kGroupMembers];
  __shared__ int common[kPlanRequests], tiles[kPlanRequests], shared[kPlanRequests];
  __shared__ int warp_sums[kWarps];
  grid_dependency_launch();
  grid_dependency_wait();
  const int request = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool real = request < p.meta.num_requests;
  const int head = real ? p.scratch[3 * request] : request, place = real ? p.scratch[3 * request + 1] : 0;
  common[request] = real ? p.scratch[3 * request + 2] : 0;
  tiles[request] = real ? tiles_of(p.visible(request)) : 0;
#pragma unroll
  for (int i = 0; i < kGroupMembers; ++i) members[request][i] = -1;
  const int of_warp = __reduce_add_sync(kFullMask, tiles[request]);
  if (lane == 0) warp_sums[warp] = of_warp;
  __syncthreads();
  members[head][place] = static_cast<int16_t>(request);
  int of_all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) of_all += warp_sums[i];
  __syncthreads();

  int count = 0, part = 0;
  if (head == request) {
    int pages = common[request];
    for (; count < kGroupMembers && members[request][count] >= 0; ++count) {
      pages = min(pages, common[members[request][count]]);
    }
    part = (pages << p.rows_shift()) / kScoreTile;
    if (count < 2 || part < kLeastShared || of_all < p.least_tiles) part = 0;
  }
  shared[request] = part;
  __syncthreads();
  const bool together = shared[head] > 0;
  int cost = 0;
  if (!together) {
    cost = tiles[request] * tile_cost(1);
  } else if (head == request) {
    cost = part * tile_cost(count);
    for (int i = 0; i < count; ++i) cost += (tiles[members[request][i]] - part) * tile_cost(1);
  }

  int upto = inclusive_sum(cost, lane);
  if (lane == 31) warp_sums[warp] = upto;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) upto += i < warp ? warp_sums[i] : 0;
  if (!real) return;
  if (request == 0) p.cost_before[0] = 0;
  p.cost_before[request + 1] = upto;
  p.shared[request] = part;
  for (int i = 0; i < kGroupMembers; ++i) {
    const int member = together ? (head == request ? members[request][i] : -1) : (i == 0 ? request : -1);
    p.members[kGroupMembers * request + i] = member;
  }
}

void score_plan(TensorView cost_before, TensorView shared, TensorView members, TensorView scratch, int64_t least_tiles,
                DSV4_META_PARAMS) {
  const DeviceGuard guard(shared);
  Params p = {};
  p.meta = DSV4_META;
  p.scratch = data_of<int32_t>(scratch);
  p.cost_before = data_of<int32_t>(cost_before);
  p.shared = data_of<int32_t>(shared);
  p.members = data_of<int32_t>(members);
  p.least_tiles = static_cast<int>(least_tiles);
  LaunchShape shape;
  shape.overlap = true;
  shape.grid = dim3(p.meta.num_requests);
  shape.block = dim3(kCompareThreads);
  launch(shared, shape, compare_prefixes, p);
  shape.grid = dim3(1);
  shape.block = dim3(kPlanRequests);
  launch(shared, shape, form_groups, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(score_plan, score_plan);
