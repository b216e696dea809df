// HCA compressor; contract in sglang_dsv4/ops/flush.py.
//
// An entry pools 128 rows of 512 channels, 512 KiB, and a step completes few of them: each is spread over kSlices CTAs
// that own 64 channels each and exchange only their sums of squares for the norm, through a thread block cluster.
// Without clusters (before compute capability 9.0) one CTA takes all channels.
//
// Units of work, kSlices CTAs each:
//   * the first few units share out the requests whose step completes a block begun before it: they pool that block
//     from tail and step, then keep the rows of the unfinished one, which lie where rows just read lay. Reading before
//     writing is what makes one CTA do both. In decode there is seldom such a request, so most find nothing;
//   * one unit per 128 tokens: the block that ends there if all its rows stand in the step, and the rows to keep of
//     all other requests, which no CTA reads.
//
// Steps of long chunks run the kernel with kBulk: whole blocks then come by bulk copies through a ring of shared memory,
// so that three quarters of all input are under way as soon as the blocks are known. Rows are dealt to threads and
// pooled in the same order either way: an entry has the same bits.
#include <cooperative_groups.h>

#include "dsv4/bulk.cuh"
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/compress.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kSlices = DSV4_ARCH >= 90 ? 8 : 1;
constexpr int kThreads = kSlices > 1 ? 128 : 512;
constexpr int kChannels = kHeadDim / kSlices;
constexpr int kLanes = kChannels / 4;            // threads that share a row
constexpr int kRowGroups = kThreads / kLanes;    // rows in flight side by side
constexpr int kThreadRows = kHcaRatio / kRowGroups;
constexpr int kBatch = kSlices > 1 ? 8 : 4;     // rows that a thread loads before it uses the first
constexpr int kRequestUnits = 32;                // at most; more would wait for a second wave at large batches
constexpr int kRatioShift = 7;
static_assert(kThreadRows % kBatch == 0 && kChannels <= kThreads && kThreads >= kHcaRatio);

// Compute capability 12 has 100 KB of shared memory a multiprocessor, too little for four rings.
constexpr bool kHasBulk = DSV4_ARCH >= 90 && DSV4_ARCH < 120;
constexpr int kBulkTokens = 64;  // tokens a request from which on whole blocks are the most of a step

// The ring: chunks of 32 rows, [row][C, Z][channel]. Four CTAs a multiprocessor hold 48 KB each.
constexpr int kChunkRows = 32;
constexpr int kChunks = kHcaRatio / kChunkRows;
constexpr int kChunkElements = kChunkRows * 2 * kChannels;
template <typename T>
constexpr int kStages = sizeof(T) == 4 ? 3 : kChunks;
constexpr int kRingAlign = 128;
template <typename T>
constexpr size_t kRingBytes = kStages<T> * kChunkElements * sizeof(T) + kRingAlign;

struct Shared {
  alignas(16) float max[kRowGroups][kChannels];
  alignas(16) float sum[kRowGroups][kChannels];
  alignas(16) float value[kRowGroups][kChannels];
  float squares[kChannels / 32];
  float slice_squares;
  float amax[kChannels / 32];
  int found;          // token that ends a block whose rows all stand in the step, its request and the block's start
  int found_request;
  int found_start;
  int num_resumed;
  int resumed[kThreads];
  int offsets[kHcaRatio];
  uint64_t arrived[kChunks];
};

// Where a row of the block lies: in the step from `first_token` on, or in the tail.
template <typename T>
struct Input {
  const T* x;         // at the thread's channels
  int64_t stride;
  const float* ape;   // at the thread's channels

  __device__ __forceinline__ Row4 row(int token, int offset) const {
    const T* source = x + token * stride;
    return {load4(source), add4(load4(source + kHeadDim), load4(ape + offset * kHeadDim))};
  }
};

