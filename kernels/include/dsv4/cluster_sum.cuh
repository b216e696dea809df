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
    if constexpr (kBlocks > 1) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) hopper::mbarrier_init(&barriers[i], 1);
        hopper::mbarrier_init_fence();
      }
      __syncwarp();
      hopper::cluster_meet();
    }
  }

  // The first kWarps warps of every block call it, each with its part in all lanes; `round` counts the calls.
  __device__ __forceinline__ float sum(float own, int round) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, turn = round & 1;
    if constexpr (kBlocks > 1) {
      push(own, warp, lane, turn);
      hopper::mbarrier_wait(&barriers[turn], (round >> 1) & 1);
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
    const unsigned barrier = shared_address(&barriers[turn]);
    if (threadIdx.x == 0) hopper::mbarrier_expect(barrier, kParts * sizeof(float));
    if (lane < kBlocks) {
      const unsigned part = shared_address(&parts[turn][hopper::cluster_rank() * kWarps + warp]);
      hopper::cluster_send(hopper::cluster_address(part, lane), own, hopper::cluster_address(barrier, lane));
    }
  }
};

}  // namespace dsv4
