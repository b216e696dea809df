// Top-k of rows that a block, or a cluster of blocks, holds in registers: few rows, as in a decode step, where a row is
// one chain of barriers and few of them matter more than few instructions.
//
//   1. Each thread holds 4, 8, 16, 20 or 32 scores. The first are under way before the row's length is known.
//   2. A search takes rounds of one barrier, each of which divides a range into kWays: a warp finds how many of its keys
//      reach each way's edge by six ballots, a lane two edges; the warps' counts add up in shared memory, no two lanes of
//      a warp at one place. So equal and bunched scores cost what others do, and a range of 32 bits takes at most six.
//   3. Beyond four scores a thread the threads' own highest scores are witnesses: a bound that k of them reach is reached by
//      at least k scores. The first range that is tried is where all warps' witnesses overlap, which outliers do not move.
//   4. Each warp puts its scores that reach the bound into shared memory, and rounds over these find the k-th; the first
//      range is that of few witnesses more. Keys outside a range are skipped, so later rounds are little but a barrier.
//   5. Threads compare their scores with the k-th; counts of steps and warps place what is selected. Page numbers have
//      arrived by then.
// A cluster adds up its blocks' counts in each round of 4.
#pragma once

#include <cstddef>
#include <type_traits>

#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/mma.cuh"
#include "dsv4/predicated.cuh"
#include "dsv4/topk.cuh"
#include "dsv4/warp.cuh"

namespace dsv4::topk {

constexpr int kWays = 64;
constexpr int kRounds = 16;    // of two searches; after a first range six rounds are the most
constexpr int kPages = 1280;   // page numbers that are fetched ahead
constexpr int kMaxCluster = 8;
constexpr int kFewThreads = 512;  // that hold a row of moderate length, whatever the block's are
constexpr int kEarlySteps = 4;    // steps of theirs that may be loaded before the row's length is known
constexpr int kMostSteps = 8;     // each of four scores a thread, that a block holds
constexpr int kListed = 8192;     // scores in the lists of all warps

template <int kThreads, int kSteps = kMostSteps>
constexpr int kBlockHolds = 4 * kThreads * kSteps;

struct HeldShared {
  int counts[kRounds][kWays];  // of keys that reach a way's edge; zero until their round
  int totals[kRounds][kWays];  // the same of a cluster
  unsigned lows[32], highs[32];
  unsigned long long above[32], equal[32];  // a byte a step
  unsigned part_lows[kMaxCluster], part_uppers[kMaxCluster], part_highs[kMaxCluster];
  int part_above[kMaxCluster], part_equal[kMaxCluster];
  int pages[kPages];
  int overflow[4];  // whether a list was too short
};

// Scores of a warp's list; up to 32 more fill it up.
template <int kThreads, int kSteps>
constexpr int kWarpList = 128 * kSteps < 32 * kListed / kThreads ? 128 * kSteps : 32 * kListed / kThreads;

template <int kThreads>
constexpr int kHeldBytes = static_cast<int>(sizeof(HeldShared)) + 4 * (kListed + kThreads);

// What is sought lies in low .. high; `above` keys are higher, `reach` are known to reach low, unless it is 0.
struct Sought {
  unsigned low, high;
  int above = 0, reach = 0;

  __device__ __forceinline__ bool open() const { return low < high; }
};

// Scores in shared memory that a thread has in a search, as many as every other one of its warp; NaN counts as none.
struct Listed {
  const float* first;
  int stride, count;
};

// A byte a step: how many of the warp's scores that are counted stand in that step, and how many of those before this
// lane's.
template <int kSteps>
struct StepCounts {
  using Word = std::conditional_t<(kSteps > 4), unsigned long long, unsigned>;
  Word totals = 0, lower = 0;

  StepCounts() = default;
  __device__ __forceinline__ StepCounts(Word own, int lane) {
    const Word upto = inclusive_sum(own, lane);
    totals = __shfl_sync(kFullMask, upto, 31);
    lower = upto - own;
  }
  // A bit a score.
  static __device__ __forceinline__ StepCounts of_marked(unsigned mask, int lane) {
    Word own = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) own |= static_cast<Word>(__popc(mask >> (4 * step) & 15u)) << (8 * step);
    return StepCounts(own, lane);
  }
  // Scores that reach a bound; two steps' counts add up as one number.
  static __device__ __forceinline__ StepCounts of_reaching(const float (&v)[4 * kSteps], float bound, int lane) {
    Word own = 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      float pair = 0.0f;
#pragma unroll
      for (int i = 4 * step; i < 4 * step + 8 && i < 4 * kSteps; ++i) {
        pair = fmaf(reaches(v[i], bound), i < 4 * step + 4 ? 1.0f : 256.0f, pair);
      }
      own |= static_cast<Word>(static_cast<unsigned>(pair)) << (8 * step);
    }
    return StepCounts(own, lane);
  }
  __device__ __forceinline__ int total(int step) const { return static_cast<int>(totals >> (8 * step) & 255u); }
  __device__ __forceinline__ int before(int step) const { return static_cast<int>(lower >> (8 * step) & 255u); }
};

