// The entries with the highest scores, ascending by id; contract in sglang_dsv4/ops/index_topk.py.
//
// Short rows (select_short): a block holds the row in registers, four ids in a row a thread. One histogram of 2048 equal
// intervals between the lowest and the highest score; the interval of the k-th is settled by ranking its few scores by
// (score, lower id), or by halving the range of their bits where they are many. A prefix sum over the threads, which hold
// ids in order, places what is selected. Five barriers in all.
//
// Longer rows: a block (or a cluster, which shares its histograms) owns a row and keeps it in shared memory:
//   1. a lower bound of the k-th score from the warps' own maxima, and the highest score; the few scores that reach the
//      bound, the survivors, are listed: all that follows looks at them alone;
//   2. a histogram of 2048 equal intervals between the two; the interval of the k-th score; survivors above it are
//      selected, those in it are ranked by (score, lower id);
//   3. what is selected are bits of a map of the row: reading it in order gives ascending ids without any sort.
// Equal intervals spread scores far better than leading float bits do. Where they do not (many equal scores, infinities)
// a radix search over all 32 bits finds the k-th score instead.
// Rows too long to keep are read again from the L2 cache in each pass. NaN ranks below every number.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/meta.cuh"
#include "dsv4/mma.cuh"

namespace {

using namespace dsv4;

constexpr int kBins = 2048;
constexpr int kDigits = 256;
constexpr int kSurvivors = 2048;
constexpr int kListed = 1024;  // scores in the k-th interval that are ranked one by one
constexpr int kMaxCluster = 8;
constexpr int kAlone = 16384;  // visible entries up to which one block of a cluster works alone
constexpr int kCsaShift = 2;
constexpr int kStep = 128;  // ids a warp reads at once
constexpr int kRanked = 128;  // scores in the k-th interval of a short row that are ranked one by one
constexpr int kShort = 8192;  // entries of the longest row that a block of 1024 threads holds in registers

template <int kThreads>
constexpr int kSegments = kShort / (4 * 1024);  // float4 that a thread holds
template <int kThreads>
constexpr int kShortRow = 4 * kThreads * kSegments<kThreads>;

struct Params {
  StepMeta meta;
  const float* scores;
  int32_t* out;
  int64_t stride;
  int width;
  int topk;
  bool physical;
  bool aligned;  // rows start at 16-byte addresses
  bool short_rows;
};

// Order-preserving map of floats to integers and back; both zeros are one value.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
__device__ __forceinline__ float number(float x) { return x == x ? x : -INFINITY; }

__device__ __forceinline__ int steps_of(int ids) { return (ids + kStep - 1) / kStep; }

// One part of a row. Steps of 128 ids go round the warps, four ids a lane. Each thread keeps its own scores in shared
// memory, so that reading them again needs no barrier; without kKeep it reads global memory again. Behind the part's end
// all scores are -inf.
template <int kThreads, bool kKeep>
struct RowPart {
  static constexpr int kWarps = kThreads / 32;
  const float* row;
  float* kept;
  int begin, stop;
  int warp, lane;
  bool aligned;

  __device__ __forceinline__ float4 fetch(int id) const {
    if (aligned && id + 3 < stop) return *reinterpret_cast<const float4*>(row + id);
    return make_float4(id < stop ? row[id] : -INFINITY, id + 1 < stop ? row[id + 1] : -INFINITY,
                       id + 2 < stop ? row[id + 2] : -INFINITY, id + 3 < stop ? row[id + 3] : -INFINITY);
  }

  __device__ __forceinline__ void start() {
    if constexpr (kKeep) {
      for (int at = warp * kStep + 4 * lane; begin + at < stop; at += kWarps * kStep) {
        if (aligned && begin + at + 3 < stop) {
          copy_async16(shared_address(kept + at), row + begin + at);
        } else {
          *reinterpret_cast<float4*>(kept + at) = fetch(begin + at);
        }
      }
      copy_async_commit();
      copy_async_wait<0>();
    }
  }

  // Calls visit(id, scores) for each step; the whole warp calls it.
  template <typename Visit>
  __device__ __forceinline__ void each(Visit&& visit) const {
#pragma unroll 2
    for (int at = warp * kStep; begin + at < stop; at += kWarps * kStep) {
      const int id = begin + at + 4 * lane;
      float4 x = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      if constexpr (kKeep) {
        if (id < stop) x = *reinterpret_cast<const float4*>(kept + at + 4 * lane);
      } else {
        x = fetch(id);
        x = make_float4(number(x.x), number(x.y), number(x.z), number(x.w));
      }
      const float v[4] = {x.x, x.y, x.z, x.w};
      visit(id, v);
    }
  }

