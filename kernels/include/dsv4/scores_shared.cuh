// Scores of a decode step whose requests share leading pages, by the plan of score_plan.cu. Hopper alone.
//
// A block that meets shared tiles of a group copies the images of its members, brings each tile of keys into operand
// registers once and multiplies it with one image after another. Tiles of a member's own are the group's last, scored
// from the same images; a block that meets those of one member alone, or a request alone, scores them as score_few does.
// Operands, products and sums are score_few's, in the same order: a score has the same bits however its request was
// grouped.
#pragma once

#include "dsv4/scores_few.cuh"

namespace dsv4 {

// Images take the place of stages: a tile lasts longer here.
template <typename Layout>
using GroupRing = BulkRing<Layout, kFewTeams, KeyShare<Layout>::kPieces == 1 ? 4 : 3>;
template <typename Layout>
constexpr int kGroupShared = kGroupMembers * kImageBytes<true> + GroupRing<Layout>::kBytes + 1024;
__device__ __forceinline__ unsigned group_stages(const FewBlock<true>& block) {
  return block.image_address + kGroupMembers * kImageBytes<true>;
}
static_assert(kGroupShared<IndexFp4> <= kFewShared<IndexFp4, true>, "a group needs no more than a request alone");
static_assert(kGroupShared<IndexFp8> <= kFewShared<IndexFp8, true>, "a group needs no more than a request alone");
static_assert(kScoreTile == kKeyTile && kPlanRequests == kFewTokens);

// A member's query: where its scores go, how many, and ReluSum's scale. Read in one piece.
struct __align__(16) GroupQuery {
  float* row;
  int visible;
  float scale;
};

// The group that a block works on, in shared memory.
struct __align__(16) Group {
  float weights[kGroupMembers][kMaxHeads];
  uint4 sums[kGroupMembers][ReluSum::kLanes + 1][2];  // of a member's first lanes, and zero, which all others have
  GroupQuery query[kGroupMembers];
  int request[kGroupMembers];
  int left_before[kGroupMembers];  // own tiles of the members before
  int left, count, shared;
  int items[kRangeTiles<true> + kFewTeams];  // a tile, the first and the last member; kNoItem behind the last
  static constexpr int kNoItem = -1;

  // Warp 0 looks up who they are.
  template <typename Params>
  __device__ __forceinline__ void start(const Params& p, int first, int shared_tiles, const int* visible_of, int lane) {
    int member = lane < kGroupMembers ? p.plan.members[first * kGroupMembers + lane] : -1;
    const bool real = member >= 0 && member < p.meta.num_requests;
    member = real ? member : first;
    const int visible = visible_of[member], own = real ? max(tiles_of(visible) - shared_tiles, 0) : 0;
    const int upto = inclusive_sum<kGroupMembers>(own, lane);
    const unsigned all = __ballot_sync(kFullMask, real);
    if (lane < kGroupMembers) {
      request[lane] = member;
      left_before[lane] = upto - own;
      query[lane].row = p.out + member * p.out_stride;
      query[lane].visible = visible;
    }
    if (lane < 2 * kGroupMembers) sums[lane >> 1][ReluSum::kLanes][lane & 1] = make_uint4(0, 0, 0, 0);
    if (lane == kGroupMembers - 1) {
      left = upto;
      count = __popc(all);
      shared = shared_tiles;
    }
  }

  // Items are the shared tiles, then the own ones: whose the `own`-th of these is.
  __device__ __forceinline__ int owner(int own) const {
    int member = 0;
    while (member + 1 < count && left_before[member + 1] <= own) ++member;
    return member;
  }

  // The first item that starts at or behind this cost.
  __device__ __forceinline__ int item_at(int cost) const {
    const int each = tile_cost(count), together = shared * each, alone = tile_cost(1);
    const int item = cost <= together ? (cost + each - 1) / each : shared + (cost - together + alone - 1) / alone;
    return min(item, shared + left);
  }
  __device__ __forceinline__ int cost_of(int item) const {
    return min(item, shared) * tile_cost(count) + max(item - shared, 0) * tile_cost(1);
  }

