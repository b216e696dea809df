// Top-k of rows that are longer than a block, or a cluster of blocks, holds: each pass loads the row again.
//
//   1. The threads' own highest scores are witnesses: a bound that at least k of them reach is reached by at least k
//      scores. Halving the range of the bound's bits, a barrier that counts a step, comes close to the k-th of them.
//   2. The scores that reach the bound, the survivors, are listed in the order of ids. Where they are too many for the
//      list the range is halved further by counting all scores; where even equal scores are too many, those above and the
//      first of the equal ones are listed.
//   3. The k-th survivor is found by halving, a survivor or two a thread; prefix sums place what is selected.
#pragma once

#include "dsv4/hopper.cuh"
#include "dsv4/topk.cuh"
#include "dsv4/topk_held.cuh"
#include "dsv4/warp.cuh"

namespace dsv4::topk {

constexpr int kStep = 128;     // ids that a warp loads at once, four a lane
constexpr int kLoadSteps = 8;  // that it holds between loads

struct ReloadedShared {
  int list[kList];  // ids of survivors
  int values[2][32];
  unsigned lows[32], highs[32];
  int part_values[2][kMaxCluster];
  unsigned part_lows[kMaxCluster], part_highs[kMaxCluster];
};

// Sums and extremes over the threads that share a row, with kClustered those of several blocks. Every call has one
// barrier of the block; the buffers that calls write alternate, so that none is needed before. No other call stands
// between two of sum().
template <int kThreads, bool kClustered>
struct ReloadedTeam {
  static constexpr int kWarps = kThreads / 32;
  ReloadedShared& shared;
  int lane, warp, part;
  int blocks;  // of the row
  int turn = 0;

  __device__ __forceinline__ int parts() const { return kClustered ? blocks : 1; }

  struct Sum {
    int total;   // of all
    int before;  // of the warps in front of this one, and of the parts in front of this block's
  };

  __device__ __forceinline__ Sum block_sum(int own) {
    const int of_warp = __reduce_add_sync(kFullMask, own);
    turn ^= 1;
    if (lane == 0) shared.values[turn][warp] = of_warp;
    __syncthreads();
    const int value = lane < kWarps ? shared.values[turn][lane] : 0;
    return {__reduce_add_sync(kFullMask, value), __reduce_add_sync(kFullMask, lane < warp ? value : 0)};
  }

  // Over all blocks of the row.
  __device__ __forceinline__ Sum sum(int own) {
    Sum result = block_sum(own);
    if (parts() == 1) return result;
    if (static_cast<int>(threadIdx.x) < blocks) {
      const unsigned cell = shared_address(&shared.part_values[turn][part]);
      hopper::cluster_store(hopper::cluster_address(cell, threadIdx.x), result.total);
    }
    hopper::cluster_sync();
    const int of_part = lane < blocks ? shared.part_values[turn][lane] : 0;
    result.total = __reduce_add_sync(kFullMask, of_part);
    result.before += __reduce_add_sync(kFullMask, lane < part ? of_part : 0);
    return result;
  }

