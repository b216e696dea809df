// Top-k of many rows of moderate length: few threads a row and many rows a multiprocessor, since a row alone is one
// chain of loads and barriers that only other rows can fill.
//
//   1. A block copies its row to shared memory. Each thread owns a run of up to 64 ids, so that what threads count adds
//      up in the order of ids. No score stays in a register.
//   2. About a thousand of the scores, evenly spread, are a sample: halving a range for its k-th's share and a margin
//      gives a bound that in all likelihood somewhat more than k scores reach.
//   3. One pass counts all that do. Too few: the bound was a bad one; too many for the list: equal scores, or a bad one.
//      Either way the range is halved further by counting all scores, so a row that deceives the sample costs passes
//      over shared memory, never a wrong answer. Where even equal scores are too many, those above and the first of the
//      equal ones are listed.
//   4. Where survivors stand is listed in order. The range is halved until few are left in it, whose ranks are counted
//      at once; prefix sums place what is selected.
//
// Searches are one warp's: it counts without a barrier, and all warps together would spend more than twice its
// instructions, most of them on their sums. Which warp differs from block to block, as warps of the same number share a
// scheduler. It is ranks that bound the work, as with the witnesses in index_topk.cu: nothing collides however scores
// bunch.
#pragma once

#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/mma.cuh"
#include "dsv4/topk.cuh"
#include "dsv4/warp.cuh"

namespace dsv4::topk {

constexpr int kRun = 64;      // ids of a thread, at most
constexpr int kSampled = 32;  // scores of the sample that a lane looks at
constexpr int kFew = 32;      // keys among which ranks are counted at once
constexpr unsigned kInfinity = 0xff800000u;  // ordered(inf)

template <int kThreads>
constexpr int kStagedHolds = kThreads * kRun;

// Of so many ids the sample takes one.
template <int kThreads>
constexpr int kSampleEvery = kStagedHolds<kThreads> / (32 * kSampled);

// Ids of a thread: as few as cover all, and whole eights.
template <int kThreads>
__host__ __device__ constexpr int staged_run(int positions) {
  return (positions + 8 * kThreads - 1) / (8 * kThreads) * 8;
}

// Positions that a row of the widest kind takes; see StagedRun.
inline int staged_positions(const Params& p) { return p.width + (p.aligned ? 0 : 3); }

// Of a row's scores. Reads are of whole quarters of the longest run, whatever the last thread's own length.
template <int kThreads>
constexpr int staged_bytes(int positions) {
  return 4 * (kThreads * staged_run<kThreads>(positions) + kRun);
}

// The rank in the sample whose score is tried as bound: three standard deviations above k's share of it.
template <int kThreads>
int sampled_rank(int topk) {
  const int share = (topk + kSampleEvery<kThreads> - 1) / kSampleEvery<kThreads>;
  int root = 1;
  while (root * root < share) ++root;
  return share + 3 * root;
}

// Where the score at `position` of a row stands in shared memory, and the other way round: 16-byte units change places
// within 128 bytes, as otherwise the runs of eight threads would begin in the same banks.
__device__ __forceinline__ unsigned staged_at(unsigned position) { return position ^ ((position >> 6 & 7) << 2); }

template <int kThreads>
struct StagedShared {
  static constexpr int kWarps = kThreads / 32;
  __align__(16) int sums[2][kWarps];
  __align__(16) unsigned few[kFew];  // keys that a search is left with, in any order
  // What the searching warp found.
  unsigned found;
  int found_count;
  uint16_t list[kList];  // where survivors stand, in the order of ids
};

// Sums over a block, one barrier each; their buffers alternate, so that none is needed before.
template <int kThreads>
struct StagedTeam {
  static constexpr int kWarps = kThreads / 32;
  StagedShared<kThreads>& shared;
  int lane, warp;
  bool searches;  // this warp does
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
};

// Keys of a warp, 0 where there is none, and what it counts of them.
template <int kPer>
struct WarpKeys {
  unsigned key[kPer];

  __device__ __forceinline__ int reaching(unsigned at) const {
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) own += key[i] >= at;
    return __reduce_add_sync(kFullMask, own);
  }
};

// A thread's run of a row whose scores stand at positions skip .. stop - 1: copies keep 16-byte alignment, so a row
// that begins between two units leaves up to three positions out.
template <int kThreads>
struct StagedRun {
  const float* staged;
  int skip, stop;
  int length, first;        // of the run
  unsigned long long real;  // positions of the run that hold scores