  // An entry of `items`: a tile and the members that it is multiplied with.
  __device__ __forceinline__ static int item_of(int tile, int first, int last) { return tile << 6 | first << 3 | last; }
  __device__ __forceinline__ static int tile_of(int item) { return item >> 6; }
  __device__ __forceinline__ static int first_of(int item) { return (item >> 3) & 7; }
  __device__ __forceinline__ static int last_of(int item) { return item & 7; }
  static_assert(kGroupMembers <= 8 && kScoreTile >= 64, "an item is a positive number: of tiles there are less than 2^25");
};

// Multiplies a team's tiles with the members' images. A product is summed up before the next one starts, as the tensor
// cores take both in turn; what keeps them busy meanwhile are the other teams' products.
template <typename Layout>
struct GroupPass {
  static constexpr bool kHalf = kHalfSums<Layout, true>;

  const FewBlock<true>& block;
  const Group& group;
  typename GroupRing<Layout>::Reader reader;
  unsigned next_item;  // of the team, where it stands
  unsigned images;
  // Where the lane finds a member's query and its operands for ReluSum: kept, or they are computed for every product.
  unsigned query_at, sums_at;
  float dots[32];

  __device__ __forceinline__ GroupPass(const FewBlock<true>& block_of, const Group& group_of, unsigned stages)
      : block(block_of), group(group_of),
        reader(stages, block_of.keys.barriers, block_of.team, block_of.warp, block_of.lane) {
    next_item = shared_address(&group.items[block.team]);
    images = hopper::panel_start(block.image_address);
    query_at = shared_address(&group.query[0]);
    sums_at = keep(shared_address(&group.sums[0][min(block.lane, ReluSum::kLanes)][0]));
  }

  // The entry of the team's next tile. Known to be the same in all lanes it lets the products' descriptors take no vector
  // registers.
  __device__ __forceinline__ int look_item() const { return uniform(static_cast<int>(load_shared4(next_item))); }

  // The keys of the team's next tile have become operands of a product.
  __device__ __forceinline__ void next_key() {
    reader.release(block.lane == 0);
    reader.template advance<1>();
  }
  __device__ __forceinline__ void convert(const KeyShare<Layout>& key, unsigned (&a)[4][4], float (&factor)[2]) const {
    operand_e4m3(key, SignedCodes{SignedCodes::kHalfSigns}, a, factor);
    hopper::wgmma_operands(a);
  }

  __device__ __forceinline__ void issue(const unsigned (&a)[4][4], int member) {
    hopper::wgmma_registers(dots);
    const unsigned start = images + member * (kImageBytes<true> / 16);
    hopper::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 4; ++s) hopper::wgmma_e4m3_64x64x32(dots, a[s], hopper::panel_at(start + 2 * s), s > 0);
    hopper::wgmma_commit();
  }

  // Sums up and stores the scores of the product under way, of a member and a tile.
  __device__ __forceinline__ void finish(int member, int tile, const float (&factor)[2]) {
    hopper::wgmma_wait<0>();
    hopper::wgmma_registers(dots);
    const int lane = block.lane, first = tile * kKeyTile + 16 * block.warp;
    const uint4 query = load_shared16(query_at + member * sizeof(GroupQuery));
    float* const row = reinterpret_cast<float*>(static_cast<uint64_t>(query.y) << 32 | query.x);
    const int visible = static_cast<int>(query.z);
    if constexpr (kHalf) {
      unsigned packed[4][4];
      ReluSum relu;
      ReluSum::Parts parts;
      ReluSum::pack(dots, packed);
      relu.load(sums_at + member * sizeof(group.sums[0]), __uint_as_float(query.w));
      relu.start(packed, parts);
      const int entry = first + (lane >> 2);
      const bool leads = (lane & 3) == 0;
      store_if(row + entry, relu.sum(parts, 0) * factor[0], leads && entry < visible);
      store_if(row + entry + 8, relu.sum(parts, 1) * factor[1], leads && entry + 8 < visible);
    } else {
      float weight[16], sum[2];
      load_weights(group.weights[member], lane, weight);
      weigh(dots, weight, sum);
      const int which = lane & 3, entry = first + (lane >> 2) + 8 * which;
      store_if(row + entry, which ? sum[1] * factor[1] : sum[0] * factor[0], which < 2 && entry < visible);
    }
    __syncwarp();  // else the compiler moves the next product ahead of the sums, which then wait for it
  }

