// Top-k of many rows of moderate length: few threads a row and many rows a multiprocessor, since a row alone is one chain
// of loads and barriers that only other rows can fill.
//
//   1. A block copies its row to shared memory. Each thread owns a run of up to 64 ids, so that what threads count
//      adds up in the order of ids. No score stays in a register.
//   2. An eighth of the scores, evenly spread, is a sample: halving the range of bits for its rank k / 8 and a margin
//      gives a bound that in all likelihood somewhat more than k scores reach.
//   3. One pass counts all that do. Too few: the bound was a bad one; too many for the list: equal scores, or a bad one.
//      Either way the range is halved further by counting all scores, so a row that deceives the sample costs passes over
//      shared memory, never a wrong answer. Where even equal scores are too many, those above and the first of the equal
//      ones are listed.
//   4. Positions of the survivors are listed in order. The range is halved until few are left in it, whose ranks are counted
//      at once; prefix sums place what is selected.
//
// It is the sample's ranks that bound the work, as witnesses do in index_topk.cu: nothing collides however scores bunch.
#pragma once

#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/mma.cuh"
#include "dsv4/topk.cuh"
#include "dsv4/warp.cuh"

namespace dsv4::topk {

constexpr int kRun = 64;            // ids of a thread, at most
constexpr int kSampled = kRun / 8;  // of them in the sample
constexpr int kFew = 32;            // keys among which ranks are counted at once
constexpr unsigned kInfinity = 0xff800000u;  // ordered(inf)

template <int kThreads>
constexpr int kStagedHolds = kThreads * kRun;

// Ids of a thread: as few as cover all, and whole eights, one of which the sample takes.
template <int kThreads>
__host__ __device__ constexpr int staged_run(int positions) {
  return (positions + 8 * kThreads - 1) / (8 * kThreads) * 8;
}

// Positions that a row of the widest kind takes; see StagedRun.
inline int staged_positions(const Params& p) { return p.width + (p.aligned ? 0 : 3); }

// Of a row's scores. Reads are of the longest run's whole quarters and samples, whatever the last thread's own length.
template <int kThreads>
constexpr int staged_bytes(int positions) {
  return 4 * (kThreads * staged_run<kThreads>(positions) + kRun);
}

// The rank in the sample whose score is tried as bound: three standard deviations and a half above k's share of it.
inline int sampled_rank(int topk) {
  const int share = (topk + 7) / 8;
  int root = 1;
  while (root * root < share) ++root;
  return share + 7 * root / 2;
}

// Where the score at `position` of a row stands in shared memory: 16-byte units change places within 128 bytes, as
// otherwise the runs of eight threads would begin in the same banks.
__device__ __forceinline__ unsigned staged_at(unsigned position) { return position ^ ((position >> 6 & 7) << 2); }

template <int kThreads>
struct StagedShared {
  static constexpr int kWarps = kThreads / 32;
  __align__(16) int sums[2][kWarps];
  unsigned lows[kWarps], highs[kWarps];
  __align__(16) unsigned few[kFew];  // keys that the search is left with, in any order
  int few_count;
  uint16_t list[kList];  // positions of survivors
};

// Sums and extremes of a block, one barrier each; buffers of sums alternate, so that none is needed before.
template <int kThreads>
struct StagedTeam {
  static constexpr int kWarps = kThreads / 32;
  StagedShared<kThreads>& shared;
  int lane, warp;
  int turn = 0;

  struct Sum {
    int total;
    int before;  // of the warps in front of this one
  };

  __device__ __forceinline__ Sum sum(int own) {
    const int of_warp = __reduce_add_sync(kFullMask, own);
    turn ^= 1;
    if (lane == 0) shared.sums[turn][warp] = of_warp;
    __syncthreads();
    Sum result = {0, 0};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int value = shared.sums[turn][i];
      result.total += value;
      result.before += i < warp ? value : 0;
    }
    return result;
  }