  // Replaces what is kept of NaN.
  __device__ __forceinline__ void keep_numbers() {
    if constexpr (kKeep) {
      for (int at = warp * kStep + 4 * lane; begin + at < stop; at += kWarps * kStep) {
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[at + i] = number(kept[at + i]);
      }
    }
  }
};

struct Shared {
  int bins[kBins];
  int sums[kBins];  // of the cluster's bins
  float survivor_score[kSurvivors];
  int survivor_id[kSurvivors];
  float listed_score[kListed];
  int listed_id[kListed];
  float extremes[kMaxCluster][3];
  unsigned warp_extremes[32][3];
  int part_counts[kMaxCluster];
  int warp_values[32];
  int warp_counts[32];
  int num_survivors, num_listed;
};

// A barrier of all blocks that share a row.
__device__ __forceinline__ void barrier(int parts) {
  if (parts > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
}

__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

struct Found {
  int bin;     // -1 where fewer are counted than wanted
  int before;  // counted above it
};

// Which of the first `count` bins, summed over the cluster, holds the `wanted`-th from the top. Begins with a barrier;
// the bins may be read until the next one.
template <int kThreads>
__device__ __forceinline__ Found find_bin(Shared& shared, int count, int wanted, int parts) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  barrier(parts);
  const int segment = count / kWarps;
  int sum = 0;
  for (int i = lane; i < segment; i += 32) {
    const int bin = warp * segment + i;
    int value = 0;
    if (parts > 1) {
      const unsigned address = shared_address(&shared.bins[bin]);
#pragma unroll
      for (int part = 0; part < kMaxCluster; ++part) {
        if (part < parts) value += __float_as_int(hopper::cluster_load(hopper::cluster_address(address, part)));
      }
      shared.sums[bin] = value;
    } else {
      value = shared.bins[bin];
    }
    sum += value;
  }
  sum = __reduce_add_sync(kFullMask, sum);
  if (lane == 0) shared.warp_values[warp] = sum;
  __syncthreads();

  const int* const bins = parts > 1 ? shared.sums : shared.bins;
  const int own = lane < kWarps ? shared.warp_values[kWarps - 1 - lane] : 0;
  const int upto = inclusive_sum(own, lane);
  const unsigned enough = __ballot_sync(kFullMask, upto >= wanted);
  Found found = {-1, 0};
  if (enough == 0) return found;
  const int at = __ffs(enough) - 1;
  int before = __shfl_sync(kFullMask, upto - own, at);
  const int low = (kWarps - 1 - at) * segment;
  for (int top = low + segment - 1; top >= low; top -= 32) {
    const int bin = top - lane;
    const int value = bin >= low ? bins[bin] : 0;
    const int through = before + inclusive_sum(value, lane);
    const unsigned reached = __ballot_sync(kFullMask, through >= wanted);
    if (reached) {
      const int source = __ffs(reached) - 1;
      found.bin = top - source;
      found.before = __shfl_sync(kFullMask, through - value, source);
      break;
    }
    before = __shfl_sync(kFullMask, through, 31);
  }
  return found;
}

// A value that at least t of the warp's 32 keys reach, not far below the t-th largest: halves the range 14 times.
__device__ __forceinline__ unsigned reached_by(unsigned key, int t) {
  unsigned low = __reduce_min_sync(kFullMask, key), high = __reduce_max_sync(kFullMask, key);
#pragma unroll
  for (int i = 0; i < 14; ++i) {
    const unsigned middle = low + ((high - low + 1) >> 1);
    if (__popc(__ballot_sync(kFullMask, key >= middle)) >= t) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// `own` of all threads before this one, over the block and the cluster's lower parts, which alone sum to `lower`.
template <int kThreads>
__device__ __forceinline__ int sum_before(Shared& shared, int own, int part, int parts, int& lower) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int inclusive = inclusive_sum(own, lane);
  if (lane == 31) shared.warp_counts[warp] = inclusive;
  __syncthreads();
  const int counts = lane < kWarps ? shared.warp_counts[lane] : 0;
  const int before = __reduce_add_sync(kFullMask, lane < warp ? counts : 0) + inclusive - own;
  lower = 0;
  if (parts > 1) {
    const int total = __reduce_add_sync(kFullMask, counts);
    if (static_cast<int>(threadIdx.x) < parts) {
      hopper::cluster_store(hopper::cluster_address(shared_address(&shared.part_counts[part]), threadIdx.x), total);
    }
    hopper::cluster_sync();
    for (int i = 0; i < part; ++i) lower += shared.part_counts[i];
  }
  return lower + before;
}

__device__ __forceinline__ void mark(unsigned* map, int place) { atomicOr(&map[place >> 5], 1u << (place & 31)); }

// What a block needs for a short row.
struct Short {
  int bins[kBins];  // from the highest interval down
  unsigned long long ranked[kRanked];
  int pages[kShort / (kGroupRows / 2)];  // 32 or 64 entries a page
  unsigned lows[32], highs[32];
  int sums[32];
  unsigned counts[2][32];
  int reached[40];  // by step of the bisection
  unsigned low, high;
  int num_ranked;
};
static_assert(sizeof(Short) <= sizeof(Shared));

// Four scores of a row from `id` on, as far as the row's buffer goes. Volatile, so that they are under way before the
// row's length is known: what lies behind it is loaded but never looked at.
__device__ __forceinline__ float4 early_scores(const Params& p, int token, int id) {
  const float* row = p.scores + token * p.stride + id;
  float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.aligned && id + 3 < p.width) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(row));
  } else {
    if (id < p.width) v.x = row[0];
    if (id + 1 < p.width) v.y = row[1];
    if (id + 2 < p.width) v.z = row[2];
    if (id + 3 < p.width) v.w = row[3];
  }
  return v;
}

