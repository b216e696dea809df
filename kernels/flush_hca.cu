// HCA compressor; contract in sglang_dsv4/ops/flush.py.
//
// An entry pools 128 rows of 512 channels, 512 KiB, and a step completes few of them: each is spread over kSlices CTAs
// that own 64 channels each and exchange only their sums of squares for the norm, through a thread block cluster.
// Without clusters (before compute capability 9.0) one CTA takes all channels.
//
// Units of work, kSlices CTAs each:
//   * the first units share out the requests whose step completes a block begun before it: they pool that block
//     from tail and step, then keep the rows of the unfinished one, which lie where rows just read lay. Reading before
//     writing is what makes one CTA do both. In decode there is seldom such a request, so most find nothing;
//   * one unit per 128 tokens: the block that ends there if all its rows stand in the step, and the rows to keep of
//     all other requests, which no CTA reads.
//
// A CTA of the second kind asks for rows of its 128 tokens before it knows whose they are: in a long prompt they are
// its block, in decode the rows to keep. The step's metadata arrives behind them.
#include <type_traits>

#include "dsv4/check.h"
#include "dsv4/cluster_sum.cuh"
#include "dsv4/codecs.cuh"
#include "dsv4/compress.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"
#include "dsv4/mma.cuh"

namespace {

using namespace dsv4;

constexpr int kSlices = DSV4_ARCH >= 90 ? 8 : 1;
constexpr int kThreads = kSlices > 1 ? 1024 / kSlices : 512;
// The 64 units of 8,192 tokens and those of their requests must run at once. With four CTAs of 128 threads a
// multiprocessor an H200 holds 62 clusters of eight, not 66: the last three would start when others end.
constexpr int kResident = kSlices > 1 ? 640 / kThreads : 1;
constexpr int kChannels = kHeadDim / kSlices;
constexpr int kLanes = kChannels / 4;            // threads that share a row
constexpr int kRowGroups = kThreads / kLanes;    // rows in flight side by side
constexpr int kThreadRows = kHcaRatio / kRowGroups;
constexpr int kHeld = 8;                         // rows that a thread asks for first
constexpr int kUnderWay = 6;                     // and that it waits for later, when pooling takes registers too
constexpr int kBatch = 2;                        // rows that a thread pools at once
constexpr int kFinishers = kChannels / 2;        // threads that own two channels each of the pooled row
constexpr int kRequestUnits = 64;                // at most; more would wait for a second wave at large batches
constexpr int kRatioShift = 7;
static_assert(kHeld % kBatch == 0 && kUnderWay % kBatch == 0 && kUnderWay <= kHeld &&
              kThreadRows % kHeld == 0 && kThreads >= kHcaRatio && kFinishers % 32 == 0);

constexpr int kSector = 8;  // floats
constexpr int kTouches = kSlices > 1 ? kHcaRatio * kChannels / kSector / kThreads : 1;  // of ape, by a thread

// Which of the rows side by side is the thread's.
__device__ __forceinline__ int row_group() { return static_cast<int>(threadIdx.x / kLanes); }

struct Shared {
  alignas(16) float max[kRowGroups][kChannels];
  alignas(16) float sum[kRowGroups][kChannels];
  alignas(16) float value[kRowGroups][kChannels];
  ClusterSum<kHeadDim / 64, kSlices> squares;
  // Of each of 128 tokens: where in the tail its row is kept (in floats), or -1, and its offset in its block.
  int64_t targets[kHcaRatio];
  int offsets[kHcaRatio];
  // The token of these that ends a block of the step, or -1, and that block.
  int end;
  int end_request;
  int end_block;
  int touched[kTouches][kThreads];  // what touch_ape() copies
};

// C and Z of four channels of one token, as loaded: bfloat16 pairs lie in x and y.
struct Held {
  float4 c;
  float4 z;
};

// Rows are read once: they pass the L1 cache by, so that ape stays in it. The assembler may move these loads, but not
// across __syncwarp(), as it may constant ones: left alone it puts off half of them to save registers.
__device__ __forceinline__ float4 fetch(const float* source) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(source)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 fetch8(const void* source) {
  float2 v;
  asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(source) : "memory");
  return v;
}
__device__ __forceinline__ float4 fetch(const __nv_bfloat16* source) {
  const float2 v = fetch8(source);
  return make_float4(v.x, v.y, 0.0f, 0.0f);
}
// The same for a row that may lie in the tail instead. One load for both places, at an address that depends: of two,
// only one of which is made, the registers would be taken from the kernel's start.
__device__ __forceinline__ Held fetch_either(bool in_tail, const float* kept, const float* source) {
  const float* row = in_tail ? kept : source;
  return {fetch(row), fetch(row + kHeadDim)};
}
__device__ __forceinline__ Held fetch_either(bool in_tail, const float* kept, const __nv_bfloat16* source) {
  const void* row = in_tail ? static_cast<const void*>(kept) : source;
  const void* scores = in_tail ? static_cast<const void*>(kept + kHeadDim) : source + kHeadDim;
  const int more = in_tail ? 8 : 0;  // the bytes of float32 behind those of bfloat16
  const auto both = [more](const void* at) {
    const float2 low = fetch8(at), high = fetch8(static_cast<const char*>(at) + more);
    return make_float4(low.x, low.y, high.x, high.y);
  };
  return {both(row), both(scores)};
}

