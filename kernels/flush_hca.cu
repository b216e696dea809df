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
#include <cooperative_groups.h>

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

struct Shared {
  alignas(16) float max[kRowGroups][kChannels];
  alignas(16) float sum[kRowGroups][kChannels];
  alignas(16) float value[kRowGroups][kChannels];
  float squares[kChannels / 32];
  float slice_squares;
  float amax[kChannels / 32];
  int found;
  int num_resumed;
  int resumed[kThreads];
  int offsets[kHcaRatio];
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

// Pools one block and stores its entry. All threads of the unit call it.
template <bool kResumed, typename T>
__device__ __forceinline__ void make_entry(Shared& shared, const Input<T>& input, const float* tail, int kept,
                                           int base_token, int slice, int64_t start, int64_t row,
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
    pool_block<kResumed>(input, tail, kept, base_token, pooled);
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
      make_entry<true>(shared, step.input, kept, kept_rows, span.first_token - kept_rows, slice, int64_t{kHcaRatio} * before,
                 meta.entry_row(request, before, kRatioShift), weights, step.entries);
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

// Tokens first .. first + 127: what the requests that resume nothing keep, and the block that ends there.
template <typename T>
__device__ __forceinline__ void take_tokens(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                            const Step<T>& step, int slice, int first) {
  const int thread = threadIdx.x;
  // Every token's row is loaded by this unit or a neighbour: ask for it before it is known by which.
  constexpr int kLine = 128, kLines = kChannels * sizeof(T) / kLine > 0 ? kChannels * sizeof(T) / kLine : 1;
  for (int i = thread; i < 2 * kLines * kHcaRatio; i += kThreads) {
    const int token = first + i / (2 * kLines), part = i / kLines % 2, line = i % kLines;
    if (token >= meta.num_tokens) break;
    const T* row = step.slice_x + token * step.input.stride + part * kHeadDim;
    prefetch_l2(reinterpret_cast<const char*>(row) + line * kLine);
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
      if ((position + 1) % kHcaRatio == 0 && position - (kHcaRatio - 1) >= span.prefix) shared.found = token;
      shared.offsets[thread] = position % kHcaRatio;
      const bool pending = position >= kHcaRatio * (span.end / kHcaRatio) && position < span.end;
      if (pending && !resumes(span)) kept_row = meta.req_rows[request];
      if (kept_row >= step.num_tail_rows) kept_row = -1;
    }
    shared.resumed[thread] = kept_row;
  }
  __syncthreads();
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
  const int found = shared.found;
  if (found < 0) return;
  const int request = meta.request_of(found);
  const int block = static_cast<int>(meta.positions[found]) / kHcaRatio;
  if (int64_t{kHcaRatio} * block >= weights.rope_positions) return;
  make_entry<false>(shared, step.input, nullptr, 0, found - (kHcaRatio - 1), slice, int64_t{kHcaRatio} * block,
             meta.entry_row(request, block, kRatioShift), weights, step.entries);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kSlices > 1 ? 4 : 1)
    flush_hca_kernel(const __grid_constant__ StepMeta meta, const T* __restrict__ kv_score, const int64_t kv_stride,
                     const __grid_constant__ Compressor weights, float* tail, const int64_t tail_stride,
                     const int64_t num_tail_rows, const RowPool<MainFp8> entries, const int request_units) {
  __shared__ Shared shared;
  grid_dependency_launch();
  grid_dependency_wait();
  const int unit = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  const int channel = slice * kChannels + 4 * (threadIdx.x % kLanes);
  const Step<T> step = {{kv_score + channel, kv_stride, weights.ape + channel},
                        kv_score + slice * kChannels, tail + channel, tail_stride, num_tail_rows, entries};
  if (unit < request_units) {
    resume_requests(shared, meta, weights, step, slice, unit, request_units);
  } else {
    take_tokens(shared, meta, weights, step, slice, (unit - request_units) * kHcaRatio);
  }
}

template <typename T>
void launch_flush(const TensorView& kv_score, const Compressor& weights, const TensorView& tail,
                  const TensorView& entries, const StepMeta& meta) {
  LaunchShape shape;
  const int request_units = meta.num_requests < kRequestUnits ? meta.num_requests : kRequestUnits;
  shape.grid = dim3((request_units + (meta.num_tokens + kHcaRatio - 1) / kHcaRatio) * kSlices);
  shape.block = dim3(kThreads);
  shape.cluster = kSlices;
  shape.overlap = true;
  launch(kv_score, shape, flush_hca_kernel<T>, meta, data_of<const T>(kv_score), kv_score.stride(0), weights,
         data_of<float>(tail), tail.stride(0), tail.size(0), make_pool<MainFp8>(entries), request_units);
}

void flush_hca(TensorView kv_score, TensorView ape, TensorView norm, TensorView rope, double eps, TensorView tail,
               TensorView entries, DSV4_META_PARAMS) {
  const DeviceGuard guard(kv_score);
  const StepMeta meta = DSV4_META;
  const Compressor weights = make_compressor(ape, norm, rope, eps);
  if (is_bf16(kv_score)) {
    launch_flush<__nv_bfloat16>(kv_score, weights, tail, entries, meta);
  } else {
    launch_flush<float>(kv_score, weights, tail, entries, meta);
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flush_hca, flush_hca);