  __device__ __forceinline__ void run() {
    int item = look_item();
    if (item == Group::kNoItem) return;
    unsigned a[4][4];
    float factor[2];
    KeyShare<Layout> key;
    reader.read(key);
    convert(key, a, factor);
    int tile = Group::tile_of(item), member = Group::first_of(item);
    issue(a, member);
    next_key();
#pragma unroll 1
    for (;;) {
      const int last = Group::last_of(item);
#pragma unroll 1
      for (; member < last; ++member) {
        finish(member, tile, factor);
        issue(a, member + 1);
      }
      next_item += kFewTeams * sizeof(int);
      item = look_item();
      if (item == Group::kNoItem) break;
      // Operands are not written while a product is under way: the compiler would let each wait for the one before.
      float next_factor[2];
      if constexpr (kHalf) reader.read(key);
      finish(member, tile, factor);
      if constexpr (!kHalf) reader.read(key);
      convert(key, a, next_factor);
      tile = Group::tile_of(item);
      member = Group::first_of(item);
      issue(a, member);
      next_key();
      factor[0] = next_factor[0];
      factor[1] = next_factor[1];
    }
    finish(member, tile, factor);
  }
};

// What tiles the items from `first` on are and where their halves start in the pool; all threads of the teams.
template <typename Layout>
__device__ __forceinline__ void look_up_items(const ScoreParams<Layout>& p, const FewBlock<true>& block, Group& group,
                                              int first, int items) {
  const int shared = group.shared;
  if (threadIdx.x < kFewTeams) group.items[items + threadIdx.x] = Group::kNoItem;
  for (int i = threadIdx.x; i < items; i += kFewThreads) {
    const int own = first + i - shared, member = own < 0 ? 0 : group.owner(own);
    const int tile = own < 0 ? first + i : shared + own - group.left_before[member];
    group.items[i] = own < 0 ? Group::item_of(tile, 0, group.count - 1) : Group::item_of(tile, member, member);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      block.keys.halves[2 * i + half] = half_of(p, group.request[member], tile * kKeyTile + kHalfTile * half,
                                                group.query[member].visible);
    }
  }
}

// Items `first` to `last` of the group, at most kRangeTiles; all threads of the teams.
template <typename Layout>
__device__ __forceinline__ void score_group(const ScoreParams<Layout>& p, const FewBlock<true>& block, Group& group,
                                            int first, int last) {
  const int lane = block.lane, block_warp = block.block_warp;
  const int shared = group.shared, items = last - first;
  // The members whose images it takes, a warp each.
  const int low = first < shared ? 0 : group.owner(first - shared);
  const int high = first < shared ? group.count - 1 : group.owner(last - 1 - shared);
  const bool brings = block_warp >= low && block_warp <= high;
  const int number = block.number();
  FewBlock<true>::teams_meet();  // the last rows and the last images have been read
  if (brings && hopper::elect_one()) {
    const unsigned barrier = shared_address(&block.keys.images);
    // Bytes that come before they are expected are counted as well: the phase lasts until this arrival.
    if (block_warp == low) hopper::mbarrier_expect(barrier, (high - low + 1) * kImageCopy);
    copy_image(p, group.request[block_warp], block.image_address + block_warp * kImageBytes<true>,
               shared_address(group.weights[block_warp]), barrier);
  }
  look_up_items(p, block, group, first, items);
  block.hand_over({items, true}, number);
  block.wait_images(number);
  if constexpr (kHalfSums<Layout, true>) {
    if (brings) {
      ReluSum relu;
      relu.set(group.weights[block_warp], lane);
      relu.store(group.sums[block_warp], lane);
      if (lane == 0) group.query[block_warp].scale = relu.scale;
    }
    FewBlock<true>::teams_meet();
  }
  GroupPass<Layout>(block, group, group_stages(block)).run();
}

