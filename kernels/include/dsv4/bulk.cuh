// Bulk tensor copies: one instruction brings a box of a tensor into shared memory, an mbarrier counts its bytes. The
// bytes under way take no registers. Compute capability 9.0 and later; on others the bodies vanish.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "dsv4/check.h"

namespace dsv4 {
namespace bulk {

__device__ __forceinline__ unsigned address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// One thread; the fence makes the barrier known to the copy engine, a block barrier makes it known to other threads.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, unsigned arrivals) {
#if DSV4_ARCH >= 90
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void init_fence() {
#if DSV4_ARCH >= 90
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// The calling thread's arrival, which also announces the bytes of the phase.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, unsigned bytes) {
#if DSV4_ARCH >= 90
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Waits for the phase of this parity to complete.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
#if DSV4_ARCH >= 90
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Boxes that reach past the tensor are filled with zeros there; all their bytes count.
__device__ __forceinline__ void load_box(void* target, const CUtensorMap& map, int x, int y, int z, uint64_t* barrier) {
#if DSV4_ARCH >= 90
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(address(target)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(address(barrier))
      : "memory");
#endif
}

// Asks for a box to be brought into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int x, int y, int z) {
#if DSV4_ARCH >= 90
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(x), "r"(y), "r"(z)
               : "memory");
#endif
}

// A tensor of three dimensions, innermost first; strides of the outer two in bytes, multiples of 16.
inline CUtensorMap make_map(CUtensorMapDataType type, void* base, const uint64_t (&sizes)[3],
                            const uint64_t (&strides)[2], const uint32_t (&box)[3]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode encode = nullptr;  // every racing thread writes the same
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult answer;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &answer),
               "cuTensorMapEncodeTiled");
    if (found == nullptr) TVM_FFI_THROW(RuntimeError) << "the driver has no cuTensorMapEncodeTiled";
    encode = reinterpret_cast<Encode>(found);
  }
  const uint32_t steps[3] = {1, 1, 1};
  CUtensorMap map = {};
  const CUresult status =
      encode(&map, type, 3, base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled: error " << int{status};
  return map;
}

}  // namespace bulk
}  // namespace dsv4