template <typename T>
__device__ __forceinline__ float4 widen(float4 held) {
  if constexpr (std::is_same_v<T, float>) {
    return held;
  } else {
    const float2 low = unpack_bf16(__float_as_uint(held.x)), high = unpack_bf16(__float_as_uint(held.y));
    return make_float4(low.x, low.y, high.x, high.y);
  }
}

template <typename T>
struct Step {
  const T* x;
  const float* ape;
  float* tail;
  int channel;  // first of the thread's four
  int64_t stride;
  int64_t tail_stride;
  int64_t num_tail_rows;
  RowPool<MainFp8> entries;
};

// A thread's rows of 128 consecutive tokens, of which `tokens` exist: 0, 1, ... in that order.
template <typename T>
struct Window {
  static constexpr int kFirst = kHeld;
  const T* x;  // at the thread's next row
  int64_t stride;
  int tokens;

  __device__ __forceinline__ Window(const Step<T>& step, int first, int end)
      : x(step.x + step.channel + (first + row_group()) * step.stride),
        stride(kRowGroups * step.stride),
        tokens(end - first - row_group()) {}

  __device__ __forceinline__ void load(Held& held, int) {
    held = {fetch(x), fetch(x + kHeadDim)};
    x += stride;
  }
  __device__ __forceinline__ void load_if_any(Held& held, int row) {
    if (row * kRowGroups < tokens) held = {fetch(x), fetch(x + kHeadDim)};
    x += stride;
  }
  // Asks for the next rows, which stand at `row`.
  __device__ __forceinline__ void prefetch(int row) const {
#pragma unroll 1
    for (int j = 0; j < kHeld && row + j < kThreadRows && (row + j) * kRowGroups < tokens; ++j) {
      prefetch_l2(x + j * stride);
      prefetch_l2(x + j * stride + kHeadDim);
    }
  }
  // C and Z, once `held` has arrived, and what is still to be added to Z.
  __device__ __forceinline__ Row4 values(const Held& held, int) const { return {widen<T>(held.c), widen<T>(held.z)}; }
  __device__ __forceinline__ float4 addend(const float* ape, int) const { return load4(ape); }
};

// A thread's rows of a block whose first `kept` rows lie in the tail, ape added; in order likewise.
template <typename T>
struct Resumed {
  static constexpr int kFirst = kUnderWay;
  const T* x;  // at the thread's next row, were it in the step
  const float* tail;
  int64_t stride;
  int kept;

  __device__ __forceinline__ Resumed(const Step<T>& step, const float* tail, int kept, int first_token)
      : x(step.x + step.channel + (first_token - kept + row_group()) * step.stride),
        tail(tail + row_group() * (2 * kHeadDim)),
        stride(kRowGroups * step.stride),
        kept(kept - row_group()) {}

