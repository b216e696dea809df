// The entries with the highest scores, ascending by id; contract in sglang_dsv4/ops/index_topk.py.
//
// A block (or a cluster, which shares its histograms) owns a row and keeps it in shared memory:
//   1. lowest and highest score; 2048 equal intervals between them; a histogram of them in shared memory;
//   2. the interval of the k-th score; the few scores in it are listed and ranked by (score, lower id);
//   3. the k-th score itself is then known, and how many of its equals are taken: one pass in id order counts and
//      writes the selected ids, so the result is ascending and ties fall to the lower id without any sort.
// Equal intervals spread scores far better than leading float bits do. Where they do not (many equal scores, infinities)
// a radix search over all 32 bits finds the k-th score instead.
// Rows too long to keep are read again from the L2 cache in each pass.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/hopper.cuh"
#include "dsv4/meta.cuh"
#include "dsv4/mma.cuh"

namespace {

using namespace dsv4;

constexpr int kBins = 2048;
constexpr int kDigits = 256;
constexpr int kListed = 1024;     // scores in the k-th interval that are ranked one by one
constexpr int kMaxCluster = 8;
constexpr int kAlone = 16384;     // visible entries up to which one block of a cluster works alone
constexpr int kCsaShift = 2;
constexpr int kStep = 128;        // ids a warp reads at once

// Two counts in one integer: scores above the k-th, fewer than k, and its equals, fewer than 2^20.
constexpr int kAboveBits = 12, kAboveMask = (1 << kAboveBits) - 1;
__device__ __forceinline__ int equals_of(int packed) {
  return static_cast<int>(static_cast<unsigned>(packed) >> kAboveBits);
}

struct Params {
  StepMeta meta;
  const float* scores;
  int32_t* out;
  int64_t stride;
  int width;
  int topk;
  bool physical;
  bool aligned;  // rows start at 16-byte addresses
};

// Order-preserving map of floats to integers; both zeros are one value, NaN ends lie outside the infinities.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// One part of a row: a contiguous range of ids, dealt to the warps in contiguous pieces. Each thread keeps its own scores
// in shared memory, so that reading them again needs no barrier; without kKeep it reads global memory again.
template <int kThreads, bool kKeep>
struct RowPart {
  const float* row;
  float* kept;
  int first, end;  // of this warp
  int steps;
  bool aligned;

  __device__ __forceinline__ float4 fetch(int id) const {
    if (aligned && id + 3 < end) return *reinterpret_cast<const float4*>(row + id);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (id < end) v.x = row[id];
    if (id + 1 < end) v.y = row[id + 1];
    if (id + 2 < end) v.z = row[id + 2];
    if (id + 3 < end) v.w = row[id + 3];
    return v;
  }

  __device__ __forceinline__ void start(const float* scores, int begin, int stop, bool vectors, float* keep) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    constexpr int kWarps = kThreads / 32;
    row = scores;
    aligned = vectors;
    steps = (stop - begin + kWarps * kStep - 1) / (kWarps * kStep);
    first = begin + warp * steps * kStep;
    end = min(stop, first + steps * kStep);
    kept = keep + warp * steps * kStep + 4 * lane;
    if constexpr (kKeep) {
      for (int j = 0; j < steps; ++j) {
        const int id = first + j * kStep + 4 * lane;
        if (aligned && id + 3 < end) {
          copy_async16(shared_address(kept + j * kStep), row + id);
        } else {
          *reinterpret_cast<float4*>(kept + j * kStep) = fetch(id);
        }
      }
      copy_async_commit();
      copy_async_wait<0>();
    }
  }

  // Calls visit(id, values, count) for each step: `count` of the lane's four values exist. The whole warp calls visit.
  template <typename Visit>
  __device__ __forceinline__ void each(Visit&& visit) const {
    const int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int j = 0; j < steps; ++j) {
      const int id = first + j * kStep + 4 * lane;
      const float4 value = kKeep ? *reinterpret_cast<const float4*>(kept + j * kStep) : fetch(id);
      const float v[4] = {value.x, value.y, value.z, value.w};
      visit(id, v, min(max(end - id, 0), 4));
    }
  }
};

struct Shared {
  int bins[kBins];
  unsigned listed_score[kListed];
  int listed_id[kListed];
  float extremes[kMaxCluster][2];
  int part_counts[kMaxCluster];
  int warp_values[33];
  float warp_extremes[32][2];
  int num_listed;
  int found, found_before;  // an interval or digit, and how many scores lie above it
  unsigned kth;
  int take_equal;
};

