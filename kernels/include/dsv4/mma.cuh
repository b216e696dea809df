// What every tensor core since sm_80 has: bf16 products of a warp, their loads from shared memory, asynchronous copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "dsv4/hopper.cuh"

namespace dsv4 {

// Four 8 x 8 bf16 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same way back, since compute capability 9.0.
__device__ __forceinline__ void store_matrices(unsigned address, const unsigned (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane l holds of d: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same in half precision.
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// max(x, 0) of two floats as half precision numbers, the first one low.
__device__ __forceinline__ unsigned pack_relu_f16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two floats as half precision numbers, the first one low, and back.
__device__ __forceinline__ unsigned pack_f16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 unpack_f16(unsigned pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }

// 16 bytes from global to shared memory without registers; `valid` false writes zeros and reads nothing.
__device__ __forceinline__ void copy_async16(unsigned shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async4(unsigned shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(unsigned address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
// Volatile: it keeps its place among such loads (load16_if in predicated.cuh).
__device__ __forceinline__ void store_shared16(unsigned address, const uint4& v) {
  asm volatile("st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ unsigned load_shared4(unsigned address) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ unsigned load_shared1(unsigned address) {
  unsigned v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Loads of data that is read once: past the first-level cache.
__device__ __forceinline__ uint4 load_once16(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer));
  return v;
}
__device__ __forceinline__ unsigned load_once4(const void* pointer) {
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}

__device__ __forceinline__ unsigned load_once1(const void* pointer) {
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(pointer));
  return v;
}

__device__ __forceinline__ unsigned multiply_bf16(unsigned pair, unsigned factor) {
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<const unsigned*>(&product);
}

// The bf16 2^exponent twice; the exponent stays within -126 .. 127.
__device__ __forceinline__ unsigned power_bf16(int exponent) {
  return static_cast<unsigned>(exponent + 127) * 0x00800080u;
}

// Bytes 0, 1 (kHigh: 2, 3) of a word of e4m3 codes as two bf16, each 2^-120 of its value: the exponent fields differ
// only in their bias, and subnormal codes become subnormal numbers, which a later product restores exactly. A byte
// beside copies of its sign bit is shifted so that sign and code meet their places; the rest is masked.
template <bool kHigh>
__device__ __forceinline__ unsigned e4m3_as_bf16(unsigned word) {
  unsigned spread;  // bit 3 of a selector copies the byte's sign, which __byte_perm does not promise
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(word), "n"(kHigh ? 0xb3a2 : 0x9180));
  return (spread << 4) & 0x87f087f0u;
}
constexpr int kE4m3Shift = 120;

}  // namespace dsv4