// Sum of all slices' `own`, the same in every CTA of the unit. The caller ends with leave_slices(), before which no CTA
// may leave: the others read its shared memory.
__device__ __forceinline__ float sum_of_slices(Shared& shared, float own) {
#if DSV4_ARCH >= 90
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x == 0) shared.slice_squares = own;
  cluster.sync();
  float parts[kSlices], total = 0.0f;
#pragma unroll
  for (int rank = 0; rank < kSlices; ++rank) parts[rank] = *cluster.map_shared_rank(&shared.slice_squares, rank);
#pragma unroll
  for (int rank = 0; rank < kSlices; ++rank) total += parts[rank];
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  return total;
#else
  (void)shared;
  return own;
#endif
}

__device__ __forceinline__ void leave_slices() {
#if DSV4_ARCH >= 90
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Pools the thread's rows of the block, kBatch at a time. kResumed: tail rows serve the offsets below `kept`.
template <bool kResumed, typename T>
__device__ __forceinline__ void pool_block(const Input<T>& input, const float* tail, int kept, int base_token,
                                           Pooled (&pooled)[4]) {
  const int group = threadIdx.x / kLanes;
  const T* source = input.x + static_cast<int64_t>(base_token + group) * input.stride;
  const float* ape = input.ape + group * kHeadDim;
  const int64_t step = kRowGroups * input.stride;
#pragma unroll
  for (int batch = 0; batch < kThreadRows; batch += kBatch) {
    Row4 rows[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int offset = (batch + j) * kRowGroups + group;
      if (!kResumed || offset >= kept) {
        rows[j] = {load4(source), load4(source + kHeadDim)};
      } else {
        rows[j] = {load4(tail + offset * 2 * kHeadDim), load4(tail + offset * 2 * kHeadDim + kHeadDim)};
      }
      source += step;
    }
    // Behind a fence for the compiler: registers are for rows under way, ape waits in a cache.
    asm volatile("" ::: "memory");
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int offset = (batch + j) * kRowGroups + group;
      if (!kResumed || offset >= kept) rows[j].z = add4(rows[j].z, load4(ape + (batch + j) * kRowGroups * kHeadDim));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float c[kBatch], z[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) c[j] = component(rows[j].c, i), z[j] = component(rows[j].z, i);
      const Pooled part = pool_rows(c, z);
      pooled[i] = batch == 0 ? part : merge(pooled[i], part);
    }
  }
}

// A block's rows on their way into shared memory. Every stage has its barrier, used once or twice.
template <typename T>
struct Ring {
  const CUtensorMap& map;
  T* stages;
  uint64_t* arrived;

  // Thread 0 of the CTA.
  __device__ __forceinline__ void init() const {
    for (int stage = 0; stage < kStages<T>; ++stage) bulk::init_barrier(&arrived[stage], 1);
    bulk::init_fence();
  }
  __device__ __forceinline__ void start(int chunk, int slice, int base_token) const {
    const int stage = chunk % kStages<T>;
    bulk::arrive_expecting(&arrived[stage], kChunkElements * sizeof(T));
    bulk::load_box(stages + stage * kChunkElements, map, slice * kChannels, 0, base_token + chunk * kChunkRows,
                   &arrived[stage]);
  }
};

