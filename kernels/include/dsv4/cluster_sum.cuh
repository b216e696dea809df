// A sum over a row's channels where several warps hold them, in one thread block or in those of a cluster.
//
// Every warp pushes its part into the shared memory of each block, where a barrier counts the bytes: nobody fences
// memory, and a block that has all parts may leave, for nothing will be written to it any more. Parts are added in one
// order, so every block gets the same bits.
#pragma once

#include <cstdint>

#include "dsv4/hopper.cuh"

namespace dsv4 {

// kParts warps of kBlocks blocks, warp w of block b being part b * (kParts / kBlocks) + w.
template <int kParts, int kBlocks>
struct ClusterSum {
  static constexpr int kWarps = kParts / kBlocks;
  static_assert(kParts % kBlocks == 0 && kBlocks <= 32);

  // Two rounds' parts: a block may push its next part while another still waits for the last of the round before, but
  // gets no further without it.
  alignas(16) float parts[2][kParts];
  uint64_t barriers[2];

  // All threads of all blocks call it first; it orders no memory but the barriers.
  __device__ __forceinline__ void open() {
#if DSV4_ARCH >= 90
    if constexpr (kBlocks > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[i])) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
      asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }

  // The first kWarps warps of every block call it, each with its part in all lanes; `round` counts the calls.
  __device__ __forceinline__ float sum(float own, int round) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, turn = round & 1;
    if constexpr (kBlocks > 1) {
      push(own, warp, lane, turn);
      wait(turn, (round >> 1) & 1);
    } else {
      if (lane == 0) parts[turn][warp] = own;
      named_barrier(1, 32 * kWarps);
    }
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) total = __fadd_rn(total, parts[turn][i]);
    return total;
  }

 private:
  // Lane l sends to block l.
  __device__ __forceinline__ void push(float own, int warp, int lane, int turn) {
#if DSV4_ARCH >= 90
    const unsigned barrier = shared_address(&barriers[turn]);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "n"(kParts * sizeof(float))
                   : "memory");
    }
    if (lane < kBlocks) {
      unsigned rank;
      asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
      asm volatile(
          "{\n"
          ".reg .b32 part, barrier;\n"
          "mapa.shared::cluster.u32 part, %0, %3;\n"
          "mapa.shared::cluster.u32 barrier, %1, %3;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [part], %2, [barrier];\n"
          "}" ::"r"(shared_address(&parts[turn][rank * kWarps + warp])),
          "r"(barrier), "f"(own), "r"(lane)
          : "memory");
    }
#endif
  }

  __device__ __forceinline__ void wait(int turn, int parity) {
#if DSV4_ARCH >= 90
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&barriers[turn])),
        "r"(parity)
        : "memory");
#endif
  }
};

}  // namespace dsv4
