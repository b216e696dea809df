// Sums over the lanes of a warp. All 32 lanes call what stands here.
#pragma once

namespace dsv4 {

constexpr unsigned kFullMask = 0xffffffffu;

// Sum of the lanes up to this one, with kLanes of the last kLanes; the order of the additions is fixed.
template <int kLanes = 32, typename T>
__device__ __forceinline__ T inclusive_sum(T value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance <<= 1) {
    const T other = __shfl_up_sync(kFullMask, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

}  // namespace dsv4