  __device__ __forceinline__ StagedRun(float* staged, const float* row, int visible) : staged(staged) {
    skip = static_cast<int>(reinterpret_cast<uintptr_t>(row) >> 2 & 3);
    stop = skip + visible;
    length = staged_run<kThreads>(stop);
    first = static_cast<int>(threadIdx.x) * length;
    const float* const source = row - skip;
    const unsigned target = shared_address(staged);
    const int whole = stop & ~3;
    int at = ((skip + 3) & ~3) + 4 * static_cast<int>(threadIdx.x);
    unsigned to = target + 4 * staged_at(at);  // of units so far apart all change places alike
#pragma unroll 4
    for (; at < whole; at += 4 * kThreads, to += 16 * kThreads) copy_async16(to, source + at);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 8) {  // the units at both ends that are not all the row's
      const int cut = thread < 4 ? thread : whole + thread - 4;
      if ((thread >= 4 || skip > 0) && cut >= skip && cut < stop) {
        copy_async4(target + 4 * staged_at(cut), source + cut);
      }
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
};

// A key that about `rank` keys of the sample reach. `tied` says that it is one of them, and that fewer reach the next.
// Of a row of more than kList scores; any warp's.
template <int kThreads>
__device__ __forceinline__ unsigned sampled_key(const StagedRun<kThreads>& run, int lane, int rank, bool& tied) {
  constexpr int kApart = 32 * kSampleEvery<kThreads>, kSure = kList / kApart;
  // Lanes look at different places of their share: no two of a bank, and scores that repeat are seen in all phases.
  const int first = kSampleEvery<kThreads> * lane + (lane >> 2);
  // 512 positions apart units change places alike.
  const unsigned even = staged_at(first), odd = staged_at(first + kApart) - kApart;
  WarpKeys<kSampled> keys;
  unsigned low = 0xffffffffu, high = 0;
#pragma unroll
  for (int i = 0; i < kSampled; ++i) {
    float score = -INFINITY;
    if (kApart * i + first < run.stop) score = run.staged[(i % 2 ? odd : even) + kApart * i];
    if (i == 0 && first < run.skip) score = -INFINITY;
    keys.key[i] = ordered(number(score));
    // Those that every such row has are enough for a bound from below.
    if (i < kSure) low = min(low, keys.key[i]);
    high = max(high, keys.key[i]);
  }
  Range range = {__reduce_min_sync(kFullMask, low), __reduce_max_sync(kFullMask, high)};
#pragma unroll 1
  for (int step = 0; range.open(); ++step) {
    unsigned at = range.middle();
    // Across zero halfway between the numbers at first, as halving bits would spend some five steps more on the
    // exponents next to zero. No more than three times, since bits alone bound the steps.
    if (step < 3 && range.low <= kZero && range.high > kZero) {
      const float between = 0.5f * from_ordered(range.low) + 0.5f * from_ordered(range.high);
      at = min(max(ordered(between), range.low + 1), range.high);
    }
    const int count = keys.reaching(at);
    if (range.split(at, count, rank) && count <= rank + rank / 8) break;
  }
  tied = !range.open();
  return range.low;
}

// Lists the scores that may be selected and returns how many, at least topk; the k-th of them lies in `range`.
template <int kThreads>
__device__ __forceinline__ int list_survivors(StagedTeam<kThreads>& team, const StagedRun<kThreads>& run, int topk,
                                              int rank, Range& range) {
  unsigned long long mask;
  const auto count = [&](unsigned key, unsigned long long& reached) {
    reached = run.reaching(key);
    return team.sum(__popcll(reached));
  };
  bool tied;
  const auto sampled = [&](int tried) {
    if (team.searches) {
      const unsigned key = sampled_key<kThreads>(run, team.lane, tried, tied);
      if (team.lane == 0) team.shared.found = key, team.shared.found_count = tied;
    }
    __syncthreads();
    tied = team.shared.found_count != 0;
    return team.shared.found;
  };
  const int most = (run.stop - run.skip) / (kSampleEvery<kThreads> + 1);  // fewer than are in the sample
  range = {kLowest, kInfinity};
  auto listed = typename StagedTeam<kThreads>::Sum{};
#pragma unroll 1
  for (int tried = run.stop - run.skip > kList ? rank : most + 1;; tried *= 2) {
    tied = false;
    range.low = tried <= most ? sampled(tried) : kLowest;
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
      const unsigned at = sampled((rank + 1) / 2) + 1;
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
      team.shared.list[place++] = static_cast<uint16_t>(staged_at(run.first + 32 * half + __ffs(left) - 1));
    }
  }
  __syncthreads();
  return n;
}