// For each segment, how many of `own` stand before this thread's in the order of ids. Counts are below 2^16.
template <int kThreads>
__device__ __forceinline__ void ranks_before(Short& shared, int buffer, const int (&own)[2], int (&before)[2]) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const unsigned packed = static_cast<unsigned>(own[0]) | static_cast<unsigned>(own[1]) << 16;
  const unsigned inclusive = static_cast<unsigned>(inclusive_sum(static_cast<int>(packed), lane));
  if (lane == 31) shared.counts[buffer][warp] = inclusive;
  __syncthreads();
  const unsigned counts = lane < kWarps ? shared.counts[buffer][lane] : 0;
  const unsigned total = __reduce_add_sync(kFullMask, counts);
  const unsigned lower = __reduce_add_sync(kFullMask, lane < warp ? counts : 0) + inclusive - packed;
  before[0] = static_cast<int>(lower & 0xffffu);
  before[1] = static_cast<int>((total & 0xffffu) + (lower >> 16));
}

// Selects from a row of more than topk and at most kShortRow entries. x[0] holds the thread's first scores already.
template <int kThreads>
__device__ __forceinline__ void select_short(const Params& p, Short& shared, int token, int request, int visible,
                                             const float4& first) {
  constexpr int kWarps = kThreads / 32, kPart = 4 * kThreads;
  static_assert(kSegments<kThreads> == 2, "two segments are packed into one sum");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, topk = p.topk;
  const int rows_shift = p.meta.page_shift - kCsaShift;
  const bool longer = visible > kPart;
  float x[8];  // ids 4 t .. 4 t + 3, then kPart behind them
  {
    const float4 second = longer ? early_scores(p, token, kPart + 4 * threadIdx.x) : make_float4(0, 0, 0, 0);
    const float both[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = number(both[i]);
  }
  const auto id_of = [&](int i) { return static_cast<int>(4 * threadIdx.x) + (i / 4) * kPart + i % 4; };

  for (int i = 4 * threadIdx.x; i < kBins; i += kPart) *reinterpret_cast<int4*>(shared.bins + i) = make_int4(0, 0, 0, 0);
  if (threadIdx.x < 40) shared.reached[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_ranked = 0, shared.low = 0xffffffffu, shared.high = 0;
  if (p.physical) {
    const int columns = (visible + (1 << rows_shift) - 1) >> rows_shift;
    for (int i = threadIdx.x; i < columns; i += kThreads) {
      shared.pages[i] = i < p.meta.max_pages ? p.meta.page_table[request * p.meta.page_table_stride + i] : -1;
    }
  }

  float low = INFINITY, high = -INFINITY;
  unsigned seen = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (id_of(i) >= visible) continue;
    seen |= 1u << i;
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
  }
  const unsigned warp_low = __reduce_min_sync(kFullMask, seen ? ordered(low) : 0xffffffffu);
  const unsigned warp_high = __reduce_max_sync(kFullMask, seen ? ordered(high) : 0u);
  if (lane == 0) shared.lows[warp] = warp_low, shared.highs[warp] = warp_high;
  __syncthreads();
  unsigned low_key = __reduce_min_sync(kFullMask, lane < kWarps ? shared.lows[lane] : 0xffffffffu);
  unsigned high_key = __reduce_max_sync(kFullMask, lane < kWarps ? shared.highs[lane] : 0u);
  low = from_ordered(low_key);
  high = from_ordered(high_key);

  const float per_unit = kBins / (high - low);
  const bool spread = low > -INFINITY && high < INFINITY && per_unit > 0.0f && per_unit < INFINITY;
  unsigned selected = 0, candidates = seen;  // bit i: id_of(i)
  int wanted = topk, listed = visible;
  if (spread) {
    const auto interval = [&](float score) { return max(kBins - 1 - static_cast<int>((score - low) * per_unit), 0); };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (seen >> i & 1) atomicAdd(&shared.bins[interval(x[i])], 1);
    }
    __syncthreads();
    constexpr int kSegment = kBins / kWarps, kEach = kSegment / 32;
    const auto lane_bins = [&](int of_warp, int(&bins)[kEach]) {
      const int* source = shared.bins + of_warp * kSegment + lane * kEach;
      if constexpr (kEach == 2) {
        const int2 v = *reinterpret_cast<const int2*>(source);
        bins[0] = v.x, bins[1] = v.y;
      } else {
        const int4 v = *reinterpret_cast<const int4*>(source);
        bins[0] = v.x, bins[1] = v.y, bins[2] = v.z, bins[3] = v.w;
      }
      int sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += bins[i];
      return sum;
    };
    int bins[kEach];
    const int warp_sum = __reduce_add_sync(kFullMask, lane_bins(warp, bins));
    if (lane == 0) shared.sums[warp] = warp_sum;
    __syncthreads();
    const int own = lane < kWarps ? shared.sums[lane] : 0;
    const int upto = inclusive_sum(own, lane);
    const int at = __ffs(__ballot_sync(kFullMask, upto >= topk)) - 1;  // there is one: more than topk are counted
    const int sum = lane_bins(at, bins);
    const int through = __shfl_sync(kFullMask, upto - own, at) + inclusive_sum(sum, lane);
    const int source = __ffs(__ballot_sync(kFullMask, through >= topk)) - 1;
    int before = through - sum, bin = 0;
#pragma unroll
    for (int i = 0; i < kEach - 1; ++i) {
      if (bin == i && before + bins[i] < topk) before += bins[i], bin = i + 1;
    }
    int inside = bins[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) inside = bin == i ? bins[i] : inside;
    bin += at * kSegment + lane * kEach;
    bin = __shfl_sync(kFullMask, bin, source);
    wanted = topk - __shfl_sync(kFullMask, before, source);
    listed = __shfl_sync(kFullMask, inside, source);
    candidates = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(seen >> i & 1)) continue;
      const int place = interval(x[i]);
      selected |= static_cast<unsigned>(place < bin) << i;
      candidates |= static_cast<unsigned>(place == bin) << i;
    }
  }

  if (listed == wanted) {
    selected |= candidates;
  } else if (listed <= kRanked) {
    const auto entry = [&](int i) {
      return static_cast<unsigned long long>(ordered(x[i])) << 32 | (0xffffffffu - static_cast<unsigned>(id_of(i)));
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (candidates >> i & 1) shared.ranked[atomicAdd(&shared.num_ranked, 1)] = entry(i);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(candidates >> i & 1)) continue;
      const unsigned long long mine = entry(i);
      int rank = 0;
      for (int other = 0; other < listed; ++other) rank += shared.ranked[other] > mine;
      selected |= static_cast<unsigned>(rank < wanted) << i;
    }
  } else {
    if (spread) {
      low_key = 0xffffffffu, high_key = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (!(candidates >> i & 1)) continue;
        low_key = min(low_key, ordered(x[i]));
        high_key = max(high_key, ordered(x[i]));
      }
      low_key = __reduce_min_sync(kFullMask, low_key);
      high_key = __reduce_max_sync(kFullMask, high_key);
      if (lane == 0) atomicMin(&shared.low, low_key), atomicMax(&shared.high, high_key);
      __syncthreads();
      low_key = shared.low, high_key = shared.high;
    }
    int step = 0;
    const auto reaching = [&](unsigned key) {  // candidates of at least `key`
      int count = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count += (candidates >> i & 1) && ordered(x[i]) >= key;
      count = __reduce_add_sync(kFullMask, count);
      if (lane == 0 && count) atomicAdd(&shared.reached[step], count);
      __syncthreads();
      return shared.reached[step++];
    };