  // The lowest `low` and the highest `high` of the block's threads. Once a row.
  __device__ __forceinline__ void extremes(unsigned& low, unsigned& high) {
    low = __reduce_min_sync(kFullMask, low);
    high = __reduce_max_sync(kFullMask, high);
    if (lane == 0) shared.lows[warp] = low, shared.highs[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(kFullMask, lane < kWarps ? shared.lows[lane] : 0xffffffffu);
    high = __reduce_max_sync(kFullMask, lane < kWarps ? shared.highs[lane] : 0u);
  }

  // The same over the row's blocks, whose threads agree. Once a row.
  __device__ __forceinline__ void part_extremes(unsigned& low, unsigned& high) {
    if (parts() == 1) return;
    if (static_cast<int>(threadIdx.x) < blocks) {
      const auto store = [&](unsigned& cell, unsigned value) {
        hopper::cluster_store(hopper::cluster_address(shared_address(&cell), threadIdx.x), static_cast<int>(value));
      };
      store(shared.part_lows[part], low);
      store(shared.part_highs[part], high);
    }
    hopper::cluster_sync();
    low = __reduce_min_sync(kFullMask, lane < blocks ? shared.part_lows[lane] : 0xffffffffu);
    high = __reduce_max_sync(kFullMask, lane < blocks ? shared.part_highs[lane] : 0u);
  }
};

// Selects topk of n >= topk listed scores, of which a thread has `per` in a row, the first at threadIdx.x * per; `key` is
// ordered(score). The k-th lies in `range`.
template <int kPer, typename Team>
__device__ __forceinline__ void select_listed(const Params& p, Team& team, int token, int request, int n, int per,
                                              unsigned (&key)[kPer], const int (&id)[kPer], Range range) {
  const int lane = team.lane, topk = p.topk, first = static_cast<int>(threadIdx.x) * per, base = first_of(p, token);
  int stored[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const bool real = i < per && first + i < n;
    if (!real) key[i] = 0;  // below every number's
    stored[i] = 0;
    if (real) stored[i] = stored_as(p, request, base, id[i]);  // under way while the search goes on
  }

  int reach = n;  // that reach range.low
  while (reach > topk && range.open()) {
    const unsigned middle = range.middle();
    int count;
    if (per == 1) {
      count = __syncthreads_count(key[0] >= middle);
    } else {
      int own = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) own += key[i] >= middle;
      count = team.block_sum(own).total;
    }
    if (range.halve(count, topk)) reach = count;
  }
  const unsigned kth = range.low;
  const int wanted = reach == topk ? topk : topk - range.above;  // of those that equal it, at most

  int own = 0;  // above it, and from bit 16 on equal to it
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += key[i] > kth ? 1 : key[i] == kth ? 1 << 16 : 0;
  const int upto = inclusive_sum(own, lane);
  const int before = team.block_sum(own).before + upto - own;
  int higher = before & 0xffff, equal = before >> 16;
  int32_t* const out = p.out + token * p.out_stride;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int place = higher + min(equal, wanted);
    if (key[i] > kth) {
      out[place] = stored[i];
      ++higher;
    } else if (key[i] == kth) {
      if (equal < wanted) out[place] = stored[i];
      ++equal;
    }
  }
}

// A part of a row: the scores of ids begin .. stop - 1, of which each warp has a run of `steps` steps.
template <int kSteps>
struct RowPart {
  static constexpr int kHeld = 4 * kSteps;  // scores that a thread holds
  const float* row;
  int begin, stop, steps;
  int lane;
  bool aligned;

  // Loads the lane's scores of kSteps steps of its warp's run from `first` on, -inf where there is none; bit i of the
  // result says that score i is one of the row's.
  __device__ __forceinline__ unsigned load(int first, float (&v)[kHeld]) const {
    unsigned real = 0;
    const float* const source = row + id(first, 0);
    // Scores from the lane's first one to the end of the part, and of the warp's run.
    const int left = min(stop - id(first, 0), (steps - first) * kStep - 4 * lane);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {  // nothing but loads, so that all are under way at once
      const int count = min(left - step * kStep, 4);
      float4 x = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if (count == 4 && aligned) x = *reinterpret_cast<const float4*>(source + step * kStep);
      if (count > 0) real |= ((1u << count) - 1) << (4 * step);
      v[4 * step] = x.x, v[4 * step + 1] = x.y, v[4 * step + 2] = x.z, v[4 * step + 3] = x.w;
    }
    if (!aligned || (left & (kStep - 1)) < 4) {  // where a row ends, less than four may be left
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const bool loaded = aligned && left - i / 4 * kStep >= 4;
        if ((real >> i & 1) && !loaded) v[i] = source[i / 4 * kStep + i % 4];
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] = number(v[i]);
    return real;
  }