// Where the marked scores of this warp begin in each step, in the order of steps, then warps; and how many all are.
template <int kWarps, int kSteps>
struct StepPlaces {
  int at[kSteps] = {};
  int total = 0;

  StepPlaces() = default;
  __device__ __forceinline__ StepPlaces(const unsigned long long (&counts)[32], int lane, int warp) {
    const unsigned long long word = lane < kWarps ? counts[lane] : 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      const unsigned both = static_cast<unsigned>(word >> (8 * step));
      const unsigned pair = (both & 255u) | (both & 0xff00u) << 8;
      const unsigned sum = __reduce_add_sync(kFullMask, pair);
      const unsigned before = __reduce_add_sync(kFullMask, lane < warp ? pair : 0u);
      at[step] = total + static_cast<int>(before & 0xffffu);
      total += static_cast<int>(sum & 0xffffu);
      if (step + 1 < kSteps) {
        at[step + 1] = total + static_cast<int>(before >> 16);
        total += static_cast<int>(sum >> 16);
      }
    }
  }
};

// The first kThreads threads of a block, and of each block of a cluster.
template <int kThreads, bool kClustered>
struct HeldTeam {
  static constexpr int kWarps = kThreads / 32;
  HeldShared& shared;
  float* list;  // what stands behind `shared`
  int lane, warp, part;
  int blocks;  // of the row
  int turn = 0;

  __device__ __forceinline__ int parts() const { return kClustered ? blocks : 1; }

  __device__ __forceinline__ void sync() const { named_barrier(1, kThreads); }

  template <typename T>
  __device__ __forceinline__ void store_at(unsigned block, T& cell, T value) const {
    hopper::cluster_store(hopper::cluster_address(shared_address(&cell), block), static_cast<int>(value));
  }

  // Of the threads' lowest and highest keys, where a warp without a score has low > high: both extremes, and the range
  // in which the warps overlap (between which they lie, if they do not).
  __device__ __forceinline__ Sought extremes(unsigned low, unsigned high, unsigned& base, unsigned& last) const {
    low = __reduce_min_sync(kFullMask, low);
    high = __reduce_max_sync(kFullMask, high);
    if (lane == 0) shared.lows[warp] = low, shared.highs[warp] = high;
    sync();
    const unsigned warp_low = shared.lows[lane % kWarps], warp_high = shared.highs[lane % kWarps];
    const bool none = warp_low > warp_high;
    const unsigned inner_low = __reduce_max_sync(kFullMask, none ? 0u : warp_low);
    const unsigned inner_high = __reduce_min_sync(kFullMask, none ? 0xffffffffu : warp_high);
    base = min(inner_low, inner_high);
    last = max(inner_low, inner_high);
    return {__reduce_min_sync(kFullMask, warp_low), __reduce_max_sync(kFullMask, warp_high)};
  }