#pragma unroll 1
    while (low_key < high_key) {  // at least `wanted` reach low_key
      const unsigned middle = low_key + ((high_key - low_key + 1) >> 1);
      if (reaching(middle) >= wanted) {
        low_key = middle;
      } else {
        high_key = middle - 1;
      }
    }
    wanted -= reaching(low_key + 1);
    unsigned equal = 0;
    int own[2] = {}, before[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(candidates >> i & 1)) continue;
      const unsigned key = ordered(x[i]);
      selected |= static_cast<unsigned>(key > low_key) << i;
      equal |= static_cast<unsigned>(key == low_key) << i;
      own[i / 4] += key == low_key;
    }
    ranks_before<kThreads>(shared, 0, own, before);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (equal >> i & 1) selected |= static_cast<unsigned>(before[i / 4]++ < wanted) << i;
    }
  }

  const int own[2] = {__popc(selected & 15u), __popc(selected >> 4)};
  int place[2];
  ranks_before<kThreads>(shared, 1, own, place);
  int32_t* const out = p.out + static_cast<int64_t>(token) * topk;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!(selected >> i & 1)) continue;
    const int id = id_of(i);
    int stored = id;
    if (p.physical) {
      const int64_t page = shared.pages[id >> rows_shift];
      stored = page < 0 ? -1 : static_cast<int>((page << rows_shift) + (id & ((1 << rows_shift) - 1)));
    }
    out[place[i / 4]++] = stored;
  }
}