  // Of score i of a load from step `first` on.
  __device__ __forceinline__ int id(int first, int i) const {
    const int warp = static_cast<int>(threadIdx.x) >> 5;
    return begin + (warp * steps + first + i / 4) * kStep + 4 * lane + i % 4;
  }
};

// Bits of the scores that reach a bound, and of those that equal it.
template <int kHeld>
__device__ __forceinline__ unsigned reaching(const float (&v)[kHeld], float bound) {
  unsigned mask = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) mask |= static_cast<unsigned>(v[i] >= bound) << i;
  return mask;
}
template <int kHeld>
__device__ __forceinline__ unsigned equalling(const float (&v)[kHeld], float bound) {
  unsigned mask = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) mask |= static_cast<unsigned>(v[i] == bound) << i;
  return mask;
}

// Of the marked scores those whose rank, counted on from `before` in the order of ids, is below `limit`. Moves `before`
// behind the warp's last one.
template <int kSteps>
__device__ __forceinline__ unsigned first_marked(unsigned mask, int limit, int lane, int& before) {
  const auto counts = StepCounts<kSteps>::of_marked(mask, lane);
  unsigned kept = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int rank = before + counts.before(step);
#pragma unroll
    for (int i = 4 * step; i < 4 * step + 4; ++i) {
      if (!(mask >> i & 1)) continue;
      kept |= static_cast<unsigned>(rank < limit) << i;
      ++rank;
    }
    before += counts.total(step);
  }
  return kept;
}

// From the scores of a row to the list of those that may be selected.
template <int kThreads, bool kClustered>
struct Survivors {
  static constexpr int kSteps = kLoadSteps;
  using Team = ReloadedTeam<kThreads, kClustered>;
  using Row = RowPart<kSteps>;
  Team& team;
  const Row& row;
  const int topk, rounds;
  float v[Row::kHeld];
  unsigned real;

  __device__ __forceinline__ Survivors(Team& team, const Row& row, int topk)
      : team(team), row(row), topk(topk), rounds((row.steps + kSteps - 1) / kSteps) {}
  __device__ __forceinline__ void load(int round) { real = row.load(kSteps * round, v); }