// The k-th of n > topk survivors, of which a lane has up to kPer; `range.low` becomes it, or a bound that topk reach.
// Returns how many of those that equal it are wanted, at most. Any warp's.
template <int kThreads, int kPer>
__device__ __forceinline__ int kth_survivor(const float* staged, StagedShared<kThreads>& shared, int lane, int n,
                                            int topk, Range& range) {
  WarpKeys<kPer> keys;
  unsigned low = 0xffffffffu, high = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool real = 32 * i + lane < n;
    unsigned at = 0;
    if (real) at = shared.list[32 * i + lane];
    const unsigned key = ordered(number(staged[at]));
    keys.key[i] = real ? key : 0;
    low = min(low, real ? key : 0xffffffffu);
    high = max(high, keys.key[i]);
  }
  range.low = max(range.low, __reduce_min_sync(kFullMask, low));
  range.high = min(range.high, __reduce_max_sync(kFullMask, high));
  int reach = n;  // that reach range.low
  while (range.open() && reach - range.above > kFew) {
    const int count = keys.reaching(range.middle());
    if (range.halve(count, topk)) reach = count;
    if (reach == topk) return topk;
  }
  if (range.open()) {
    const int left = reach - range.above;
    const unsigned width = range.high - range.low;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) own += keys.key[i] - range.low <= width;
    int place = inclusive_sum(own, lane) - own;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (keys.key[i] - range.low <= width) shared.few[place++] = keys.key[i];
    }
    __syncwarp();
    // A lane counts the keys above its own. Of those with fewer than are sought the lowest one is the k-th.
    const unsigned mine = lane < left ? shared.few[lane] : 0;
    int above = 0;
#pragma unroll
    for (int i = 0; i < kFew; ++i) above += shared.few[i] > mine && i < left;
    const bool among = lane < left && above < topk - range.above;
    range.low = __reduce_min_sync(kFullMask, among ? mine : 0xffffffffu);
    range.above += static_cast<int>(__reduce_max_sync(kFullMask, among ? above : 0));
  }
  return topk - range.above;
}

// Writes the positions of topk survivors, in order: those above `kth` and the first `wanted` that equal it. A thread
// has up to kPer in a row.
template <int kThreads, int kPer>
__device__ __forceinline__ void place_survivors(StagedTeam<kThreads>& team, const float* staged, int n, unsigned kth,
                                                int wanted, uint16_t* chosen) {
  const int per = (n + kThreads - 1) / kThreads, first = static_cast<int>(threadIdx.x) * per;
  const int mine = min(max(n - first, 0), per);
  const float bound = from_ordered(kth);
  unsigned place_of[kPer];
  unsigned above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    place_of[i] = 0;
    if (i < mine) place_of[i] = team.shared.list[first + i];
    const float score = staged[place_of[i]];
    if (score > bound) above |= 1u << i;
    if (score == bound) equal |= 1u << i;
  }
  const unsigned real = (1u << mine) - 1;
  above &= real;
  equal = kth <= kLowest ? real : equal & real;  // NaN is as low as -inf
  equal &= ~above;
  const int own = __popc(above) | __popc(equal) << 16;
  const int before = team.sum(own).before + inclusive_sum(own, team.lane) - own;
  const int higher = before & 0xffff, equals = before >> 16;
  for (int extra = __popc(equal) - max(wanted - equals, 0); extra > 0; --extra) equal ^= 1u << (31 - __clz(equal));
  const unsigned selected = above | equal;
  int place = higher + min(equals, wanted);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (selected >> i & 1) chosen[place++] = static_cast<uint16_t>(staged_at(place_of[i]));
  }
  __syncthreads();
}

// Selects topk of n survivors, at least as many and at most kMost; the k-th lies in `range`. The selected positions
// replace the row.
template <int kThreads, int kMost>
__device__ __forceinline__ void select_survivors(StagedTeam<kThreads>& team, float* staged, int n, int topk,
                                                 Range range) {
  StagedShared<kThreads>& shared = team.shared;
  int wanted = topk;
  if (n > topk) {
    if (team.searches) {
      wanted = kth_survivor<kThreads, kMost / 32>(staged, shared, team.lane, n, topk, range);
      if (team.lane == 0) shared.found = range.low, shared.found_count = wanted;
    }
    __syncthreads();
    range.low = shared.found, wanted = shared.found_count;
  }
  uint16_t* const chosen = reinterpret_cast<uint16_t*>(staged);
  place_survivors<kThreads, kMost / kThreads>(team, staged, n, range.low, wanted, chosen);
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
  const unsigned searching = (static_cast<unsigned>(token) * 0x9e3779b1u) >> 30;
  StagedTeam<kThreads> team = {shared, thread & 31, thread >> 5, thread >> 5 == static_cast<int>(searching)};
  const int base = first_of(p, token);
  run.wait();
  __syncthreads();

  Range range;
  const int n = list_survivors<kThreads>(team, run, p.topk, rank, range);
  if (n <= kList / 2) {
    select_survivors<kThreads, kList / 2>(team, staged, n, p.topk, range);
  } else if (n <= kList * 3 / 4) {  // for k 1024 as a rule; beyond, keys do not fit in registers
    select_survivors<kThreads, kList * 3 / 4>(team, staged, n, p.topk, range);
  } else {
    select_survivors<kThreads, kList>(team, staged, n, p.topk, range);
  }
  const uint16_t* const chosen = reinterpret_cast<const uint16_t*>(staged);
  int32_t* const out = p.out + token * p.out_stride;
  for (int i = thread; i < p.topk; i += kThreads) out[i] = stored_as(p, request, base, chosen[i] - run.skip);
}

}  // namespace dsv4::topk