__device__ __forceinline__ int visible_of(const Params& p, int token, int request) {
  return request < 0 ? 0 : static_cast<int>(min((p.meta.positions[token] + 1) >> kCsaShift, static_cast<int64_t>(p.width)));
}

// Selects all of a row's entries.
template <int kThreads>
__device__ __forceinline__ void select_all(const Params& p, int token, int request, int visible) {
  int32_t* const out = p.out + static_cast<int64_t>(token) * p.topk;
  for (int i = threadIdx.x; i < p.topk; i += kThreads) {
    const int stored = p.physical && i < visible ? static_cast<int>(p.meta.entry_row(request, i, kCsaShift)) : i;
    out[i] = i < visible ? stored : -1;
  }
}

// Rows of a buffer that is no wider than a short row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) short_kernel(const __grid_constant__ Params p) {
  __shared__ __align__(16) Short shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const int token = blockIdx.x;
  const float4 first = early_scores(p, token, 4 * threadIdx.x);
  const int request = p.meta.request_of(token), visible = visible_of(p, token, request);
  if (visible <= p.topk) {
    select_all<kThreads>(p, token, request, visible);
  } else {
    select_short<kThreads>(p, shared, token, request, visible, first);
  }
}

// Selects by the bits of the k-th score, eight at a time.
template <int kThreads, typename Part>
__device__ __noinline__ void radix_select(Part& row, Shared& shared, unsigned* map, int topk, int part, int parts) {
  const int lane = threadIdx.x & 31;
  row.keep_numbers();
  unsigned prefix = 0;
  int wanted = topk;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    barrier(parts);  // the bins were read
    for (int i = threadIdx.x; i < kDigits; i += kThreads) shared.bins[i] = 0;
    __syncthreads();
    row.each([&](int id, const float (&v)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned key = ordered(v[i]);
        const bool match = id + i < row.stop && (shift == 24 || key >> (shift + 8) == prefix);
        const unsigned digit = match ? (key >> shift) & 255u : kDigits;
        // Equal digits meet in one addition: many equal scores are why this search runs.
        const unsigned peers = __match_any_sync(kFullMask, digit);
        if (match && lane == __ffs(peers) - 1) atomicAdd(&shared.bins[digit], __popc(peers));
      }
    });
    const Found found = find_bin<kThreads>(shared, kDigits, wanted, parts);
    prefix = prefix << 8 | static_cast<unsigned>(found.bin);
    wanted -= found.before;
  }
  const float kth = from_ordered(prefix);

  // The map of all that equal it, of which the first `wanted` stay; then all above it.
  const int words = (row.stop - row.begin + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, words), last = min(first + each, words);
  for (int i = first; i < last; ++i) map[i] = 0;
  __syncthreads();
  row.each([&](int id, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (id + i < row.stop && v[i] == kth) mark(map, id + i - row.begin);
    }
  });
  __syncthreads();
  int own = 0;
  for (int i = first; i < last; ++i) own += __popc(map[i]);
  int lower;
  int room = wanted - sum_before<kThreads>(shared, own, part, parts, lower);
  for (int i = first; i < last; ++i) {
    unsigned bits = map[i], stay = 0;
    for (; bits && room > 0; --room) {
      stay |= bits & (0u - bits);
      bits &= bits - 1;
    }
    map[i] = stay;
  }
  __syncthreads();
  row.each([&](int id, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (id + i < row.stop && v[i] > kth) mark(map, id + i - row.begin);
    }
  });
  barrier(parts);
}