  // A barrier of another call must lie between two.
  __device__ __forceinline__ void extremes(unsigned& low, unsigned& high) {
    low = __reduce_min_sync(kFullMask, low);
    high = __reduce_max_sync(kFullMask, high);
    if (lane == 0) shared.lows[warp] = low, shared.highs[warp] = high;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      low = min(low, shared.lows[i]);
      high = max(high, shared.highs[i]);
    }
  }
};

// A thread's run of a row whose scores stand at positions skip .. stop - 1: copies keep 16-byte alignment, so a row that
// begins between two units leaves up to three positions out.
template <int kThreads>
struct StagedRun {
  const float* staged;
  int skip, stop;
  int length, first;          // of the run
  unsigned long long real;    // positions of the run that hold scores

  __device__ __forceinline__ StagedRun(float* staged, const float* row, int visible) : staged(staged) {
    skip = static_cast<int>(reinterpret_cast<uintptr_t>(row) >> 2 & 3);
    stop = skip + visible;
    length = staged_run<kThreads>(stop);
    first = static_cast<int>(threadIdx.x) * length;
    const float* const source = row - skip;
    const unsigned target = shared_address(staged);
    const int whole = stop & ~3;
    for (int at = (skip + 3 & ~3) + 4 * threadIdx.x; at < whole; at += 4 * kThreads) {
      copy_async16(target + 4 * staged_at(at), source + at);
    }
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 8) {  // the units at both ends that are not all the row's
      const int at = thread < 4 ? thread : whole + thread - 4;
      const bool cut = thread < 4 ? skip > 0 : true;
      if (cut && at >= skip && at < stop) copy_async4(target + 4 * staged_at(at), source + at);
    }
    copy_async_commit();
    const int begin = max(skip - first, 0), end = min(stop - first, length);
    real = end > begin ? (~0ull >> (64 - (end - begin))) << begin : 0ull;
  }

  // All scores stand there behind this and a barrier.
  __device__ __forceinline__ void wait() const { copy_async_wait<0>(); }

  // Bits of the run's scores that reach a bound.
  __device__ __forceinline__ unsigned long long reaching(unsigned key) const {
    if (key <= kLowest) return real;  // NaN as well
    const float bound = from_ordered(key);
    unsigned bits[2] = {};
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      if (quarter * 16 < length) {
#pragma unroll
        for (int i = 16 * quarter; i < 16 * quarter + 16; i += 4) {
          const float4 x = *reinterpret_cast<const float4*>(staged + staged_at(first + i));
          unsigned& word = bits[i / 32];
          if (x.x >= bound) word |= 1u << i % 32;
          if (x.y >= bound) word |= 2u << i % 32;
          if (x.z >= bound) word |= 4u << i % 32;
          if (x.w >= bound) word |= 8u << i % 32;
        }
      }
    }
    return (static_cast<unsigned long long>(bits[1]) << 32 | bits[0]) & real;
  }

  // The thread's part of the sample, ordered, 0 where there is none. Lanes look at different places of their eights: no two
  // of a bank, and scores that repeat with the period of an eight are seen in all their phases.
  __device__ __forceinline__ void sample(unsigned (&key)[kSampled], int lane) const {
#pragma unroll
    for (int i = 0; i < kSampled; ++i) {
      const int within = 8 * i + 4 * (i & 1) + (lane >> 3);
      const float score = staged[staged_at(first + within)];
      key[i] = real >> within & 1 ? ordered(number(score)) : 0;
    }
  }
};

// An eighth of a row's scores.
template <int kThreads>
struct Sample {
  StagedTeam<kThreads>& team;
  unsigned key[kSampled];
  unsigned low = 0xffffffffu, high = 0;

  __device__ __forceinline__ Sample(StagedTeam<kThreads>& team, const StagedRun<kThreads>& run) : team(team) {
    run.sample(key, team.lane);
#pragma unroll
    for (int i = 0; i < kSampled; ++i) {
      if (key[i] > 0) low = min(low, key[i]), high = max(high, key[i]);
    }
    team.extremes(low, high);
  }

