// How a decode step's requests are scored together; what the kernel that plans and the one that scores agree on. The
// figures are those of sglang_dsv4/ops/score_plan.py (a test compares them).
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kScoreTile = 64;       // keys of a tile
constexpr int kPlanRequests = 1024;  // requests of a plan
constexpr int kGroupMembers = 8;     // requests of a group; their images stand in shared memory together
constexpr int kLeastShared = 48;     // tiles below which a group is not worth the images of its members
constexpr int kLeastTiles = 1536;  // of a step, below which no requests are grouped: a block has too few to save on
constexpr int kKeyCost = 2;          // of a tile's keys, as a multiple of one more query's product with them

__host__ __device__ constexpr int tile_cost(int members) { return kKeyCost + members; }
__host__ __device__ constexpr int tiles_of(int entries) { return (entries + kScoreTile - 1) / kScoreTile; }

// Groups stand at their first member; the other requests have no cost of their own. A group's work is its shared tiles,
// each multiplied with all members, and behind them the tiles of its own that each member has left, member by member.
struct ScorePlan {
  const int32_t* cost_before;  // [requests + 1]
  const int32_t* shared;       // [requests] tiles
  const int32_t* members;      // [requests, kGroupMembers], ascending, -1 behind the last
};

}  // namespace dsv4