// Selects by intervals; false, in the whole cluster, where they do not separate the scores. `warps` counts the warps of
// the cluster that hold any score.
template <int kThreads, typename Part>
__device__ __forceinline__ bool interval_select(const Part& row, Shared& shared, unsigned* map, int topk, int warps,
                                                int part, int parts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  constexpr int kWarps = kThreads / 32;
  float low = INFINITY, high = -INFINITY, second = -INFINITY;
  row.each([&](int id, const float (&v)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      second = fmaxf(second, fminf(high, v[i]));
      high = fmaxf(high, v[i]);
      low = fminf(low, id + i < row.stop ? v[i] : INFINITY);
    }
  });
  // If t scores of every warp reach a bound, t times the warps at least k, the k-th score reaches it too. With more than
  // 16 wanted of a warp two scores of each lane are better witnesses than one.
  const int share = (topk + warps - 1) / warps;
  unsigned bound_key = 0;
  if (share <= 16) {
    bound_key = reached_by(ordered(high), share);
  } else if (share <= 64) {
    bound_key = reached_by(ordered(second), (share + 1) / 2);
  }
  if (row.begin + warp * kStep >= row.stop) bound_key = 0xffffffffu;
  unsigned low_key = __reduce_min_sync(kFullMask, ordered(low));
  unsigned high_key = __reduce_max_sync(kFullMask, ordered(high));
  if (lane == 0) {
    shared.warp_extremes[warp][0] = low_key;
    shared.warp_extremes[warp][1] = high_key;
    shared.warp_extremes[warp][2] = bound_key;
  }
  __syncthreads();
  low_key = bound_key = 0xffffffffu, high_key = 0;
  if (lane < kWarps) {
    low_key = shared.warp_extremes[lane][0];
    high_key = shared.warp_extremes[lane][1];
    bound_key = shared.warp_extremes[lane][2];
  }
  low = from_ordered(__reduce_min_sync(kFullMask, low_key));
  high = from_ordered(__reduce_max_sync(kFullMask, high_key));
  bound_key = max(__reduce_min_sync(kFullMask, bound_key), ordered(-INFINITY));
  float bound = from_ordered(bound_key);
  if (parts > 1) {
    if (static_cast<int>(threadIdx.x) < parts) {
      const unsigned remote = hopper::cluster_address(shared_address(shared.extremes[part]), threadIdx.x);
      hopper::cluster_store(remote, __float_as_int(low));
      hopper::cluster_store(remote + 4, __float_as_int(high));
      hopper::cluster_store(remote + 8, __float_as_int(bound));
    }
    hopper::cluster_sync();
    for (int i = 0; i < parts; ++i) {
      low = fminf(low, shared.extremes[i][0]);
      high = fmaxf(high, shared.extremes[i][1]);
      bound = fminf(bound, shared.extremes[i][2]);
    }
  }
  low = fmaxf(low, bound);
  const float per_unit = kBins / (high - low);
  if (!(low > -INFINITY && high < INFINITY && per_unit > 0.0f && per_unit < INFINITY)) return false;
  const auto interval = [&](float x) { return min(static_cast<int>((x - low) * per_unit), kBins - 1); };

  row.each([&](int id, const float (&v)[4]) {
    unsigned reached[4];
    int all = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reached[i] = __ballot_sync(kFullMask, v[i] >= low);
      all += __popc(reached[i]);
    }
    if (all == 0) return;
    int at = 0;
    if (lane == 0) at = atomicAdd(&shared.num_survivors, all);
    at = __shfl_sync(kFullMask, at, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = at + __popc(reached[i] & ((1u << lane) - 1));
      if (v[i] >= low && place < kSurvivors) {
        shared.survivor_score[place] = v[i];
        shared.survivor_id[place] = id + i;
      }
      at += __popc(reached[i]);
    }
  });
  __syncthreads();
  const int survivors = shared.num_survivors;
  const auto each_survivor = [&](auto&& visit) {
    if (survivors <= kSurvivors) {
      for (int i = threadIdx.x; i < survivors; i += kThreads) visit(shared.survivor_id[i], shared.survivor_score[i]);
    } else {
      row.each([&](int id, const float (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (v[i] >= low) visit(id + i, v[i]);
        }
      });
    }
  };

  each_survivor([&](int, float score) { atomicAdd(&shared.bins[interval(score)], 1); });
  const Found found = find_bin<kThreads>(shared, kBins, topk, parts);
  if (found.bin < 0) return false;  // the rest is NaN
  const int wanted = topk - found.before;
  each_survivor([&](int id, float score) {
    const int own = interval(score);
    if (own > found.bin) mark(map, id - row.begin);
    if (own != found.bin) return;
    if (parts > 1) {  // listed in the cluster's first block
      const int at = hopper::cluster_fetch_add(hopper::cluster_address(shared_address(&shared.num_listed), 0), 1);
      if (at < kListed) {
        const unsigned listed_score = hopper::cluster_address(shared_address(&shared.listed_score[at]), 0);
        const unsigned listed_id = hopper::cluster_address(shared_address(&shared.listed_id[at]), 0);
        hopper::cluster_store(listed_score, __float_as_int(score));
        hopper::cluster_store(listed_id, id);
      }
    } else {
      const int at = atomicAdd(&shared.num_listed, 1);
      if (at < kListed) {
        shared.listed_score[at] = score;
        shared.listed_id[at] = id;
      }
    }
  });
  barrier(parts);
  int listed = shared.num_listed;
  if (parts > 1) {
    const auto from_first = [](const void* pointer) {
      return __float_as_int(hopper::cluster_load(hopper::cluster_address(shared_address(pointer), 0)));
    };
    listed = from_first(&shared.num_listed);
    if (listed <= kListed && part > 0) {
      for (int i = threadIdx.x; i < listed; i += kThreads) {
        shared.listed_score[i] = __int_as_float(from_first(&shared.listed_score[i]));
        shared.listed_id[i] = from_first(&shared.listed_id[i]);
      }
    }
    hopper::cluster_sync();  // the first block may go on only when all have read its list
  }
  if (listed > kListed) return false;

  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const float score = shared.listed_score[i];
    const int id = shared.listed_id[i];
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < listed; ++other) {
      const float theirs = shared.listed_score[other];
      rank += theirs > score || (theirs == score && shared.listed_id[other] < id);
    }
    if (rank < wanted && id >= row.begin && id < row.stop) mark(map, id - row.begin);
  }
  __syncthreads();
  return true;
}