// Exclusive prefix sum over the block's threads; `total` is the sum. Ends in a barrier.
template <int kThreads>
__device__ __forceinline__ int block_prefix(int value, Shared& shared, int& total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kFullMask, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) shared.warp_values[warp] = inclusive;
  __syncthreads();
  int sum = lane < kThreads / 32 ? shared.warp_values[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(kFullMask, sum, step);
    if (lane >= step) sum += other;
  }
  total = __shfl_sync(kFullMask, sum, 31);
  const int before = __shfl_sync(kFullMask, sum, max(warp - 1, 0));
  return inclusive - value + (warp ? before : 0);
}

// Finds in the first `count` bins, summed over the cluster, the one from the top that holds the wanted score:
// shared.found, with shared.found_before scores above it.
template <int kThreads>
__device__ __forceinline__ void find_bin(Shared& shared, int count, int wanted, int parts) {
  // The last pass may still read them, and all of the cluster must have counted.
  if (parts > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr int kMost = kBins / kThreads < 1 ? 1 : kBins / kThreads;
  const int each = max(count / kThreads, 1);
  const int highest = count - 1 - static_cast<int>(threadIdx.x) * each;
  int values[kMost], sum = 0;
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    values[i] = 0;
    if (i < each && highest - i >= 0) {
      if (parts > 1) {
        const unsigned address = shared_address(&shared.bins[highest - i]);
        for (int part = 0; part < parts; ++part) {
          values[i] += __float_as_int(hopper::cluster_load(hopper::cluster_address(address, part)));
        }
      } else {
        values[i] = shared.bins[highest - i];
      }
    }
    sum += values[i];
  }
  int total;
  int before = block_prefix<kThreads>(sum, shared, total);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (before < wanted && before + values[i] >= wanted) {
      shared.found = highest - i;
      shared.found_before = before;
    }
    before += values[i];
  }
  // All have read the bins and the result is there.
  if (parts > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
}

template <int kThreads>
__device__ __forceinline__ void clear_bins(Shared& shared, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) shared.bins[i] = 0;
  __syncthreads();
}

// The k-th score by its bits, eight at a time: shared.kth, and shared.take_equal of its equals belong to the k.
template <int kThreads, typename Part>
__device__ __forceinline__ void radix_search(const Part& row, Shared& shared, int topk, int parts) {
  unsigned prefix = 0;
  int wanted = topk;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    clear_bins<kThreads>(shared, kDigits);
    row.each([&](int, const float (&v)[4], int count) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned key = ordered(v[i]);
        const bool match = i < count && (shift == 24 || key >> (shift + 8) == prefix);
        const unsigned digit = match ? (key >> shift) & 255u : kDigits;
        // Equal digits meet in one addition: many equal scores are why this search runs.
        const unsigned peers = __match_any_sync(kFullMask, digit);
        if (match && (threadIdx.x & 31) == __ffs(peers) - 1) atomicAdd(&shared.bins[digit], __popc(peers));
      }
    });
    find_bin<kThreads>(shared, kDigits, wanted, parts);
    prefix = prefix << 8 | static_cast<unsigned>(shared.found);
    wanted -= shared.found_before;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    shared.kth = prefix;
    shared.take_equal = wanted;
  }
  __syncthreads();
}

