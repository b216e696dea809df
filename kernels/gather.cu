// Decodes what a prefill step attends to into dense rows; contract in sglang_dsv4/ops/gather.py.
//
// A warp takes a few consecutive workspace rows: two in a short step, where they are too few to fill the card, else four. Lane l holds channels 8 l .. 8 l + 7 of both halves of a row, so
// that each of its two stores covers 512 contiguous bytes with the rest of the warp.
#include "dsv4/check.h"
#include "dsv4/codecs.cuh"
#include "dsv4/grid.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

constexpr int kWarps = 8;
constexpr int64_t kShortRows = 16000;  // measured: below it two rows a warp are faster, above it four
constexpr int kHalf = kHeadDim / 2;
constexpr int kNopeHalfLanes = (kNopeDim - kHalf) / 8;  // lanes whose second octet is e4m3

enum Kind : int { kNone = 0, kStored = 1, kChunk = 2 };

// A row as loaded: two octets of e4m3 (the second of bf16 in the last lanes) and their scales, or the chunk's values.
template <typename T>
struct Raw;
template <>
struct Raw<__nv_bfloat16> {
  uint4 words[2];
};
template <>
struct Raw<float> {
  uint4 words[4];
};

template <typename T>
__device__ __forceinline__ void load_stored(Raw<T>& raw, unsigned& scales, const uint8_t* data, const uint8_t* scale,
                                            int lane) {
  const uint2 first = *reinterpret_cast<const uint2*>(data + 8 * lane);
  raw.words[0] = make_uint4(first.x, first.y, 0, 0);
  scales = scale[lane >> 3];
  if (lane < kNopeHalfLanes) {
    const uint2 second = *reinterpret_cast<const uint2*>(data + kHalf + 8 * lane);
    raw.words[1] = make_uint4(second.x, second.y, 0, 0);
    scales |= static_cast<unsigned>(scale[kHalf / kFp8Quant + (lane >> 3)]) << 8;
  } else {
    raw.words[1] = *reinterpret_cast<const uint4*>(data + kNopeDim + 16 * (lane - kNopeHalfLanes));
  }
}

__device__ __forceinline__ void load_chunk(Raw<__nv_bfloat16>& raw, const __nv_bfloat16* row, int lane) {
  raw.words[0] = *reinterpret_cast<const uint4*>(row + 8 * lane);
  raw.words[1] = *reinterpret_cast<const uint4*>(row + kHalf + 8 * lane);
}
__device__ __forceinline__ void load_chunk(Raw<float>& raw, const float* row, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    raw.words[i] = *reinterpret_cast<const uint4*>(row + (i / 2) * kHalf + 8 * lane + 4 * (i % 2));
  }
}

__device__ __forceinline__ void octet(const Raw<__nv_bfloat16>& raw, int half, float (&x)[8]) {
  const uint4 v = raw.words[half];
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_bf16(words[i]);
    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void octet(const Raw<float>& raw, int half, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = raw.words[2 * half + i];
    x[4 * i] = __uint_as_float(v.x), x[4 * i + 1] = __uint_as_float(v.y);
    x[4 * i + 2] = __uint_as_float(v.z), x[4 * i + 3] = __uint_as_float(v.w);
  }
}

__device__ __forceinline__ uint4 pack_octet(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Eight e4m3 codes and their scale to bf16, exact.
__device__ __forceinline__ uint4 decode_octet(unsigned low, unsigned high, unsigned scale_code) {
  const float scale = ue8m0_decode(scale_code);
  const float2 a = e4m3_decode2(low), b = e4m3_decode2(low >> 16);
  const float2 c = e4m3_decode2(high), d = e4m3_decode2(high >> 16);
  return make_uint4(pack_bf16(a.x * scale, a.y * scale), pack_bf16(b.x * scale, b.y * scale),
                    pack_bf16(c.x * scale, c.y * scale), pack_bf16(d.x * scale, d.y * scale));
}

// What the store would make of eight channels; eight lanes share a scale.
__device__ __forceinline__ uint4 round_octet(const float (&x)[8]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) amax = fmaxf(amax, __shfl_xor_sync(kFullMask, amax, step));
  const int code = fp8_scale_code(amax);
  const float inverse = ue8m0_inverse(code);
  const unsigned low = e4m3_encode4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
  const unsigned high = e4m3_encode4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse);
  return decode_octet(low, high, code);
}

struct Plan {
  const int64_t* offsets;      // first workspace row of each request
  const int64_t* num_entries;
  int64_t num_rows;
};

// Where workspace row `row` comes from: a stored row's data address, or a token of the step.
struct Source {
  int kind;
  int token;
  const uint8_t* data;
  const uint8_t* scale;
};

