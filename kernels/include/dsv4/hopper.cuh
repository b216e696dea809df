// sm_90a instructions, as warpgroup matrix products, and those that came with it and stayed: mbarriers, bulk copies,
// clusters. On other targets the bodies vanish, so that every kernel compiles everywhere; the host never launches a
// Hopper kernel on another device.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSV4_HOPPER 1
#else
#define DSV4_HOPPER 0
#endif
// What stayed.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define DSV4_CLUSTERS 1
#else
#define DSV4_CLUSTERS 0
#endif

namespace dsv4 {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Named barrier of `threads` threads; id 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; true in all of them if `any` is in one.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool any) {
  unsigned found;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}"
      : "=r"(found)
      : "r"(id), "r"(threads), "r"(static_cast<int>(any))
      : "memory");
  return found;
}

namespace hopper {

// Makes shared memory written by ordinary stores visible to the tensor cores' own loads.
__device__ __forceinline__ void fence_async_shared() {
#if DSV4_HOPPER
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// ---- mbarriers ----

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, unsigned arrivals) {
#if DSV4_CLUSTERS
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

__device__ __forceinline__ void mbarrier_init_fence() {
#if DSV4_CLUSTERS
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Before its place is initialised again.
__device__ __forceinline__ void mbarrier_invalidate(uint64_t* barrier) {
#if DSV4_CLUSTERS
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, unsigned arrivals = 1) {
#if DSV4_CLUSTERS
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0], %1;\n}" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
#endif
}

// The same where the condition holds, without a branch; `barrier` is an address in shared memory.
__device__ __forceinline__ void mbarrier_arrive_if(unsigned barrier, bool condition) {
#if DSV4_CLUSTERS
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(barrier),
      "r"(static_cast<int>(condition))
      : "memory");
#endif
}