template <int kThreads, bool kKeep>
__global__ void __launch_bounds__(kThreads, kThreads == 1024 ? 1 : 2)
    topk_kernel(const __grid_constant__ Params p, const int cluster, const int kept_floats) {
  constexpr int kWarps = kThreads / 32;
  __shared__ __align__(16) Shared shared;
  extern __shared__ __align__(16) float kept[];
  unsigned* const map = reinterpret_cast<unsigned*>(kept + kept_floats);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  grid_dependency_launch();
  grid_dependency_wait();
  const int token = blockIdx.x / cluster, part = blockIdx.x % cluster;
  const float4 early =
      part == 0 && p.short_rows ? early_scores(p, token, 4 * threadIdx.x) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int request = p.meta.request_of(token), visible = visible_of(p, token, request);
  const int parts = visible > kAlone ? cluster : 1;
  if (part >= parts) return;
  int32_t* const out = p.out + static_cast<int64_t>(token) * p.topk;
  const auto stored = [&](int id) {
    return p.physical ? static_cast<int>(p.meta.entry_row(request, id, kCsaShift)) : id;
  };
  if (visible <= p.topk) {
    select_all<kThreads>(p, token, request, visible);
    return;
  }
  if (visible <= kShortRow<kThreads> && p.short_rows) {
    select_short<kThreads>(p, reinterpret_cast<Short&>(shared), token, request, visible, early);
    return;
  }

  // Parts of whole steps keep every warp's loads aligned.
  const int share = steps_of((visible + parts - 1) / parts) * kStep;
  RowPart<kThreads, kKeep> row = {
      p.scores + token * p.stride, kept, min(part * share, visible), min((part + 1) * share, visible), warp, lane,
      p.aligned};
  int warps = 0;
  for (int i = 0; i < parts; ++i) warps += min(kWarps, steps_of(max(min(visible - i * share, share), 0)));
  row.start();

  const int words = (row.stop - row.begin + 31) / 32;
  for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
  for (int i = threadIdx.x; i < words; i += kThreads) map[i] = 0;
  if (threadIdx.x == 0) shared.num_survivors = shared.num_listed = 0;
  if (!interval_select<kThreads>(row, shared, map, p.topk, warps, part, parts)) {
    radix_select<kThreads>(row, shared, map, p.topk, part, parts);
  }

  const int each = (words + kThreads - 1) / kThreads, first = static_cast<int>(threadIdx.x) * each;
  int own = 0;
  for (int i = first; i < min(first + each, words); ++i) own += __popc(map[i]);
  int before_part = 0;
  const int at = sum_before<kThreads>(shared, own, part, parts, before_part);
  // Through a list, so that every thread looks up a page for itself.
  int* const list = shared.survivor_id;
  int slot = at - before_part;
  for (int i = first; i < min(first + each, words); ++i) {
    for (unsigned bits = map[i]; bits; bits &= bits - 1, ++slot) {
      if (slot < kSurvivors) list[slot] = row.begin + 32 * i + __ffs(bits) - 1;
    }
  }
  if (threadIdx.x == kThreads - 1) shared.num_listed = min(slot, kSurvivors);
  __syncthreads();
  const int listed = shared.num_listed;
  for (int i = threadIdx.x; i < listed; i += kThreads) {
    if (before_part + i < p.topk) out[before_part + i] = stored(list[i]);
  }
}