__device__ __forceinline__ Source source_of(const StepMeta& meta, const Plan& plan, const RowPool<MainFp8>& window,
                                            const RowPool<MainFp8>& entries, int ratio_shift, int64_t row, int request) {
  // All that one request decides is loaded at once: what follows depends on it.
  const int prefix = meta.prefix_lens[request], end = meta.seq_lens[request], slot = meta.slots[request];
  const int first_token = meta.token_offsets[request], last_token = meta.token_offsets[request + 1];
  const int64_t at = row - plan.offsets[request], num_entries = plan.num_entries[request];
  const int extent = end - prefix;
  const Source none = {kNone, 0, nullptr, nullptr};
  if (at < 0) return none;  // before the first request's rows
  if (at < kWindow) {
    const int64_t position = prefix - kWindow + at;
    const int64_t stored = int64_t{slot} * kWindow + position % kWindow;
    if (position < 0 || extent <= 0 || !window.contains(stored)) return none;
    return {kStored, 0, window.data(stored), window.scale(stored)};
  }
  if (at < kWindow + extent) {
    const int64_t token = first_token + (at - kWindow);
    if (token >= last_token || token >= meta.num_tokens) return none;
    return {kChunk, static_cast<int>(token), nullptr, nullptr};
  }
  const int64_t entry = at - kWindow - max(extent, 0);
  if (entry >= num_entries) return none;
  const int64_t stored = meta.entry_row(request, static_cast<int>(entry), ratio_shift);
  if (!entries.contains(stored)) return none;
  return {kStored, 0, entries.data(stored), entries.scale(stored)};
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kWarps * 32)
    gather_kernel(const __grid_constant__ StepMeta meta, const __grid_constant__ Plan plan,
                  __nv_bfloat16* __restrict__ workspace, const int64_t workspace_stride, const RowPool<MainFp8> window,
                  const T* __restrict__ kv, const int64_t kv_stride, const RowPool<MainFp8> entries,
                  const int ratio_shift) {
  grid_dependency_launch();
  grid_dependency_wait();
  const int lane = threadIdx.x & 31;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5)) * kRows;
  if (first >= plan.num_rows) return;

  // The request of the first row, by the whole warp; a request has 128 rows or more, so the others follow closely.
  int request = meta.num_requests == 1 ? 0 : -1;
  for (int base = 0; base < meta.num_requests && meta.num_requests > 1; base += 32) {
    const bool reached = base + lane < meta.num_requests && plan.offsets[base + lane] <= first;
    const unsigned ballot = __ballot_sync(kFullMask, reached);
    request += __popc(ballot);
    if (ballot != kFullMask) break;
  }
  if (request < 0) return;

  // Lane j finds where row j comes from; the warp then loads and stores row after row.
  Source mine = {kNone, 0, nullptr, nullptr};
  if (lane < kRows && first + lane < plan.num_rows) {
    const int64_t row = first + lane;
    while (request + 1 < meta.num_requests && plan.offsets[request + 1] <= row) ++request;
    mine = source_of(meta, plan, window, entries, ratio_shift, row, request);
  }
  Raw<T> raw[kRows];
  unsigned scales[kRows];
  int kinds[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    kinds[j] = __shfl_sync(kFullMask, mine.kind, j);
    const int token = __shfl_sync(kFullMask, mine.token, j);
    const uint64_t data = __shfl_sync(kFullMask, reinterpret_cast<uint64_t>(mine.data), j);
    const uint64_t scale = __shfl_sync(kFullMask, reinterpret_cast<uint64_t>(mine.scale), j);
    scales[j] = 0;
    if (kinds[j] == kStored) {
      load_stored(raw[j], scales[j], reinterpret_cast<const uint8_t*>(data), reinterpret_cast<const uint8_t*>(scale), lane);
    } else if (kinds[j] == kChunk) {
      load_chunk(raw[j], kv + token * kv_stride, lane);
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    if (kinds[j] == kNone) continue;
    uint4 out[2];
    const bool is_rope = lane >= kNopeHalfLanes;
    if (kinds[j] == kStored) {
      out[0] = decode_octet(raw[j].words[0].x, raw[j].words[0].y, scales[j] & 0xff);
      out[1] = is_rope ? raw[j].words[1] : decode_octet(raw[j].words[1].x, raw[j].words[1].y, scales[j] >> 8);
    } else {
      float x[8];
      octet(raw[j], 0, x);
      out[0] = round_octet(x);
      octet(raw[j], 1, x);
      const uint4 rounded = round_octet(x);
      out[1] = is_rope ? pack_octet(x) : rounded;
    }
    uint4* target = reinterpret_cast<uint4*>(workspace + (first + j) * workspace_stride);
    target[lane] = out[0];
    target[kHalf / 8 + lane] = out[1];
  }
}

void gather(TensorView workspace, TensorView window, TensorView kv, TensorView entries, TensorView offsets,
            TensorView num_entries, int64_t num_rows, int64_t ratio, DSV4_META_PARAMS) {
  const DeviceGuard guard(workspace);
  const StepMeta meta = DSV4_META;
  const Plan plan = {data_of<const int64_t>(offsets), data_of<const int64_t>(num_entries), num_rows};
  RowPool<MainFp8> entry_pool = make_pool<MainFp8>(entries);
  if (ratio == 0) entry_pool.num_rows = 0;  // the window stands in for the missing pool
  const int ratio_shift = ratio == kHcaRatio ? 7 : 2;
  LaunchShape shape;
  const int warp_rows = num_rows < kShortRows ? 2 : 4;
  const int64_t cta_rows = kWarps * warp_rows;
  shape.grid = dim3(static_cast<unsigned>((num_rows + cta_rows - 1) / cta_rows));
  shape.block = dim3(kWarps * 32);
  shape.overlap = true;
  const auto run = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto kernel = warp_rows == 2 ? gather_kernel<T, 2> : gather_kernel<T, 4>;
    launch(workspace, shape, kernel, meta, plan, data_of<__nv_bfloat16>(workspace), workspace.stride(0),
           make_pool<MainFp8>(window), data_of<const T>(kv), kv.stride(0), entry_pool, ratio_shift);
  };
  if (is_bf16(kv)) {
    run(static_cast<__nv_bfloat16*>(nullptr));
  } else {
    run(static_cast<float*>(nullptr));
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, gather);
