// What the parts of the Hopper attention kernel share: shared memory, and where a consumer thread stands in it.
#pragma once

#include "dsv4/attention.cuh"

namespace dsv4 {
namespace hopper {

constexpr int kBlockHeads = 64;
constexpr int kAttentionThreads = 512;
constexpr int kConsumerRegisters = 176, kProducerRegisters = 80;  // 4 x 128 in all
constexpr int kStages = 2;                       // tiles in shared memory
constexpr int kHalfRows = kTileRows / 2;         // of a tile: a producer's, and a consumer's to score
constexpr int kHeadPanel = kBlockHeads * 128;    // bytes: 64 heads x 64 channels or rows of bf16
constexpr int kRowPanel = kHalfRows * 128;       // bytes: 32 rows x 64 channels of bf16
constexpr int kPanels = kHeadDim / 64;
constexpr int kHalf = kPanels * kRowPanel;       // 32 rows x 512 channels
constexpr float kRaise = 8.0f;                   // base-2 growth of a maximum that is let pass
constexpr int kShareHeads = 8;                   // of the heads that a block of a cluster finishes
constexpr int kShareBytes = kShareHeads * kHeadDim * 2;  // half precision
constexpr int kMaxSlots = 7;                     // shares that a block receives: 4 of 1 other, 2 of 3, 1 of 7

struct AttentionShared {
  uint8_t q[kPanels * kHeadPanel];  // [panel][head]; later the output
  uint8_t rows[kStages][2][kHalf];  // [stage][half of the tile][panel][row]; later shares of other blocks
  uint8_t p[kStages][kHeadPanel];   // [stage][head], probabilities of a tile's rows
  float maximum[2][kBlockHeads];
  float sum[2][kBlockHeads];
  float2 stats[kMaxSlots][kShareHeads];  // maxima and sums of other blocks
  float units[kMaxSlots][2][32];         // what a lane's share of them is in
  float sink[kBlockHeads], rope[kRopeDim];
  unsigned valid[kStages][2][4];  // [stage][half][producer warp], bit 4 r: its row r exists
  uint64_t full[kStages][2], empty[kStages], received;
  int last;
};
constexpr int kAttentionShared = sizeof(AttentionShared) + 1024;
static_assert(kAttentionShared <= 227 * 1024 && kMaxSlots * kShareBytes <= kStages * 2 * kHalf);

// Where a consumer thread stands: which half of a tile it scores, and of the channels it accumulates.
struct ConsumerThread {
  int group, warp, lane, head;  // the first of its two heads; the other one is 8 more

  __device__ __forceinline__ ConsumerThread(int group_of, int warp_of, int lane_of)
      : group(group_of), warp(warp_of), lane(lane_of), head(16 * warp_of + (lane_of >> 2)) {}
  __device__ __forceinline__ static void all_meet() { named_barrier(1, 256); }
  __device__ __forceinline__ static bool any(bool condition) { return named_barrier_or(1, 256, condition); }
};

struct ConsumerState {
  // Heads 16 warp + lane / 4 and 8 more, channels 256 group + 128 half + 8 j + 2 (lane % 4) and the next. (Two products
  // of 128 channels: one of 256 would need more registers than a thread starts with.)
  float o[2][64];
  float maximum[2];  // of the two heads, base 2
  float sum[2];      // over this thread's columns

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int j = 0; j < 128; ++j) o[j >> 6][j & 63] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 128; ++j) o[j >> 6][j & 63] *= factor[(j >> 1) & 1];
  }
  // Four of head 8 i further on: 0 <= k < 16.
  __device__ __forceinline__ float& value(int i, int k, int c) {
    return o[k >> 3][4 * (2 * (k & 7) + (c >> 1)) + 2 * i + (c & 1)];
  }
};

}  // namespace hopper
}  // namespace dsv4