  __device__ __forceinline__ bool stands(int row) const { return row * kRowGroups < kept; }
  __device__ __forceinline__ void load(Held& held, int row) {
    held = fetch_either(stands(row), tail + row * (kRowGroups * 2 * kHeadDim), x);
    x += stride;
  }
  __device__ __forceinline__ Row4 values(const Held& held, int row) const {
    return stands(row) ? Row4{held.c, held.z} : Row4{widen<T>(held.c), widen<T>(held.z)};
  }
  __device__ __forceinline__ float4 addend(const float* ape, int row) const {
    return stands(row) ? make_float4(-0.0f, -0.0f, -0.0f, -0.0f) : load4(ape);  // x + -0 is x, whatever x
  }
};

// Waits for the copies of this thread's touch_ape().
__device__ __forceinline__ void await_touches() {
  copy_async_commit();
  copy_async_wait<0>();
}

// Brings the slice of ape, from offset `kept` on, to the L1 cache, where its CTAs on this multiprocessor share it: a
// word per sector is copied and never read, for which no register has to wait. Without slices it would not fit.
template <typename T>
__device__ __forceinline__ void touch_ape(Shared& shared, const Step<T>& step, int kept) {
  constexpr int kRowSectors = kChannels / kSector;
  constexpr int kRows = kThreads / kRowSectors;                  // touched at once
  if constexpr (kSlices > 1) {
    const int row = static_cast<int>(threadIdx.x / kRowSectors);
    const int slice_channel = step.channel - static_cast<int>(4 * (threadIdx.x % kLanes));
    const int channel = slice_channel + static_cast<int>(kSector * (threadIdx.x % kRowSectors));
    const float* source = step.ape + channel + row * kHeadDim;
    await_touches();  // a request before this one copied to the same words
#pragma unroll
    for (int i = 0; i < kTouches; ++i) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "setp.ge.s32 p, %2, %3;\n"
          "@p cp.async.ca.shared.global [%0], [%1], 4;\n"
          "}" ::"r"(shared_address(&shared.touched[i][threadIdx.x])),
          "l"(source + i * kRows * kHeadDim), "r"(row + i * kRows), "r"(kept)
          : "memory");
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_tokens(Window<T>& rows, Held (&held)[kHeld]) {
#pragma unroll
  for (int j = 0; j < kHeld; ++j) rows.load_if_any(held[j], j);
}
template <typename Rows>
__device__ __forceinline__ void load_first(Rows& rows, Held (&held)[kHeld]) {
#pragma unroll
  for (int j = 0; j < Rows::kFirst; ++j) rows.load(held[j], j);
}

// Pools the thread's rows of a block. The first are under way in `held`; rows that are pooled make room for others.
template <typename Rows>
__device__ __forceinline__ void pool_block(Rows& rows, const float* ape, Held (&held)[kHeld],
                                           Pooled (&pooled)[4]) {
  ape += row_group() * kHeadDim;
#pragma unroll
  for (int row = 0; row < kThreadRows; row += kBatch) {
    Row4 batch[kBatch];
    __syncwarp();  // registers are for rows under way, the rest of ape waits in a cache
#pragma unroll
    for (int j = 0; j < kBatch; ++j) batch[j].z = rows.addend(ape + (row + j) * kRowGroups * kHeadDim, row + j);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const Row4 arrived = rows.values(held[(row + j) % kHeld], row + j);
      batch[j] = {arrived.c, add4(arrived.z, batch[j].z)};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float c[kBatch], z[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) c[j] = component(batch[j].c, i), z[j] = component(batch[j].z, i);
      if (row == 0) {
        pooled[i] = pool_rows(c, z);
      } else {
        pool_more(pooled[i], c, z);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int next = row + j + kUnderWay;
      if (next >= Rows::kFirst && next < kThreadRows) rows.load(held[next % kHeld], next);
    }
  }
}

// What the end of an entry needs besides the pooled row: asked for before that is complete.
struct Ending {
  int page;
  uint2 norm;
  float2 turn;
};

__device__ __forceinline__ Ending load_ending(const StepMeta& meta, const Compressor& weights, int request, int block,
                                              int channel) {
  Ending ending = {};
  ending.page = meta.entry_page(request, block, kRatioShift);
  ending.norm = weights.weight2_words(channel);
  if (channel >= kNopeDim) ending.turn = rotation(weights, int64_t{kHcaRatio} * block, (channel - kNopeDim) >> 1);
  return ending;
}

// The pooled values of two channels of the slice, from those of all row groups.
__device__ __forceinline__ float2 merge_groups(const Shared& shared, int channel) {
  const auto at = [channel](const float (&row)[kChannels]) { return *reinterpret_cast<const float2*>(&row[channel]); };
  float2 top = at(shared.max[0]), sum = {}, value = {};
#pragma unroll
  for (int g = 1; g < kRowGroups; ++g) {
    const float2 max = at(shared.max[g]);
    top = make_float2(fmaxf(top.x, max.x), fmaxf(top.y, max.y));
  }
#pragma unroll
  for (int g = 0; g < kRowGroups; ++g) {
    const float2 max = at(shared.max[g]), group_sum = at(shared.sum[g]), group_value = at(shared.value[g]);
    const float2 weight = make_float2(exp2_fast(__fsub_rn(max.x, top.x)), exp2_fast(__fsub_rn(max.y, top.y)));
    sum = make_float2(fmaf(weight.x, group_sum.x, sum.x), fmaf(weight.y, group_sum.y, sum.y));
    value = make_float2(fmaf(weight.x, group_value.x, value.x), fmaf(weight.y, group_value.y, value.y));
  }
  return make_float2(__fdividef(value.x, sum.x), __fdividef(value.y, sum.y));
}

// Stores two channels of a normalised row; a warp holds the 64 that share a scale, or the rotated ones.
__device__ __forceinline__ void store_pair(const RowPool<MainFp8>& entries, int64_t row, int channel, float2 x,
                                           float2 turn) {
  if (!entries.contains(row)) return;
  uint8_t* data = entries.data(row);
  if (channel < kNopeDim) {
    // Of values that are not negative the bits are ordered as they are.
    const unsigned amax = __reduce_max_sync(kFullMask, __float_as_uint(fmaxf(fabsf(x.x), fabsf(x.y))));
    const int code = fp8_scale_code(__uint_as_float(amax));
    const float inverse = ue8m0_inverse(code);
    *reinterpret_cast<uint16_t*>(data + channel) = static_cast<uint16_t>(e4m3_encode2(x.x * inverse, x.y * inverse));
    if (channel % kFp8Quant == 0) entries.scale(row)[channel / kFp8Quant] = static_cast<uint8_t>(code);
  } else {
    rotate_pair(turn, x.x, x.y);
    reinterpret_cast<unsigned*>(data + kNopeDim)[(channel - kNopeDim) >> 1] = pack_bf16(x.x, x.y);
    if (channel == kNopeDim) entries.scale(row)[kNopeDim / kFp8Quant] = 0;
  }
}

// Pools one block, of which load_first() has asked for the first rows, and stores its entry. All threads of the unit
// call it; `round` counts the entries of the unit. The scratch is free again behind the next __syncthreads().
template <typename Rows>
__device__ __forceinline__ void make_entry(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                           const RowPool<MainFp8>& entries, Rows& rows, const float* ape,
                                           Held (&held)[kHeld], int slice, int request, int block, int round) {
  const int thread = threadIdx.x;
  const int channel = slice * kChannels + 2 * thread;
  Pooled pooled[4];
  pool_block(rows, ape, held, pooled);
  Ending ending = {};
  if (thread < kFinishers) ending = load_ending(meta, weights, request, block, channel);
  const int group = row_group(), column = 4 * (threadIdx.x % kLanes);
  store4(&shared.max[group][column], make_float4(pooled[0].max, pooled[1].max, pooled[2].max, pooled[3].max));
  store4(&shared.sum[group][column], make_float4(pooled[0].sum, pooled[1].sum, pooled[2].sum, pooled[3].sum));
  store4(&shared.value[group][column],
         make_float4(pooled[0].value, pooled[1].value, pooled[2].value, pooled[3].value));
  __syncthreads();
  if (thread >= kFinishers) return;
  float2 x = merge_groups(shared, 2 * thread);
  const float own = warp_sum(__fadd_rn(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y)));
  const float squares = shared.squares.sum(own, round);
  const float scale = rsqrtf(fmaf(squares, 1.0f / kHeadDim, weights.eps));
  const float2 norm = weights.weight2(ending.norm);
  x = make_float2(__fmul_rn(__fmul_rn(x.x, scale), norm.x), __fmul_rn(__fmul_rn(x.y, scale), norm.y));
  store_pair(entries, meta.row_of_page(ending.page, block, kRatioShift), channel, x, ending.turn);
}