// The k-th score by intervals; false where they do not separate the scores.
template <int kThreads, typename Part>
__device__ __forceinline__ bool interval_search(const Part& row, Shared& shared, int topk, int part, int parts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // Non-finite scores make the range non-finite, or NaN, which no comparison accepts.
  float low = INFINITY, high = -INFINITY;
  bool ordinary = true;
  row.each([&](int, const float (&v)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) {
        low = fminf(low, v[i]);
        high = fmaxf(high, v[i]);
        ordinary &= v[i] == v[i];
      }
    }
  });
  if (!ordinary) high = INFINITY;
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    low = fminf(low, __shfl_xor_sync(kFullMask, low, step));
    high = fmaxf(high, __shfl_xor_sync(kFullMask, high, step));
  }
  if (lane == 0) {
    shared.warp_extremes[warp][0] = low;
    shared.warp_extremes[warp][1] = high;
  }
  if (threadIdx.x == 0) shared.num_listed = 0;
  clear_bins<kThreads>(shared, kBins);
  low = INFINITY, high = -INFINITY;
  if (lane < kThreads / 32) {
    low = shared.warp_extremes[lane][0];
    high = shared.warp_extremes[lane][1];
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    low = fminf(low, __shfl_xor_sync(kFullMask, low, step));
    high = fmaxf(high, __shfl_xor_sync(kFullMask, high, step));
  }
  if (parts > 1) {
    if (static_cast<int>(threadIdx.x) < parts) {
      const unsigned remote = hopper::cluster_address(shared_address(shared.extremes[part]), threadIdx.x);
      hopper::cluster_store(remote, __float_as_int(low));
      hopper::cluster_store(remote + 4, __float_as_int(high));
    }
    hopper::cluster_sync();
    for (int i = 0; i < parts; ++i) {
      low = fminf(low, shared.extremes[i][0]);
      high = fmaxf(high, shared.extremes[i][1]);
    }
  }
  const float per_unit = kBins / (high - low);
  if (!(per_unit > 0.0f && per_unit < INFINITY)) return false;  // the same everywhere in the cluster
  const auto interval = [&](float x) { return min(static_cast<int>((x - low) * per_unit), kBins - 1); };

  row.each([&](int, const float (&v)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) atomicAdd(&shared.bins[interval(v[i])], 1);
    }
  });
  find_bin<kThreads>(shared, kBins, topk, parts);
  const int chosen = shared.found, wanted = topk - shared.found_before;

  // List the chosen interval's scores, in a cluster in its first block.
  row.each([&](int id, const float (&v)[4], int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count && interval(v[i]) == chosen) {
        if (parts > 1) {
          const unsigned counter = hopper::cluster_address(shared_address(&shared.num_listed), 0);
          const int at = hopper::cluster_fetch_add(counter, 1);
          if (at < kListed) {
            const unsigned score = hopper::cluster_address(shared_address(&shared.listed_score[at]), 0);
            const unsigned where = hopper::cluster_address(shared_address(&shared.listed_id[at]), 0);
            hopper::cluster_store(score, static_cast<int>(ordered(v[i])));
            hopper::cluster_store(where, id + i);
          }
        } else {
          const int at = atomicAdd(&shared.num_listed, 1);
          if (at < kListed) {
            shared.listed_score[at] = ordered(v[i]);
            shared.listed_id[at] = id + i;
          }
        }
      }
    }
  });
  int listed;
  if (parts > 1) {
    hopper::cluster_sync();
    const auto from_first = [](const void* pointer) {
      return __float_as_int(hopper::cluster_load(hopper::cluster_address(shared_address(pointer), 0)));
    };
    listed = from_first(&shared.num_listed);
    if (listed <= kListed && part > 0) {
      for (int i = threadIdx.x; i < listed; i += kThreads) {
        shared.listed_score[i] = static_cast<unsigned>(from_first(&shared.listed_score[i]));
        shared.listed_id[i] = from_first(&shared.listed_id[i]);
      }
    }
    hopper::cluster_sync();  // the first block may go on only when all have read its list
  } else {
    __syncthreads();
    listed = shared.num_listed;
  }
  if (listed > kListed) return false;

  for (int i = threadIdx.x; i < listed; i += kThreads) {
    const unsigned score = shared.listed_score[i];
    const int id = shared.listed_id[i];
    int above = 0, equal_before = 0;
    for (int other = 0; other < listed; ++other) {
      const unsigned theirs = shared.listed_score[other];
      above += theirs > score;
      equal_before += theirs == score && shared.listed_id[other] < id;
    }
    if (above + equal_before == wanted - 1) {
      shared.kth = score;
      shared.take_equal = wanted - above;
    }
  }
  __syncthreads();
  return true;
}