  // A round: s.low .. s.high becomes the part of it that holds the wanted-th key. The ways are those of base .. last
  // within it; what is below or above belongs to the first or the last one. With kAll over all blocks of the row.
  // `upper` becomes a key that no more than `few` of them, and the next way's, reach, if there is one.
  template <bool kAll>
  __device__ __forceinline__ void narrow(const Listed& keys, unsigned base, unsigned last, int wanted, int few, Sought& s,
                                         unsigned& upper) {
    const int shift = max(26 - __clz(static_cast<int>(last - base)), 0);
    int reach_low = 0, reach_high = 0;  // of the lane's two edges
#pragma unroll 1
    for (int i = 0; i < keys.count; ++i) {
      const unsigned key = ordered(keys.first[i * keys.stride]);
      const bool active = key - s.low <= s.high - s.low;
      const unsigned actives = __ballot_sync(kFullMask, active);
      if (actives == 0) continue;
      const unsigned way = active ? min((max(key, base) - base) >> shift, kWays - 1u) : 0u;
      // Lanes whose way's low bits are at least this lane's number.
      unsigned reach = actives;
      const auto compare = [&](unsigned set, int bit) {
        const unsigned ones = static_cast<unsigned>(lane << (31 - bit) >> 31);  // where the lane's bit is one
        reach = (reach & set) | (~ones & (reach | set));
      };
      compare(ballot_bit<0>(way), 0);
      compare(ballot_bit<1>(way), 1);
      compare(ballot_bit<2>(way), 2);
      compare(ballot_bit<3>(way), 3);
      compare(ballot_bit<4>(way), 4);
      const unsigned set = ballot_bit<5>(way);
      reach_low += __popc(reach | set);
      reach_high += __popc(reach & set);
    }
    int(&counts)[kWays] = shared.counts[turn];
    add_unless_zero(shared_address(&counts[lane]), reach_low);
    add_unless_zero(shared_address(&counts[lane + 32]), reach_high);
    sync();
    const int* sums = counts;
    if constexpr (kAll && kClustered) {
      if (blocks > 1) {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread <= kWays) {
          const int own = thread < kWays ? counts[thread] : shared.overflow[0];
          const unsigned cell = shared_address(thread < kWays ? &shared.totals[turn][thread] : &shared.overflow[1]);
          for (int block = 0; block < blocks; ++block) {
            if (own > 0) hopper::cluster_add(hopper::cluster_address(cell, block), own);
          }
        }
        hopper::cluster_sync();
        sums = shared.totals[turn];
      }
    }
    ++turn;
    const int at_low = sums[lane] + s.above, at_high = sums[lane + 32] + s.above;
    // The last way whose edge so many reach; of earlier ones at least as many do.
    const auto highest = [&](int least) {
      return __popc(__ballot_sync(kFullMask, at_low >= least)) + __popc(__ballot_sync(kFullMask, at_high >= least)) - 1;
    };
    const auto end = [&](int way) {
      const unsigned first = base + (static_cast<unsigned>(way) << shift);
      return way < kWays - 1 ? first + min(s.high - first, (1u << shift) - 1) : s.high;
    };
    if (!kAll && s.above < few) upper = end(highest(few));
    const int way = highest(wanted);  // as so many reach s.low there is one
    const int beyond = way < kWays - 1 ? sums[way + 1] : 0;
    s.reach = sums[way] + s.above;
    s.above += beyond;
    s.high = end(way);
    if (way > 0) s.low = base + (static_cast<unsigned>(way) << shift);
  }
};

// A part of a row that stands at positions skip .. stop - 1 from a 16-byte aligned address on.
struct HeldPart {
  const float4* units;  // from this thread's first one on
  int skip, stop;
  int begin;  // id of the score at position skip
};

// Page numbers of a part, fetched while its scores are searched.
template <int kThreads>
struct HeldPages {
  int shift, first, count;  // count 0: none are fetched

  __device__ __forceinline__ HeldPages(const Params& p, HeldShared& shared, int request, int begin, int end) {
    shift = p.meta.page_shift - kCsaShift;
    first = begin >> shift;
    count = p.physical ? ((end - 1) >> shift) - first + 1 : 0;
    if (count > kPages) count = 0;
    const int* const row = p.meta.page_table + request * p.meta.page_table_stride + first;
    const int known = min(count, p.meta.max_pages - first);
#pragma unroll 1
    for (int i = threadIdx.x; i < known; i += kThreads) copy_async4(shared_address(&shared.pages[i]), row + i);
    copy_async_commit();
  }

  __device__ __forceinline__ int stored(const Params& p, const HeldShared& shared, int request, int base,
                                        int id) const {
    if (count == 0) return stored_as(p, request, base, id);
    const int column = id >> shift, page = column < p.meta.max_pages ? shared.pages[column - first] : -1;
    return page < 0 ? -1 : static_cast<int>((static_cast<unsigned>(page) << shift) + (id & ((1 << shift) - 1)));
  }
};