// What a block does next: `items` of a group, or (where alone) tiles of one request; and where it goes on.
struct Pass {
  int token, first, last, next_cost;
  bool alone;
};

// The pass that starts at cost `at` and ends at `end` or before; all threads of the teams.
template <typename Layout>
__device__ __forceinline__ Pass next_pass(const ScoreParams<Layout>& p, Group& group, const int* cost_before,
                                          const int* shared_of, const int* visible_of, int at, int end) {
  int head = 0, high = p.meta.num_requests;  // the last request with cost_before <= at
  while (high - head > 1) {
    const int middle = (head + high) >> 1;
    (cost_before[middle] <= at ? head : high) = middle;
  }
  const int before = cost_before[head], after = min(end, cost_before[head + 1]), shared = shared_of[head];
  if (shared == 0) {
    const int first = (at - before + tile_cost(1) - 1) / tile_cost(1);
    const int last = min((after - before + tile_cost(1) - 1) / tile_cost(1), tiles_of(visible_of[head]));
    if (last - first <= kRangeTiles<true>) return {head, first, last, after, true};
    const int cut = first + kRangeTiles<true>;
    return {head, first, cut, before + cut * tile_cost(1), true};
  }
  if (threadIdx.x < 32) group.start(p, head, shared, visible_of, threadIdx.x);
  FewBlock<true>::teams_meet();
  const int first = group.item_at(at - before), until = group.item_at(after - before);
  const int last = min(until, first + kRangeTiles<true>);
  const int next_cost = last < until ? before + group.cost_of(last) : after;
  if (first >= last || first < shared) return {head, first, last, next_cost, false};
  const int owner = group.owner(first - shared);
  if (owner != group.owner(last - 1 - shared)) return {head, first, last, next_cost, false};
  const int skipped = group.left_before[owner];
  return {group.request[owner], first - skipped, last - skipped, next_cost, true};
}

// A block's share of the plan, and what it knows of each request.
struct PlanShare {
  int cost_before[kPlanRequests + 1], shared_of[kPlanRequests], visible_of[kPlanRequests];
  int next_cost, end_cost;  // here, as registers are short

  // All threads of the teams.
  template <typename Layout>
  __device__ __forceinline__ void start(const ScoreParams<Layout>& p) {
    const int requests = p.meta.num_requests;
    for (int request = threadIdx.x; request < requests; request += kFewThreads) {
      const int64_t position = p.meta.positions[request];
      const int upto = p.plan.cost_before[request + 1];
      cost_before[request + 1] = upto;
      shared_of[request] = p.plan.shared[request];
      visible_of[request] = p.meta.request_of(request) < 0 ? 0 : static_cast<int>(
          min((position + 1) >> kCsaShift, static_cast<int64_t>(p.max_entries)));
      if (request == 0) cost_before[0] = 0;
      if (request == requests - 1) {
        next_cost = static_cast<int>(static_cast<int64_t>(upto) * blockIdx.x / gridDim.x);
        end_cost = static_cast<int>(static_cast<int64_t>(upto) * (blockIdx.x + 1) / gridDim.x);
      }
    }
    FewBlock<true>::teams_meet();
  }
};

// The keys that a block will copy first, brought to L2 by the warps that will copy them, while the kernels before may still
// run. What it reads of the step's numbers may be of an earlier step, so nothing else depends on it, every number is cut to
// what the tables hold, and lines of it stay out of L1, where they would be found after the kernels before have written.
constexpr int kTilesAhead = 8;     // of a block: a warp asks for its own one after another
constexpr int kTokensAhead = 128;  // none is looked for in a larger step