// The same as pool_block on rows that come through the ring; all threads of the CTA call it.
template <typename T>
__device__ __forceinline__ void pool_ring(const Ring<T>& ring, const float* channel_ape, int slice, int base_token,
                                          Pooled (&pooled)[4]) {
  constexpr int kChunkThreadRows = kChunkRows / kRowGroups;
  static_assert(!kHasBulk || kBatch % kChunkThreadRows == 0);
  const int group = threadIdx.x / kLanes, channel = 4 * (threadIdx.x % kLanes);
  const float* ape = channel_ape + group * kHeadDim;
#pragma unroll
  for (int batch = 0; batch < kThreadRows; batch += kBatch) {
    // On their way while the rows are.
    float4 bias[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) bias[j] = load4(ape + (batch + j) * kRowGroups * kHeadDim);
    Row4 rows[kBatch];
#pragma unroll
    for (int first = 0; first < kBatch; first += kChunkThreadRows) {
      const int chunk = (batch + first) / kChunkThreadRows, stage = chunk % kStages<T>;
      bulk::wait(&ring.arrived[stage], chunk / kStages<T> & 1);
      const T* source = ring.stages + stage * kChunkElements + group * 2 * kChannels + channel;
#pragma unroll
      for (int j = 0; j < kChunkThreadRows; ++j, source += kRowGroups * 2 * kChannels) {
        rows[first + j] = {load4(source), add4(load4(source + kChannels), bias[first + j])};
      }
      if (chunk + kStages<T> < kChunks) {
        __syncthreads();  // every thread has read the stage
        if (threadIdx.x == 0) ring.start(chunk + kStages<T>, slice, base_token);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float c[kBatch], z[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) c[j] = component(rows[j].c, i), z[j] = component(rows[j].z, i);
      const Pooled part = pool_rows(c, z);
      pooled[i] = batch == 0 ? part : merge(pooled[i], part);
    }
  }
}

// Stores the entry of the block that `pool` pools, four channels a thread. All threads of the unit call it.
template <typename Pool>
__device__ __forceinline__ void make_entry(Shared& shared, Pool&& pool, int slice, int64_t start, int64_t row,
                                           const Compressor& weights, const RowPool<MainFp8>& entries) {
  const int thread = threadIdx.x;
  const bool owns = thread < kChannels;  // a channel, once the rows are pooled
  const int warp = thread >> 5, lane = thread & 31;
  const int channel = slice * kChannels + thread;
  const bool is_rope = owns && channel >= kNopeDim;
  float norm = 0.0f;
  float2 turn = {};
  if (owns) norm = weights.weight(channel);
  if (is_rope) turn = rotation(weights, start, (channel - kNopeDim) >> 1);
  {
    Pooled pooled[4];
    pool(pooled);
    const int group = thread / kLanes, lane_channel = 4 * (thread % kLanes);
    store4(&shared.max[group][lane_channel], make_float4(pooled[0].max, pooled[1].max, pooled[2].max, pooled[3].max));
    store4(&shared.sum[group][lane_channel], make_float4(pooled[0].sum, pooled[1].sum, pooled[2].sum, pooled[3].sum));
    store4(&shared.value[group][lane_channel],
           make_float4(pooled[0].value, pooled[1].value, pooled[2].value, pooled[3].value));
  }
  __syncthreads();

  float x = 0.0f;
  if (owns) {
    float top = shared.max[0][thread], sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int g = 1; g < kRowGroups; ++g) top = fmaxf(top, shared.max[g][thread]);
#pragma unroll
    for (int g = 0; g < kRowGroups; ++g) {
      const float weight = exp2_fast(__fsub_rn(shared.max[g][thread], top));
      sum = fmaf(weight, shared.sum[g][thread], sum);
      value = fmaf(weight, shared.value[g][thread], value);
    }
    x = __fdividef(value, sum);
    const float squares = warp_sum(__fmul_rn(x, x));
    if (lane == 0) shared.squares[warp] = squares;
  }
  __syncthreads();
  float squares = 0.0f;
#pragma unroll
  for (int w = 0; w < kChannels / 32; ++w) squares += shared.squares[w];
  squares = sum_of_slices(shared, squares);

  if (owns) {
    const float scale = rsqrtf(fmaf(squares, 1.0f / kHeadDim, weights.eps));
    x = __fmul_rn(__fmul_rn(x, scale), norm);
    float amax = fabsf(x);
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
    if (lane == 0) shared.amax[warp] = amax;
  }
  __syncthreads();
  leave_slices();
  if (!owns || !entries.contains(row)) return;
  if (!is_rope) {
    const int code = fp8_scale_code(fmaxf(shared.amax[warp & ~1], shared.amax[warp | 1]));
    entries.data(row)[channel] = static_cast<uint8_t>(e4m3_encode2(x * ue8m0_inverse(code), 0.0f));
    if (channel % kFp8Quant == 0) entries.scale(row)[channel / kFp8Quant] = static_cast<uint8_t>(code);
  } else {
    const int rope_channel = channel - kNopeDim;
    const float other = __shfl_xor_sync(kFullMask, x, 1);
    float even = rope_channel & 1 ? other : x, odd = rope_channel & 1 ? x : other;
    rotate_pair(turn, even, odd);
    reinterpret_cast<__nv_bfloat16*>(entries.data(row) + kNopeDim)[rope_channel] =
        __float2bfloat16_rn(rope_channel & 1 ? odd : even);
    if (rope_channel == 0) entries.scale(row)[kNopeDim / kFp8Quant] = 0;
  }
}