// Arrives and lets the phase also wait for this many bytes of bulk copies; `barrier` is an address in shared memory,
// here and in copies.
__device__ __forceinline__ void mbarrier_expect(unsigned barrier, unsigned bytes) {
#if DSV4_CLUSTERS
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// `bytes` from global to shared memory by the bulk copy engine; all of it in whole 16-byte units.
__device__ __forceinline__ void copy_bulk(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
#if DSV4_CLUSTERS
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// Asks for `bytes` of global memory, in whole 16-byte units, to be brought to L2: nothing waits for them.
__device__ __forceinline__ void prefetch_bulk(const void* global, unsigned bytes) {
#if DSV4_CLUSTERS
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Arrives when all copy_async16 that this thread has issued are complete.
__device__ __forceinline__ void mbarrier_arrive_copied(uint64_t* barrier) {
#if DSV4_CLUSTERS
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// True in one lane of a warp that has met. What stands behind it is known to run once: bulk copies take their operands
// from uniform registers, and otherwise the compiler loops over the lanes.
__device__ __forceinline__ bool elect_one() {
  unsigned elected = 0;
#if DSV4_CLUSTERS
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
#endif
  return elected;
}

// Waits for the phase of this parity to complete; of a new barrier the one before its first has the odd parity.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
#if DSV4_CLUSTERS
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

// ---- clusters ----

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if DSV4_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
#if DSV4_CLUSTERS
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The same where only initialised mbarriers are handed over (mbarrier_init_fence): it waits for no writes.
__device__ __forceinline__ void cluster_meet() {
#if DSV4_CLUSTERS
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Address in the shared memory of another block of the cluster.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned remote = 0;
#if DSV4_CLUSTERS
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

// To the shared memory of a block of the cluster, without waiting; its mbarrier counts the bytes that have arrived.
__device__ __forceinline__ void cluster_send(unsigned address, const uint4& v, unsigned barrier) {
#if DSV4_CLUSTERS
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void cluster_send(unsigned address, float2 v, unsigned barrier) {
#if DSV4_CLUSTERS
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(v.x), "f"(v.y), "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void cluster_send(unsigned address, float v, unsigned barrier) {
#if DSV4_CLUSTERS
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(v),
               "r"(barrier)
               : "memory");
#endif
}

__device__ __forceinline__ void cluster_store(unsigned address, int value) {
#if DSV4_CLUSTERS
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ void cluster_add(unsigned address, int value) {
#if DSV4_CLUSTERS
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

// ---- register budget of a warpgroup ----

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
#if DSV4_HOPPER
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
#if DSV4_HOPPER
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---- warpgroup matrix products ----
//
// Operands in shared memory are panels of 128-byte rows whose 16-byte units are XORed with row % 8, each panel aligned
// to 1024 bytes. A panel's rows are keys or heads; along a row run 64 bf16 or 128 e4m3 channels. Read "row-wise" (the
// product sums over channels) a descriptor steps 1024 bytes per 8 rows; read "column-wise" (it sums over rows) it also
// steps `panel_stride` bytes per 64 channels.
__device__ __forceinline__ uint64_t panel_descriptor(unsigned address, unsigned panel_stride = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (uint64_t{1024 >> 4} << 32) | (static_cast<uint64_t>(panel_stride >> 4) << 16) |
         static_cast<uint64_t>((address & 0x3ffffu) >> 4);
}

// The descriptor's half that holds the address, of which a step along shared memory is an addition (of its 16-byte
// units), and the whole of it.
__device__ __forceinline__ unsigned panel_start(unsigned address) {
  return static_cast<unsigned>(panel_descriptor(address));
}
__device__ __forceinline__ uint64_t panel_at(unsigned start) {
  return (panel_descriptor(0) & ~uint64_t{0xffffffffu}) | start;
}

// Byte offset of a 16-byte unit in a panel.
__device__ __forceinline__ unsigned panel_offset(unsigned row, unsigned unit) {
  return row * 128 + ((unit ^ (row & 7)) << 4);
}

__device__ __forceinline__ void wgmma_fence() {
#if DSV4_HOPPER
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if DSV4_HOPPER
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if DSV4_HOPPER
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Tells the compiler that a product in flight writes these registers, so that it moves no access across this point.
template <int kCount>
__device__ __forceinline__ void wgmma_registers(float (&d)[kCount]) {
#if DSV4_HOPPER
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

// Keeps operand registers apart: computed before the first product, so that no product waits for another's operand.
template <int kSteps>
__device__ __forceinline__ void wgmma_operands(unsigned (&a)[kSteps][4]) {
#if DSV4_HOPPER
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[s][i])::"memory");
  }
#endif
}

#define DSV4_D8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

// d[64 x 64] (+)= a[64 x 32] b[64 x 32]^T, e4m3, a in registers.
__device__ __forceinline__ void wgmma_e4m3_64x64x32(float (&d)[32], const unsigned (&a)[4], uint64_t b, bool add) {
#if DSV4_HOPPER
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1;\n"
      "}"
      : DSV4_D8(d, 0), DSV4_D8(d, 8), DSV4_D8(d, 16), DSV4_D8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
#endif
}

// d[64 x 32] (+)= a[64 x 16] b[32 x 16]^T, bf16, both in shared memory, both read row-wise.
__device__ __forceinline__ void wgmma_bf16_64x32x16(float (&d)[16], uint64_t a, uint64_t b, bool add) {
#if DSV4_HOPPER
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n"
      "}"
      : DSV4_D8(d, 0), DSV4_D8(d, 8)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}

// d[64 x 128] += a[64 x 16] b[16 x 128], bf16, both in shared memory, a read row-wise, b column-wise.
__device__ __forceinline__ void wgmma_bf16_64x128x16(float (&d)[64], uint64_t a, uint64_t b) {
#if DSV4_HOPPER
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 1;\n"
      : DSV4_D8(d, 0), DSV4_D8(d, 8), DSV4_D8(d, 16), DSV4_D8(d, 24), DSV4_D8(d, 32), DSV4_D8(d, 40), DSV4_D8(d, 48),
        DSV4_D8(d, 56)
      : "l"(a), "l"(b));
#endif
}

#undef DSV4_D8

}  // namespace hopper
}  // namespace dsv4