// Keeps those of the window's `count` rows that `shared` names; load_tokens() has asked for the first of them.
template <typename T>
__device__ __forceinline__ void keep_rows(const Shared& shared, const Step<T>& step, Window<T> rows, int count,
                                          Held (&held)[kHeld]) {
  constexpr int kPart = 4;
  const int group = row_group();
#pragma unroll 1
  for (int begin = 0; begin < kThreadRows && begin * kRowGroups < count; begin += kHeld) {
    const int64_t* targets = &shared.targets[begin * kRowGroups + group];
    const int* offsets = &shared.offsets[begin * kRowGroups + group];
    if (begin > 0) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) rows.load_if_any(held[j], begin + j);
    }
    rows.prefetch(begin + kHeld);
    // C first, to make room for ape.
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t target = targets[j * kRowGroups];
      if (target >= 0) store4(step.tail + step.channel + target, rows.values(held[j], 0).c);
    }
#pragma unroll
    for (int part = 0; part < kHeld; part += kPart) {
      float4 ape[kPart];
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        ape[j] = load4(step.ape + step.channel + offsets[(part + j) * kRowGroups] * kHeadDim);
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int64_t target = targets[(part + j) * kRowGroups];
        float* kept = step.tail + step.channel + target;
        if (target >= 0) store4(kept + kHeadDim, add4(rows.values(held[part + j], 0).z, ape[j]));
      }
    }
  }
}