// What a block may keep besides its other shared memory, in floats.
int most_kept() {
  static int most[64] = {};
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  int& bytes = most[device & 63];
  if (bytes == 0) {
    cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
  }
  return (bytes - static_cast<int>(sizeof(Shared))) / 4;
}

// Floats of shared memory for a block of rows in `cluster` parts: its scores, if kept, and a bit for each.
int kept_floats(int width, int cluster, bool keep) {
  int ids = ((width + cluster - 1) / cluster + kStep - 1) / kStep * kStep;
  if (cluster > 1 && ids < kAlone) ids = kAlone;
  return (keep ? ids : 0) + ids / 32;
}

template <int kThreads, bool kKeep>
void launch_topk(const TensorView& out, const Params& p, int cluster) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.meta.num_tokens) * cluster);
  shape.block = dim3(kThreads);
  shape.cluster = cluster;
  shape.overlap = true;
  const int all = kept_floats(p.width, cluster, kKeep), scores = kKeep ? all / 33 * 32 : 0;
  shape.dynamic_smem = sizeof(float) * all;
  // Static and dynamic shared memory together may pass the default limit where the dynamic part alone does not.
  cuda_check(cudaFuncSetAttribute(topk_kernel<kThreads, kKeep>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.dynamic_smem)),
             "cudaFuncSetAttribute");
  launch(out, shape, topk_kernel<kThreads, kKeep>, p, cluster, scores);
}

// `threads` of a block: 0 chooses; 1024 treats short rows like longer ones; -1 does and reads rows again in each pass
// whatever their length, as devices without clusters do with long ones.
void index_topk(TensorView scores, TensorView out, bool physical, int64_t threads, DSV4_META_PARAMS) {
  const DeviceGuard guard(out);
  Params p = {};
  p.meta = DSV4_META;
  p.scores = data_of<const float>(scores);
  p.out = data_of<int32_t>(out);
  p.stride = scores.stride(0);
  p.width = static_cast<int>(scores.size(1));
  p.topk = static_cast<int>(out.size(1));
  p.physical = physical;
  p.aligned = p.stride % 4 == 0 && reinterpret_cast<uintptr_t>(p.scores) % 16 == 0;
  p.short_rows = threads == 0;
  if (p.short_rows && p.width <= kShortRow<512>) {
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(p.meta.num_tokens));
    shape.block = dim3(512);
    shape.overlap = true;
    launch(out, shape, short_kernel<512>, p);
    return;
  }
  const bool many = p.meta.num_tokens > multiprocessors();
  int cluster = 1;  // rows of more than kAlone scores are worth a cluster while blocks are few
  while (cluster < kMaxCluster && (p.width + cluster - 1) / cluster > (many ? 2 * kAlone : kAlone)) cluster *= 2;
  if (DSV4_ARCH != 90) cluster = 1;
  if (threads < 0 || kept_floats(p.width, cluster, true) > most_kept()) {
    launch_topk<1024, false>(out, p, 1);
  } else if (threads == 512 || (threads == 0 && many && p.width <= kAlone)) {
    launch_topk<512, true>(out, p, 1);
  } else {
    launch_topk<1024, true>(out, p, cluster);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_topk, index_topk);