  // About the key of this rank, not above it. `tied` says that it is a key of the sample, and several may be equal to it.
  __device__ __forceinline__ unsigned ranked(int rank, bool& tied) const {
    Range range = {low, high};
#pragma unroll 1
    for (int step = 0; range.open(); ++step) {
      // At first halfway between the numbers: halving bits spends some eight steps on exponents next to zero where scores
      // have both signs. No more than a few, as bits alone bound the steps.
      const float between = 0.5f * from_ordered(range.low) + 0.5f * from_ordered(range.high);
      const unsigned at = step < 3 ? min(max(ordered(between), range.low + 1), range.high) : range.middle();
      int own = 0;
#pragma unroll
      for (int i = 0; i < kSampled; ++i) own += key[i] >= at;
      const int count = team.sum(own).total;
      if (range.split(at, count, rank) && count <= rank + rank / 8) break;
    }
    tied = !range.open();
    return range.low;
  }
};

// Lists the positions of the scores that may be selected and returns how many, at least topk; the k-th of them lies in
// `range`. Rows of more than kList scores.
template <int kThreads>
__device__ __forceinline__ int list_survivors(StagedTeam<kThreads>& team, const StagedRun<kThreads>& run, int topk,
                                              int rank, Range& range) {
  unsigned long long mask;
  const auto count = [&](unsigned key, unsigned long long& reached) {
    reached = run.reaching(key);
    return team.sum(__popcll(reached));
  };
  const Sample<kThreads> sample(team, run);
  const int most = (run.stop - run.skip) / 9;  // fewer than are in the sample
  range = {kLowest, kInfinity};
  bool tied;
  auto listed = typename StagedTeam<kThreads>::Sum{};
#pragma unroll 1
  for (int tried = rank;; tried *= 2) {
    tied = false;
    range.low = tried <= most ? sample.ranked(tried, tied) : kLowest;
    listed = count(range.low, mask);
    if (listed.total >= topk) break;
    range.high = range.low - 1;
    range.above = listed.total;
  }
  if (listed.total > kList) {
    const auto narrow = [&](unsigned at) {
      unsigned long long reached;
      const auto counted = count(at, reached);
      if (range.split(at, counted.total, topk)) listed = counted, mask = reached;
    };
    // Where the sample's scores are equal there the row's k-th is likely to be one of them; else it is likely to be
    // below what half as many of the sample reach.
    if (tied && range.open()) narrow(range.low + 1);
    if (listed.total > kList && range.open()) {
      const unsigned at = sample.ranked((rank + 1) / 2, tied) + 1;
      if (at > range.low && at <= range.high) narrow(at);
    }
    while (listed.total > kList && range.open()) narrow(range.middle());
  }
  int n = listed.total;
  if (n > kList) {
    const unsigned long long above = run.reaching(range.low + 1);
    unsigned long long equal = mask & ~above;
    const int own = __popcll(equal);
    const int before = team.sum(own).before + inclusive_sum(own, team.lane) - own;
    for (int extra = own - max(topk - range.above - before, 0); extra > 0; --extra) {
      equal &= ~(1ull << (63 - __clzll(static_cast<long long>(equal))));
    }
    mask = above | equal;
    listed = team.sum(__popcll(mask));
    n = topk;
  }
  const int own = __popcll(mask);
  int place = listed.before + inclusive_sum(own, team.lane) - own;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    for (unsigned left = static_cast<unsigned>(mask >> 32 * half); left != 0; left &= left - 1) {
      team.shared.list[place++] = static_cast<uint16_t>(run.first + 32 * half + __ffs(left) - 1);
    }
  }
  __syncthreads();
  return n;
}