// Where the tail row of a request keeps an offset of the unfinished block.
template <typename T>
__device__ __forceinline__ int64_t kept_at(const Step<T>& step, int tail_row, int offset) {
  return tail_row * step.tail_stride + offset * (2 * kHeadDim);
}

// Whether a step completes a block whose first rows lie in the tail.
__device__ __forceinline__ bool resumes(const RequestSpan& span) {
  return span.prefix % kHcaRatio != 0 && span.prefix / kHcaRatio < span.end / kHcaRatio;
}

// Whether the step completes a block that stands in the tail of a request.
template <typename T>
__device__ __forceinline__ bool is_due(const StepMeta& meta, const Compressor& weights, const Step<T>& step,
                                       int request) {
  if (request >= meta.num_requests) return false;
  const RequestSpan span = request_span(meta, request);
  const int tail_row = meta.req_rows[request];
  return tail_row >= 0 && tail_row < step.num_tail_rows && resumes(span) &&
         span.prefix - span.prefix % kHcaRatio < weights.rope_positions;
}

// A request that is due: its block from tail and step, then what the unfinished one keeps.
template <typename T>
__device__ __forceinline__ void resume_request(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                               const Step<T>& step, int slice, int request, int round) {
  const RequestSpan span = request_span(meta, request);
  const int tail_row = meta.req_rows[request];
  const int block = span.prefix / kHcaRatio, kept = span.prefix % kHcaRatio;
  Held held[kHeld];
  Resumed<T> rows(step, step.tail + step.channel + kept_at(step, tail_row, 0), kept, span.first_token);
  load_first(rows, held);
  touch_ape(shared, step, kept);
  const int pending = span.end % kHcaRatio, thread = threadIdx.x;
  if (thread < kHcaRatio) {
    shared.targets[thread] = thread < pending ? kept_at(step, tail_row, thread) : -1;
    shared.offsets[thread] = thread;
  }
  make_entry(shared, meta, weights, step.entries, rows, step.ape + step.channel, held, slice, request, block, round);
  __syncthreads();  // other threads read the rows that are now overwritten, and the scratch of the entry
  if (pending == 0) return;
  const int end = span.first_token + span.end - span.prefix;
  Window<T> window(step, end - pending, end);
  load_tokens(window, held);
  keep_rows(shared, step, window, pending, held);
  __syncthreads();
}