// Selects from a row of more than topk entries. The steps below `loaded` are in `early`. False, to all threads, where more
// scores than a list holds reached the bound: those that equal it, or it was a bad one.
template <int kThreads, int kSteps, bool kClustered>
__device__ __forceinline__ bool select_held(const Params& p, HeldTeam<kThreads, kClustered>& team, int token, int request,
                                            const HeldPart& part, int base_id, int loaded,
                                            const float4 (&early)[kEarlySteps]) {
  constexpr int kHeld = 4 * kSteps;
  constexpr bool kDirect = kSteps == 1;  // so few that all are searched at once
  HeldShared& shared = team.shared;
  const int thread = static_cast<int>(threadIdx.x), lane = team.lane, topk = p.topk;
  const float nan = __int_as_float(0x7fffffff);

  float v[kHeld];  // NaN where there is no score
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = 4 * (step * kThreads + thread);
    float4 x = make_float4(nan, nan, nan, nan);
    if (step < kEarlySteps) x = early[step < kEarlySteps ? step : 0];
    load_here_if(x, part.units + step * kThreads, step >= loaded && at < part.stop);
    v[4 * step] = x.x, v[4 * step + 1] = x.y, v[4 * step + 2] = x.z, v[4 * step + 3] = x.w;
  }
  const HeldPages<kThreads> pages(p, shared, request, part.begin, part.begin + part.stop - part.skip);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = 4 * (step * kThreads + thread);
    const bool whole = at >= part.skip && at + 4 <= part.stop;
#pragma unroll
    for (int i = 4 * step; i < 4 * step + 4; ++i) v[i] = number(v[i]);
    if (!whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i < part.skip || at + i >= part.stop) v[4 * step + i] = nan;
      }
    }
  }

  // What is listed, and a range of its k-th.
  Listed keys;
  Sought s;
  unsigned base, last;
  unsigned upper = 0;
  if constexpr (kDirect) {
    *reinterpret_cast<float4*>(&team.list[4 * thread]) = make_float4(v[0], v[1], v[2], v[3]);
    const float high = fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), -INFINITY);
    const float low = fminf(fminf(fminf(v[0], v[1]), fminf(v[2], v[3])), INFINITY);
    const bool none = 4 * thread >= part.stop;
    s = team.extremes(none ? 0xffffffffu : ordered(low), none ? 0u : ordered(high), base, last);
    keys = {team.list + thread, kThreads, (part.stop + kThreads - 1) / kThreads};
  } else {
    // Each block witnesses its share: the highest scores of groups of each thread's, the larger ones of which there are
    // still twice as many.
    const int share = kClustered ? (topk + team.parts() - 1) / team.parts() : topk;
    float highs[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      highs[step] = fmaxf(fmaxf(fmaxf(v[4 * step], v[4 * step + 1]), fmaxf(v[4 * step + 2], v[4 * step + 3])), -INFINITY);
    }
    int groups = kSteps;
#pragma unroll
    for (int had = kSteps; had > 1; had = (had + 1) / 2) {
      const int half = (had + 1) / 2;
      if (half * kThreads < 2 * share) continue;
      groups = half;
#pragma unroll
      for (int i = 0; i + half < had; ++i) highs[i] = fmaxf(highs[i], highs[i + half]);
    }
    float high = -INFINITY, low = INFINITY;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (i >= groups) continue;
      team.list[i * kThreads + thread] = highs[i];
      high = fmaxf(high, highs[i]), low = fminf(low, highs[i]);
    }
    Sought witness = team.extremes(ordered(low), ordered(high), base, last);
    const unsigned highest = witness.high;
    upper = highest;
    if (2 * groups * kThreads >= 3 * share) {
      // Across zero six powers of two at first, as most of the keys in between are those of tiny numbers.
      if (base < kZero && last > kZero) base = max(kZero, last - (6u << 23));
      const Listed witnesses = {team.list + thread, kThreads, groups};
#pragma unroll 1
      while (witness.open()) {
        team.template narrow<false>(witnesses, base, last, share, share * 5 / 8, witness, upper);
        if (witness.reach <= share + share / 4) break;
        base = witness.low, last = witness.high;
      }
    } else {
      witness.low = kLowest;
    }
    s = {witness.low, highest};
    if constexpr (kClustered) {
      if (team.blocks > 1) {
        if (thread < team.blocks) {
          team.store_at(thread, shared.part_lows[team.part], s.low);
          team.store_at(thread, shared.part_uppers[team.part], upper);
          team.store_at(thread, shared.part_highs[team.part], s.high);
        }
        hopper::cluster_sync();
        const int from = lane < team.blocks ? lane : 0;
        s.low = __reduce_min_sync(kFullMask, shared.part_lows[from]);
        upper = __reduce_max_sync(kFullMask, shared.part_uppers[from]);
        s.high = __reduce_max_sync(kFullMask, shared.part_highs[from]);
      }
    }
    base = s.low, last = max(upper, s.low);

    const float bound = from_ordered(s.low);
    float reach = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) reach += reaches(v[i], bound);
    const int own = static_cast<int>(reach), upto = inclusive_sum(own, lane), listed = __shfl_sync(kFullMask, upto, 31);
    constexpr int kRoom = kWarpList<kThreads, kSteps>;
    float* const of_warp = team.list + team.warp * (kRoom + 32);
    keys = {of_warp + lane, 32, (listed + 31) / 32};
    if (kRoom < 32 * kHeld && listed > kRoom) {
      shared.overflow[0] = 1;
      keys.count = 0;
    } else {
      unsigned place = shared_address(of_warp + upto - own);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) store_if_reaches(place, v[i], v[i], bound);
      of_warp[listed + lane] = nan;
      __syncwarp();
    }
  }

  team.turn = kRounds / 2;  // whatever the blocks of a cluster took for theirs