// Selects topk of n >= topk survivors, of which a thread has up to kPer in a row; `listed` false: the row is its own list.
// The k-th lies in `range`. The selected positions replace the row.
template <int kThreads, int kPer>
__device__ __forceinline__ void select_survivors(StagedTeam<kThreads>& team, const StagedRun<kThreads>& run,
                                                 uint16_t* chosen, int topk, int n, bool listed, Range range) {
  const int per = (n + kThreads - 1) / kThreads, first = static_cast<int>(threadIdx.x) * per;
  unsigned key[kPer];
  int position[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    key[i] = 0;  // below every number's
    position[i] = 0;
    if (i < per && first + i < n) {
      position[i] = listed ? team.shared.list[first + i] : run.skip + first + i;
      key[i] = ordered(number(run.staged[staged_at(position[i])]));
    }
  }

  int reach = n;  // that reach range.low
  if (n > topk) {
    unsigned low = 0xffffffffu, high = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (key[i] > 0) low = min(low, key[i]), high = max(high, key[i]);
    }
    team.extremes(low, high);
    range.low = max(range.low, low);
    range.high = min(range.high, high);
  }
  while (reach > topk && range.open() && reach - range.above > kFew) {
    const unsigned middle = range.middle();
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) own += key[i] >= middle;
    const int count = team.sum(own).total;
    if (range.halve(count, topk)) reach = count;
  }
  if (reach > topk && range.open()) {
    const int left = reach - range.above;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (key[i] >= range.low && key[i] <= range.high) team.shared.few[atomicAdd(&team.shared.few_count, 1)] = key[i];
    }
    __syncthreads();
    // Each warp does the same: a lane counts the keys above its own. Of those with fewer than are sought the lowest one
    // is the k-th, in whatever order they stand.
    const unsigned own = team.lane < left ? team.shared.few[team.lane] : 0;
    int above = 0;
#pragma unroll
    for (int i = 0; i < kFew; ++i) above += team.shared.few[i] > own && i < left;
    const bool among = team.lane < left && above < topk - range.above;
    range.low = __reduce_min_sync(kFullMask, among ? own : 0xffffffffu);
    range.above += static_cast<int>(__reduce_max_sync(kFullMask, among ? above : 0));
  }
  const unsigned kth = range.low;
  const int wanted = reach == topk ? topk : topk - range.above;  // of those that equal it, at most

  int own = 0;  // above it, and from bit 16 on equal to it
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += key[i] > kth ? 1 : key[i] == kth ? 1 << 16 : 0;
  const int upto = inclusive_sum(own, team.lane);
  const int before = team.sum(own).before + upto - own;
  int higher = before & 0xffff, equal = before >> 16;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int place = higher + min(equal, wanted);
    const bool above = key[i] > kth, same = key[i] == kth;
    if (above || (same && equal < wanted)) chosen[place] = static_cast<uint16_t>(position[i]);
    higher += above;
    equal += same;
  }
  __syncthreads();
}

template <int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) staged_kernel(const __grid_constant__ Params p, const int rank) {
  extern __shared__ __align__(128) float staged[];
  __shared__ StagedShared<kThreads> shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const int token = blockIdx.x, thread = static_cast<int>(threadIdx.x);
  const int request = p.meta.request_of(token), visible = visible_of(p, token, request);
  if (visible <= p.topk) {
    select_all<kThreads>(p, token, request, visible);
    return;
  }
  const StagedRun<kThreads> run(staged, p.scores + token * p.stride, visible);
  StagedTeam<kThreads> team = {shared, thread & 31, thread >> 5};
  const int base = first_of(p, token);
  if (thread == 0) shared.few_count = 0;
  run.wait();
  __syncthreads();

  Range range = {kLowest, kInfinity};
  const bool listed = visible > kList;
  const int n = listed ? list_survivors<kThreads>(team, run, p.topk, rank, range) : visible;
  constexpr int kMost = kList / kThreads;
  uint16_t* const chosen = reinterpret_cast<uint16_t*>(staged);
  if (n <= kList / 2) {
    select_survivors<kThreads, kMost / 2>(team, run, chosen, p.topk, n, listed, range);
  } else {
    select_survivors<kThreads, kMost>(team, run, chosen, p.topk, n, listed, range);
  }
  int32_t* const out = p.out + token * p.out_stride;
  for (int i = thread; i < p.topk; i += kThreads) out[i] = stored_as(p, request, base, chosen[i] - run.skip);
}

}  // namespace dsv4::topk
