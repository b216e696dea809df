// Few instructions where the compiler takes twice as many: comparisons that count, load, store or vote without a branch.
// Addresses that are numbers are of shared memory.
#pragma once

#include "dsv4/warp.cuh"

namespace dsv4 {

// 1 where x >= bound, else 0; of NaN 0. A sum of these keeps to the units that add numbers.
__device__ __forceinline__ float reaches(float x, float bound) {
  float one;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(bound));
  return one;
}

// Stores `value` and moves on where x >= bound.
template <typename T>
__device__ __forceinline__ void store_if_reaches(unsigned& address, T value, float x, float bound) {
  static_assert(sizeof(T) == 4);
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ge.f32 p, %2, %3;\n"
      "@p st.shared.b32 [%0], %1;\n"
      "@p add.u32 %0, %0, 4;\n"
      "}"
      : "+r"(address)
      : "r"(*reinterpret_cast<unsigned*>(&value)), "f"(x), "f"(bound)
      : "memory");
}

__device__ __forceinline__ void add_unless_zero(unsigned address, int value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "@p red.shared.add.u32 [%0], %1;\n"
      "}" ::"r"(address),
      "r"(value)
      : "memory");
}

// Loads 16 bytes where the condition holds, here and not where they are first used.
__device__ __forceinline__ void load_here_if(float4& v, const float4* source, bool condition) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
      : "l"(source), "r"(static_cast<int>(condition)));
}

// The same from kOffset bytes further on; a choice between a load and something else would wait for the load. Volatile: the
// assembler keeps it among the stores (store_shared16), and does not leave it for last.
template <int kOffset>
__device__ __forceinline__ void load16_if(uint4& v, const void* pointer, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4 + %6];\n"
      "}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(pointer), "r"(static_cast<int>(valid)), "n"(kOffset));
}
__device__ __forceinline__ void load8_if(uint2& v, const void* pointer, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p ld.volatile.global.v2.u32 {%0, %1}, [%2];\n"
      "}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(pointer), "r"(static_cast<int>(valid)));
}
__device__ __forceinline__ void load4_if(unsigned& v, const void* pointer, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p ld.volatile.global.u32 %0, [%1];\n"
      "}"
      : "+r"(v)
      : "l"(pointer), "r"(static_cast<int>(valid)));
}

// Lanes in whose value this bit is set.
template <int kBit>
__device__ __forceinline__ unsigned ballot_bit(unsigned value) {
  unsigned lanes;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 masked;\n"
      "and.b32 masked, %1, %2;\n"
      "setp.ne.u32 p, masked, 0;\n"
      "vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      "}"
      : "=r"(lanes)
      : "r"(value), "n"(1 << kBit));
  return lanes;
}

}  // namespace dsv4