template <int kThreads, bool kKeep>
__global__ void __launch_bounds__(kThreads, kThreads == 1024 ? 1 : 2) topk_kernel(const __grid_constant__ Params p, const int cluster) {
  __shared__ Shared shared;
  extern __shared__ __align__(16) float kept[];
  const int token = blockIdx.x / cluster, part = blockIdx.x % cluster;
  const int request = p.meta.request_of(token);
  const int visible =
      request < 0 ? 0
                  : static_cast<int>(min((p.meta.positions[token] + 1) >> kCsaShift, static_cast<int64_t>(p.width)));
  const int parts = visible > kAlone ? cluster : 1;
  if (part >= parts) return;
  int32_t* const out = p.out + static_cast<int64_t>(token) * p.topk;
  const auto stored = [&](int id) {
    return p.physical ? static_cast<int>(p.meta.entry_row(request, id, kCsaShift)) : id;
  };

  if (visible <= p.topk) {
    for (int i = threadIdx.x; i < p.topk; i += kThreads) out[i] = i < visible ? stored(i) : -1;
    return;
  }

  RowPart<kThreads, kKeep> row;
  // Parts of whole 512-byte steps keep every warp's loads aligned.
  const int share = ((visible + parts - 1) / parts + kStep - 1) / kStep * kStep;
  row.start(p.scores + token * p.stride, min(part * share, visible), min((part + 1) * share, visible), p.aligned,
            kept);
  if (!interval_search<kThreads>(row, shared, p.topk, part, parts)) {
    radix_search<kThreads>(row, shared, p.topk, parts);
  }
  const unsigned kth = shared.kth;
  const int take_equal = shared.take_equal;

  // Selected ids before each warp's piece: scores above the k-th in the low bits, its equals in the high ones.
  const int lane = threadIdx.x & 31;
  int counted = 0;
  const auto count_of = [&](const float (&v)[4], int count) {
    int packed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned key = ordered(v[i]);
      packed += i < count ? (key > kth ? 1 : key == kth ? 1 << kAboveBits : 0) : 0;
    }
    return packed;
  };
  row.each([&](int, const float (&v)[4], int count) { counted += count_of(v, count); });
  counted = __reduce_add_sync(kFullMask, counted);
  int total;
  int before = block_prefix<kThreads>(lane == 0 ? counted : 0, shared, total);
  before = __shfl_sync(kFullMask, before, 0);
  int above = before & kAboveMask, equal = equals_of(before);
  if (parts > 1) {
    if (static_cast<int>(threadIdx.x) < parts) {
      hopper::cluster_store(hopper::cluster_address(shared_address(&shared.part_counts[part]), threadIdx.x), total);
    }
    hopper::cluster_sync();
    for (int i = 0; i < part; ++i) {
      above += shared.part_counts[i] & kAboveMask;
      equal += equals_of(shared.part_counts[i]);
    }
  }
  row.each([&](int id, const float (&v)[4], int count) {
    const int packed = count_of(v, count);
    if (__any_sync(kFullMask, packed)) {
      int inclusive = packed;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_up_sync(kFullMask, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      const int mine = inclusive - packed, all = __shfl_sync(kFullMask, inclusive, 31);
      int my_above = above + (mine & kAboveMask), my_equal = equal + equals_of(mine);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned key = ordered(v[i]);
        if (i < count && key >= kth) {
          const bool is_equal = key == kth;
          const int at = my_above + min(my_equal, take_equal);
          if ((!is_equal || my_equal < take_equal) && at < p.topk) out[at] = stored(id + i);
          my_above += !is_equal;
          my_equal += is_equal;
        }
      }
      above += all & kAboveMask;
      equal += equals_of(all);
    }
  });
}

// What a block may keep besides its other shared memory, in scores.
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

// Scores that a block of `threads` keeps of rows that are cut into `cluster` parts: whole steps for each of its warps.
int kept_scores(int width, int cluster, int threads) {
  const int share = (width + cluster - 1) / cluster, whole = threads / 32 * kStep;
  return (share + whole - 1) / whole * whole;
}

template <int kThreads, bool kKeep>
void launch_topk(const TensorView& out, const Params& p, int cluster) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(p.meta.num_tokens) * cluster);
  shape.block = dim3(kThreads);
  shape.cluster = cluster;
  // A block that works alone keeps up to kAlone scores.
  const int alone = cluster > 1 ? kept_scores(kAlone, 1, kThreads) : 0;
  const int kept = kept_scores(p.width, cluster, kThreads);
  if (kKeep) shape.dynamic_smem = sizeof(float) * (kept > alone ? kept : alone);
  // Static and dynamic shared memory together may pass the default limit where the dynamic part alone does not.
  cuda_check(cudaFuncSetAttribute(topk_kernel<kThreads, kKeep>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.dynamic_smem)),
             "cudaFuncSetAttribute");
  launch(out, shape, topk_kernel<kThreads, kKeep>, p, cluster);
}

// `keep` false reads rows again in each pass whatever their length, as devices without clusters do with long ones.
void index_topk(TensorView scores, TensorView out, bool physical, bool keep, DSV4_META_PARAMS) {
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
  const int most = most_kept();
  int cluster = 1;  // rows of more than kAlone scores are worth a cluster while blocks are few
  while (cluster < kMaxCluster && (p.width + cluster - 1) / cluster > (p.meta.num_tokens > 64 ? 2 * kAlone : kAlone)) {
    cluster *= 2;
  }
  if (DSV4_ARCH != 90) cluster = 1;
  if (!keep || kept_scores(p.width, cluster, 1024) > most) {
    launch_topk<1024, false>(out, p, 1);
  } else if (p.width <= 8192 && p.meta.num_tokens > 2 * multiprocessors()) {
    launch_topk<256, true>(out, p, 1);
  } else {
    launch_topk<1024, true>(out, p, cluster);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_topk, index_topk);
