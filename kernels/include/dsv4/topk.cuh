// What the kernels of index_topk share: their arguments, the order of scores, the range that a search halves.
#pragma once

#include "dsv4/meta.cuh"

namespace dsv4::topk {

constexpr int kList = 2048;  // survivors that a block lists
constexpr int kCsaShift = 2;
constexpr unsigned kLowest = 0x007fffffu, kZero = 0x80000000u;  // ordered(-inf), ordered(0)

struct Params {
  StepMeta meta;
  const float* scores;
  int32_t* out;
  const int32_t* first;  // [tokens], what is added to a token's ids, or null
  int64_t stride;
  int64_t out_stride;
  int width;
  int topk;
  bool physical;
  bool aligned;  // rows start at 16-byte addresses
};

// Order-preserving map of numbers to integers and back; both zeros are one value.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}
// -inf for NaN.
__device__ __forceinline__ float number(float x) { return fmaxf(x, -INFINITY); }

// What stands for entry `id` in a token's result; `first` is the token's.
__device__ __forceinline__ int stored_as(const Params& p, int request, int first, int id) {
  return p.physical ? static_cast<int>(p.meta.entry_row(request, id, kCsaShift)) : first + id;
}
__device__ __forceinline__ int first_of(const Params& p, int token) { return p.first != nullptr ? p.first[token] : 0; }

// What is sought lies in low .. high; at least `wanted` of what is counted reach `low`, `above` reach high + 1.
struct Range {
  unsigned low, high;
  int above = 0;

  __device__ __forceinline__ bool open() const { return low < high; }
  __device__ __forceinline__ unsigned middle() const { return low + ((high - low + 1) >> 1); }
  // `count` reach the middle. True where that is at least `wanted`.
  __device__ __forceinline__ bool halve(int count, int wanted) { return split(middle(), count, wanted); }
  // The same with another value in low + 1 .. high.
  __device__ __forceinline__ bool split(unsigned at, int count, int wanted) {
    if (count >= wanted) {
      low = at;
      return true;
    }
    high = at - 1;
    above = count;
    return false;
  }
};

__device__ __forceinline__ int visible_of(const Params& p, int token, int request) {
  // Loaded whatever the request is: two loads side by side instead of one after the other.
  const int entries = static_cast<int>(min((p.meta.positions[token] + 1) >> kCsaShift, static_cast<int64_t>(p.width)));
  return request < 0 ? 0 : entries;
}

// A row of no more than topk entries.
template <int kThreads>
__device__ __forceinline__ void select_all(const Params& p, int token, int request, int visible) {
  int32_t* const out = p.out + token * p.out_stride;
  const int base = first_of(p, token);
  for (int i = threadIdx.x; i < p.topk; i += kThreads) {
    out[i] = i < visible ? stored_as(p, request, base, i) : -1;
  }
}

}  // namespace dsv4::topk