template <typename Layout>
__device__ __forceinline__ void prefetch_first(const ScoreParams<Layout>& p, const FewBlock<true>& block) {
  const int requests = p.meta.num_requests, lane = block.lane;
  if (requests == 0 || requests > kTokensAhead) return;
  const int64_t total = load_ahead(p.plan.cost_before + requests);
  const int at = static_cast<int>(total * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  // As in next_pass: the last request with cost_before <= at.
  int upto = 0;
  for (int request = lane + 1; request < requests; request += 32) upto += load_ahead(p.plan.cost_before + request) <= at;
  const int head = __reduce_add_sync(kFullMask, upto);
  const int before = load_ahead(p.plan.cost_before + head), after = min(end, load_ahead(p.plan.cost_before + head + 1));
  const int shared = load_ahead(p.plan.shared + head);
  const bool member = lane < kGroupMembers && load_ahead(p.plan.members + head * kGroupMembers + lane) >= 0;
  const int each = tile_cost(shared > 0 ? __popc(__ballot_sync(kFullMask, member)) : 1);
  const int visible = p.visible_ahead(head), own = tiles_of(visible);
  const int first = (at - before + each - 1) / each;
  const int last = min((after - before + each - 1) / each, shared > 0 ? min(shared, own) : own);
  const int tile = first + kFewTeams * lane + block.warp;
  if (first < 0 || tile >= min(last, first + kTilesAhead)) return;
  FewRing<Layout, true>::prefetch(half_of<true>(p, head, tile * kKeyTile, visible),
                                  half_of<true>(p, head, tile * kKeyTile + kHalfTile, visible));
}

// The teams' part: one pass after another.
template <typename Layout>
__device__ __forceinline__ void score_passes(const ScoreParams<Layout>& p, const FewBlock<true>& block, Group& group,
                                             PlanShare& share) {
#pragma unroll 1
  while (share.next_cost < share.end_cost) {
    const Pass pass = next_pass(p, group, share.cost_before, share.shared_of, share.visible_of, share.next_cost,
                                share.end_cost);
    FewBlock<true>::teams_meet();  // all have read where this pass begins
    if (threadIdx.x == 0) share.next_cost = pass.next_cost;
    if (pass.first < pass.last) {
      if (pass.alone) {
        const TileRange range = {p.out + pass.token * p.out_stride, share.visible_of[pass.token], pass.first,
                                 pass.last - pass.first};
        score_tiles(p, block, pass.token, pass.token, range);
      } else {
        score_group(p, block, group, pass.first, pass.last);
      }
    }
    FewBlock<true>::teams_meet();
  }
  block.hand_over_end();
}

template <typename Layout>
__device__ __forceinline__ void fill_passes(const FewBlock<true>& block) {
  for (int number = 0;; ++number) {
    const FewBlock<true>::Range range = block.take_over(number);
    const int tiles = uniform(range.tiles);
    if (tiles == 0) return;
    if (uniform(range.grouped)) {
      GroupRing<Layout>::fill(group_stages(block), block.keys.barriers, block.keys.halves, tiles, uniform(block.warp));
    } else {
      fill_range<Layout>(block, tiles);
    }
  }
}

template <typename Layout>
__global__ void __launch_bounds__(kFewBlock<true>, 1) score_planned(const __grid_constant__ ScoreParams<Layout> p) {
  extern __shared__ uint8_t raw_shared[];
  __shared__ PlanShare share;
  __shared__ KeySource<true> keys;
  __shared__ Group group;

  grid_dependency_launch();
  if (FewBlock<true>::fills()) {
    hopper::lower_registers<kFillRegisters>();
    const FewBlock<true> block(raw_shared, group.weights[0], keys);
    prefetch_first(p, block);
    grid_dependency_wait();
    fill_passes<Layout>(block);
    return;
  }
  keys.start();
  hopper::raise_registers<kScoreRegisters>();
  grid_dependency_wait();
  share.start(p);
  score_passes(p, FewBlock<true>(raw_shared, group.weights[0], keys), group, share);
}

}  // namespace dsv4