  // A range that holds the k-th score, by witnesses: each thread's highest score, and its second where half as many
  // witnesses would be too few.
  __device__ __forceinline__ Range witnessed() {
    const int share = (topk + team.parts() - 1) / team.parts();  // of each block; together they witness topk
    const bool pairs = share > kThreads / 2;
    float high = -INFINITY, second = -INFINITY;
    int held = 0;
    for (int round = 0; round < rounds; ++round) {
      load(round);
      held += __popc(real);
      if (pairs) {
#pragma unroll
        for (int i = 0; i < Row::kHeld; ++i) {
          second = fmaxf(second, fminf(high, v[i]));
          high = fmaxf(high, v[i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < Row::kHeld; ++i) high = fmaxf(high, v[i]);
      }
    }
    const int own = min(held, pairs ? 2 : 1);
    const unsigned high_key = ordered(high), second_key = ordered(second);
    Range range = {own > 1 ? second_key : own ? high_key : 0xffffffffu, high_key};
    team.extremes(range.low, range.high);
    unsigned highest = range.high;
    if (team.block_sum(own).total < share) range.low = kLowest;
    while (range.open()) {
      const unsigned middle = range.middle();
      int count = __syncthreads_count(high_key >= middle);
      if (pairs) count += __syncthreads_count(second_key >= middle);
      if (range.halve(count, share) && count <= share + share / 8) break;
    }
    team.part_extremes(range.low, highest);
    return {range.low, highest};
  }

  // Halves `range` until no more than kList scores reach its low end, or it holds one value. Returns how many do.
  __device__ __forceinline__ typename Team::Sum narrow(Range& range) {
    const auto count = [&](unsigned key) {
      int own = 0;
      for (int round = 0; round < rounds; ++round) {
        load(round);
        own += __popc(reaching(v, from_ordered(key)) & real);
      }
      return team.sum(own);
    };
    auto listed = count(range.low);
    while (listed.total > kList && range.open()) {
      const auto counted = count(range.middle());
      if (range.halve(counted.total, topk)) listed = counted;
    }
    return listed;
  }

  // Lists the marked scores from place `at` of the first block's list on; moves `at` behind the warp's last one.
  __device__ __forceinline__ void list(unsigned mask, int round, int& at) {
    const auto counts = StepCounts<kSteps>::of_marked(mask, team.lane);
    ReloadedShared& shared = team.shared;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int place = at + counts.before(step);
#pragma unroll
      for (int i = 4 * step; i < 4 * step + 4; ++i) {
        if (!(mask >> i & 1)) continue;
        const int id = row.id(kSteps * round, i);
        if constexpr (kClustered) {
          hopper::cluster_store(hopper::cluster_address(shared_address(&shared.list[place]), 0), id);
        } else {
          shared.list[place] = id;
        }
        ++place;
      }
      at += counts.total(step);
    }
  }

  // Lists what is above `kth` and the first `wanted` that equal it.
  __device__ __forceinline__ void list_crowded(float kth, int wanted) {
    const auto mark = [&](int& equals) {
      const unsigned equal = equalling(v, kth) & real;
      return (reaching(v, kth) & real & ~equal) | first_marked<kSteps>(equal, wanted, team.lane, equals);
    };
    int own = 0;
    for (int round = 0; round < rounds; ++round) {
      load(round);
      own += __popc(equalling(v, kth) & real);
    }
    const int first = team.sum(own).before;
    own = 0;
    int equals = first;
    for (int round = 0; round < rounds; ++round) {
      load(round);
      own += __popc(mark(equals));
    }
    int at = team.sum(own).before;
    equals = first;
    for (int round = 0; round < rounds; ++round) {
      load(round);
      list(mark(equals), round, at);
    }
  }

  // Returns how many are listed, at least topk; the k-th lies in `range`.
  __device__ __forceinline__ int list_all(Range& range) {
    range = witnessed();
    const auto listed = narrow(range);
    const float low = from_ordered(range.low);
    const bool crowded = listed.total > kList;
    if (crowded) {
      list_crowded(low, topk - range.above);
    } else {
      int at = listed.before;
      for (int round = 0; round < rounds; ++round) {
        load(round);
        list(reaching(v, low) & real, round, at);
      }
    }
    if (team.parts() == 1) {
      __syncthreads();
    } else {
      hopper::cluster_sync();
    }
    return crowded ? topk : listed.total;
  }
};

template <int kThreads, bool kClustered>
__device__ __forceinline__ void select_reloaded(const Params& p, ReloadedTeam<kThreads, kClustered>& team, int token,
                                                int request, int visible) {
  constexpr int kPer = kList / kThreads;
  // Runs of whole steps keep every lane's loads aligned.
  const int share = ((visible + team.parts() - 1) / team.parts() + kStep - 1) / kStep * kStep;
  const int begin = min(team.part * share, visible), stop = min(begin + share, visible);
  const int steps = (stop - begin + kStep * team.kWarps - 1) / (kStep * team.kWarps);
  const RowPart<kLoadSteps> row = {p.scores + token * p.stride, begin, stop, steps, team.lane, p.aligned};
  Range range;
  const int n = Survivors<kThreads, kClustered>(team, row, p.topk).list_all(range);
  if (team.part > 0) return;

  const int per = n > kThreads ? kPer : 1, first = static_cast<int>(threadIdx.x) * per;
  unsigned key[kPer];
  int id[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    id[i] = i < per && first + i < n ? team.shared.list[first + i] : 0;
    key[i] = ordered(number(row.row[id[i]]));
  }
  select_listed<kPer>(p, team, token, request, n, per, key, id, range);
}

}  // namespace dsv4::topk