// Whether a step completes a block whose first rows lie in the tail.
__device__ __forceinline__ bool resumes(const RequestSpan& span) {
  return span.prefix % kHcaRatio != 0 && span.prefix / kHcaRatio < span.end / kHcaRatio;
}

template <typename T>
struct Step {
  Input<T> input;
  const T* slice_x;  // at the slice's channels
  float* tail;  // at the thread's channels
  int64_t tail_stride;
  int64_t num_tail_rows;
  RowPool<MainFp8> entries;
};

// Requests first, first + stride, ...: the block begun before the step, then what the unfinished one keeps.
template <typename T>
__device__ __forceinline__ void resume_requests(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                                const Step<T>& step, int slice, int first, int stride) {
  const int thread = threadIdx.x;
  for (int begin = first; begin < meta.num_requests; begin += stride * kThreads) {
    if (thread == 0) shared.num_resumed = 0;
    __syncthreads();
    const int mine = begin + stride * thread;
    if (mine < meta.num_requests && resumes(request_span(meta, mine))) {
      shared.resumed[atomicAdd(&shared.num_resumed, 1)] = mine;
    }
    __syncthreads();
    const int count = shared.num_resumed;
    // The CTAs of a cluster meet in every entry, so all must take the requests in one order.
    if (count > 1 && thread == 0) {
      for (int i = 1; i < count; ++i) {
        const int request = shared.resumed[i];
        int j = i;
        for (; j > 0 && shared.resumed[j - 1] > request; --j) shared.resumed[j] = shared.resumed[j - 1];
        shared.resumed[j] = request;
      }
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const int request = shared.resumed[i];
      const RequestSpan span = request_span(meta, request);
      const int req_row = meta.req_rows[request];
      if (req_row < 0 || req_row >= step.num_tail_rows) continue;
      float* kept = step.tail + req_row * step.tail_stride;
      const int before = span.prefix / kHcaRatio, kept_rows = span.prefix % kHcaRatio;
      if (int64_t{kHcaRatio} * before >= weights.rope_positions) continue;
      const auto pool = [&](Pooled(&pooled)[4]) {
        pool_block<true>(step.input, kept, kept_rows, span.first_token - kept_rows, pooled);
      };
      make_entry(shared, pool, slice, int64_t{kHcaRatio} * before, meta.entry_row(request, before, kRatioShift), weights,
                 step.entries);
      __syncthreads();  // other threads read the rows that are now overwritten, and the scratch of the entry
      for (int position = kHcaRatio * (span.end / kHcaRatio) + thread / kLanes; position < span.end;
           position += kRowGroups) {
        const int offset = position % kHcaRatio;
        const Row4 row = step.input.row(span.first_token + position - span.prefix, offset);
        store4(kept + offset * 2 * kHeadDim, row.c);
        store4(kept + offset * 2 * kHeadDim + kHeadDim, row.z);
      }
    }
    __syncthreads();
  }
}