// Requests first, first + stride, ...: those that are due. The CTAs of a cluster meet in every entry, so all must take
// them in one order: every warp looks at the same 32 requests, one a lane.
template <typename T>
__device__ __forceinline__ void resume_requests(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                                const Step<T>& step, int slice, int first, int stride) {
  int round = 0;
  for (int begin = first; begin < meta.num_requests; begin += 32 * stride) {
    const bool due = is_due(meta, weights, step, begin + stride * static_cast<int>(threadIdx.x % 32));
    for (unsigned left = __ballot_sync(kFullMask, due); left != 0; left &= left - 1) {
      resume_request(shared, meta, weights, step, slice, begin + stride * (__ffs(left) - 1), round++);
    }
  }
}

// What each of 128 tokens is to this unit; true in all threads where a row of them is to be kept. Request and position
// are those loaded, a padded token's included.
template <typename T>
__device__ __forceinline__ bool look_at_tokens(Shared& shared, const StepMeta& meta, const Step<T>& step, int request,
                                               int position) {
  const int thread = threadIdx.x, offset = position & (kHcaRatio - 1);
  int64_t target = -1;
  if (request >= 0 && request < meta.num_requests) {
    const RequestSpan span = request_span(meta, request);
    const int tail_row = meta.req_rows[request];
    // Two such blocks end at least 128 tokens apart, so 128 tokens hold at most one.
    if (offset == kHcaRatio - 1 && position - (kHcaRatio - 1) >= span.prefix) {
      shared.end = thread, shared.end_request = request, shared.end_block = position / kHcaRatio;
    }
    const bool pending = position >= kHcaRatio * (span.end / kHcaRatio) && position < span.end;
    if (pending && !resumes(span) && tail_row >= 0 && tail_row < step.num_tail_rows) {
      target = kept_at(step, tail_row, offset);
    }
  }
  if (thread < kHcaRatio) {
    shared.targets[thread] = target;
    shared.offsets[thread] = offset;
  }
  return __syncthreads_or(target >= 0);
}

// Tokens first .. first + 127: what the requests that resume nothing keep, and the block that ends there.
template <typename T>
__device__ __forceinline__ void take_tokens(Shared& shared, const StepMeta& meta, const Compressor& weights,
                                            const Step<T>& step, int slice, int first) {
  const int thread = threadIdx.x, token = first + thread;
  int request = -1, position = 0;
  if (thread < kHcaRatio && token < meta.num_tokens) {
    request = meta.token_to_req[token];
    position = static_cast<int>(meta.positions[token]);
  }
  Window<T> window(step, first, meta.num_tokens);
  Held held[kHeld];
  load_tokens(window, held);
  touch_ape(shared, step, first + kHcaRatio <= meta.num_tokens ? 0 : kHcaRatio);
  const bool keeps = look_at_tokens(shared, meta, step, request, position);
  if (keeps) keep_rows(shared, step, window, meta.num_tokens - first, held);
  const int end = shared.end, block = shared.end_block;
  if (end < 0 || int64_t{kHcaRatio} * block >= weights.rope_positions) return;
  // The rows of a block that fills the 128 tokens are under way: it leaves none to keep.
  if (keeps || end != kHcaRatio - 1) {
    window = Window<T>(step, first + end - (kHcaRatio - 1), meta.num_tokens);
    load_first(window, held);
  }
  make_entry(shared, meta, weights, step.entries, window, step.ape + step.channel, held, slice, shared.end_request,
             block, 0);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kResident)
    flush_hca_kernel(const __grid_constant__ StepMeta meta, const T* __restrict__ kv_score, const int64_t kv_stride,
                     const __grid_constant__ Compressor weights, float* tail, const int64_t tail_stride,
                     const int64_t num_tail_rows, const RowPool<MainFp8> entries, const int request_units) {
  __shared__ Shared shared;
  grid_dependency_launch();
  if (threadIdx.x == 0) shared.end = -1;
  shared.squares.open();
  __syncthreads();
  grid_dependency_wait();
  const int unit = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  const int channel = slice * kChannels + 4 * (threadIdx.x % kLanes);
  const Step<T> step = {kv_score, weights.ape, tail, channel, kv_stride, tail_stride, num_tail_rows, entries};
  if (unit < request_units) {
    resume_requests(shared, meta, weights, step, slice, unit, request_units);
  } else {
    take_tokens(shared, meta, weights, step, slice, (unit - request_units) * kHcaRatio);
  }
  await_touches();
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