#pragma unroll 1
  while (s.open()) {
    team.template narrow<true>(keys, base, last, topk, 0, s, upper);
    if (kWarpList<kThreads, kSteps> < 32 * kHeld && shared.overflow[team.parts() > 1] != 0) return false;
    if (s.reach == topk) break;
    base = s.low, last = s.high;
  }

  // All that reach s.low; or those above it, and the first that equal it.
  const bool exact = s.reach == topk;
  const int wanted = exact ? 0 : topk - s.above;
  const float kth = from_ordered(s.low), bound = from_ordered(exact ? s.low : s.low + 1);
  const auto above_counts = StepCounts<kSteps>::of_reaching(v, bound, lane);
  StepCounts<kSteps> equal_counts;
  unsigned equal = 0;
  if (!exact) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) equal |= static_cast<unsigned>(v[i] == kth) << i;
    equal_counts = StepCounts<kSteps>::of_marked(equal, lane);
  }
  if (lane == 0) shared.above[team.warp] = above_counts.totals, shared.equal[team.warp] = equal_counts.totals;
  copy_async_wait<0>();
  team.sync();
  using Places = StepPlaces<kThreads / 32, kSteps>;
  const Places above_places(shared.above, lane, team.warp);
  Places equal_places;
  if (!exact) equal_places = Places(shared.equal, lane, team.warp);
  int parts_equal = 0, begin = 0, end = topk;  // of this block's places in the result
  if constexpr (kClustered) {
    if (team.blocks > 1) {
      if (thread < team.blocks) {
        team.store_at(thread, shared.part_above[team.part], above_places.total);
        team.store_at(thread, shared.part_equal[team.part], equal_places.total);
      }
      hopper::cluster_sync();
      const bool ahead = lane < team.part;
      const int parts_above = __reduce_add_sync(kFullMask, ahead ? shared.part_above[lane] : 0);
      parts_equal = __reduce_add_sync(kFullMask, ahead ? shared.part_equal[lane] : 0);
      begin = parts_above + min(parts_equal, wanted);
      end = parts_above + above_places.total + min(parts_equal + equal_places.total, wanted);
    }
  }
  // Nobody looks at the lists any more.
  int* const chosen = reinterpret_cast<int*>(team.list);
  const int first_id = part.begin - part.skip + 4 * thread;
  if (exact) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned to = shared_address(chosen + above_places.at[step] + above_counts.before(step));
#pragma unroll
      for (int i = 0; i < 4; ++i) store_if_reaches(to, first_id + 4 * step * kThreads + i, v[4 * step + i], bound);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int equals = parts_equal + equal_places.at[step] + equal_counts.before(step);
      // Counted from this block's first place on.
      int place = above_places.at[step] + above_counts.before(step) + min(equals, wanted) - min(parts_equal, wanted);
      int left = wanted - equals;
#pragma unroll
      for (int i = 4 * step; i < 4 * step + 4; ++i) {
        const bool tied = equal >> i & 1;
        if (v[i] >= bound || (tied && left > 0)) chosen[place++] = first_id + 4 * step * kThreads + i % 4;
        left -= tied;
      }
    }
  }
  team.sync();
  int32_t* const out = p.out + token * p.out_stride + begin;
#pragma unroll 1
  for (int i = thread; i < end - begin; i += kThreads) out[i] = pages.stored(p, shared, request, base_id, chosen[i]);
  return true;
}

}  // namespace dsv4::topk