// Every token's row is loaded by this unit or a neighbour: asks for its tokens' before it is known by which.
template <typename T>
__device__ __forceinline__ void prefetch_tokens(const StepMeta& meta, const Step<T>& step, int first) {
  constexpr int kLine = 128, kLines = kChannels * sizeof(T) / kLine > 0 ? kChannels * sizeof(T) / kLine : 1;
  for (int i = threadIdx.x; i < 2 * kLines * kHcaRatio; i += kThreads) {
    const int token = first + i / (2 * kLines), part = i / kLines % 2, line = i % kLines;
    if (token >= meta.num_tokens) break;
    const T* row = step.slice_x + token * step.input.stride + part * kHeadDim;
    prefetch_l2(reinterpret_cast<const char*>(row) + line * kLine);
  }
}

// Tokens first .. first + 127: what the requests that resume nothing keep, and the block that ends there.
template <bool kBulk, typename T>
__device__ __forceinline__ void take_tokens(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                            const Step<T>& step, const Ring<T>& ring, bool ahead, int slice, int first) {
  const int thread = threadIdx.x;
  if constexpr (!kBulk) {
    prefetch_tokens(meta, step, first);
  } else if (thread == 0) {
    if (ahead) {
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        bulk::prefetch_box(ring.map, slice * kChannels, 0, first + chunk * kChunkRows);
      }
    }
    ring.init();
  }
  if (thread == 0) shared.found = -1;
  __syncthreads();
  // Which rows to keep is decided once per token; `resumed` carries the tail row, or -1 for none.
  if (thread < kHcaRatio) {
    const int token = first + thread;
    int kept_row = -1;
    const int request = token < meta.num_tokens ? meta.request_of(token) : -1;
    if (request >= 0) {
      const RequestSpan span = request_span(meta, request);
      const int position = static_cast<int>(meta.positions[token]);
      // Two such blocks end at least 128 tokens apart, so 128 tokens hold at most one.
      const int start = position - (kHcaRatio - 1);
      if ((position + 1) % kHcaRatio == 0 && start >= span.prefix && start < weights.rope_positions) {
        shared.found = token;
        shared.found_request = request;
        shared.found_start = start;
      }
      shared.offsets[thread] = position % kHcaRatio;
      const bool pending = position >= kHcaRatio * (span.end / kHcaRatio) && position < span.end;
      if (pending && !resumes(span)) kept_row = meta.req_rows[request];
      if (kept_row >= step.num_tail_rows) kept_row = -1;
    }
    shared.resumed[thread] = kept_row;
  }
  __syncthreads();
  const int found = shared.found, base_token = found - (kHcaRatio - 1);
  if constexpr (kBulk) {
    if (thread == 0 && found >= 0) {
      for (int chunk = 0; chunk < kStages<T>; ++chunk) ring.start(chunk, slice, base_token);
    }
  }
  // All loads of a batch go out before its first store: the compiler may not move them across.
  constexpr int kKept = 4;
  for (int begin = thread / kLanes; begin < kHcaRatio; begin += kKept * kRowGroups) {
    Row4 rows[kKept];
    int kept_rows[kKept];
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = begin + j * kRowGroups;
      kept_rows[j] = i < kHcaRatio ? shared.resumed[i] : -1;
      if (kept_rows[j] >= 0) rows[j] = step.input.row(first + i, shared.offsets[i]);
    }
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (kept_rows[j] < 0) continue;
      const int offset = shared.offsets[begin + j * kRowGroups];
      float* target = step.tail + kept_rows[j] * step.tail_stride + offset * 2 * kHeadDim;
      store4(target, rows[j].c);
      store4(target + kHeadDim, rows[j].z);
    }
  }
  if (found < 0) return;
  const auto pool = [&](Pooled(&pooled)[4]) {
    if constexpr (kBulk) {
      pool_ring(ring, step.input.ape, slice, base_token, pooled);
    } else {
      pool_block<false>(step.input, nullptr, 0, base_token, pooled);
    }
  };
  const int start = shared.found_start;
  make_entry(shared, pool, slice, start, meta.entry_row(shared.found_request, start >> kRatioShift, kRatioShift), weights,
             step.entries);
}

template <typename T, bool kBulk>
__global__ void __launch_bounds__(kThreads, kSlices > 1 ? 4 : 1)
    flush_hca_kernel(const __grid_constant__ StepMeta meta, const T* __restrict__ kv_score, const int64_t kv_stride,
                     const __grid_constant__ CUtensorMap map, const __grid_constant__ Compressor weights, float* tail,
                     const int64_t tail_stride, const int64_t num_tail_rows, const RowPool<MainFp8> entries,
                     const int request_units, const bool ahead) {
  __shared__ Shared shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const int unit = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  const int channel = slice * kChannels + 4 * (threadIdx.x % kLanes);
  const Step<T> step = {{kv_score + channel, kv_stride, weights.ape + channel},
                        kv_score + slice * kChannels, tail + channel, tail_stride, num_tail_rows, entries};
  T* stages = nullptr;
  if constexpr (kBulk) {
    extern __shared__ __align__(16) uint8_t ring_bytes[];
    stages = reinterpret_cast<T*>(ring_bytes + ((kRingAlign - (bulk::address(ring_bytes) & (kRingAlign - 1))) &
                                                (kRingAlign - 1)));
  }
  const Ring<T> ring = {map, stages, shared.arrived};
  if (unit < request_units) {
    resume_requests(shared, meta, weights, step, slice, unit, request_units);
  } else {
    take_tokens<kBulk>(shared, meta, weights, step, ring, ahead, slice, (unit - request_units) * kHcaRatio);
  }
}

// How whole blocks are read: kByShape lets the step's shape decide.
enum Variant : int64_t { kByShape = -1, kPlain = 0, kBulkAhead = 1, kBulkOnly = 2 };

template <typename T>
void launch_flush(const TensorView& kv_score, const Compressor& weights, const TensorView& tail,
                  const TensorView& entries, const StepMeta& meta, int64_t variant) {
  LaunchShape shape;
  const int request_units = meta.num_requests < kRequestUnits ? meta.num_requests : kRequestUnits;
  shape.grid = dim3((request_units + (meta.num_tokens + kHcaRatio - 1) / kHcaRatio) * kSlices);
  shape.block = dim3(kThreads);
  shape.cluster = kSlices;
  shape.overlap = true;
  if (variant == kByShape) {
    const bool long_chunks =
        meta.num_tokens >= kHcaRatio && meta.num_tokens >= int64_t{kBulkTokens} * meta.num_requests;
    variant = long_chunks ? kBulkAhead : kPlain;
  }
  auto kernel = flush_hca_kernel<T, false>;
  CUtensorMap map = {};
  if constexpr (kHasBulk) {
    if (variant != kPlain && meta.num_tokens > 0) {
      kernel = flush_hca_kernel<T, true>;
      shape.dynamic_smem = kRingBytes<T>;
      cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 "cudaFuncSetAttribute");
      const uint64_t sizes[3] = {kHeadDim, 2, static_cast<uint64_t>(meta.num_tokens)};
      const uint64_t strides[2] = {kHeadDim * sizeof(T), kv_score.stride(0) * sizeof(T)};
      const uint32_t box[3] = {kChannels, 2, kChunkRows};
      map = bulk::make_map(sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           kv_score.data_ptr(), sizes, strides, box);
    }
  }
  launch(kv_score, shape, kernel, meta, data_of<const T>(kv_score), kv_score.stride(0), map, weights,
         data_of<float>(tail), tail.stride(0), tail.size(0), make_pool<MainFp8>(entries), request_units,
         variant == kBulkAhead);
}

void flush_hca(TensorView kv_score, TensorView ape, TensorView norm, TensorView rope, double eps, TensorView tail,
               TensorView entries, int64_t variant, DSV4_META_PARAMS) {
  const DeviceGuard guard(kv_score);
  const StepMeta meta = DSV4_META;
  const Compressor weights = make_compressor(ape, norm, rope, eps);
  if (is_bf16(kv_score)) {
    launch_flush<__nv_bfloat16>(kv_score, weights, tail, entries, meta, variant);
  } else {
    launch_flush<float>(kv_score, weights, tail, entries, meta, variant);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flush_hca, flush_hca);
