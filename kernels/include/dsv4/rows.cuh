// Where a stored row lives. Rows come in groups of 64: 64 data rows, then 64 scale rows, then padding to the stride.
// The figures are those of sglang_dsv4/geometry.py (tests/kernels/test_layouts.py compares them).
#pragma once

#include <cstdint>

namespace dsv4 {

constexpr int kWindow = 128;    // tokens a ring keeps
constexpr int kHeadDim = 512;   // channels of a window token or an entry
constexpr int kRopeDim = 64;    // the last channels, rotated and stored as bf16
constexpr int kNopeDim = kHeadDim - kRopeDim;
constexpr int kIndexDim = 128;  // channels of an indexer key
constexpr int kCsaRatio = 4;
constexpr int kHcaRatio = 128;
constexpr int kGroupRows = 64;
constexpr int kFp8Quant = 64;  // channels per scale of a main row
constexpr int kFp4Quant = 32;  // channels per scale of an MXFP4 key

struct MainFp8 {
  static constexpr int kWidth = kHeadDim;
  static constexpr int kDataBytes = kNopeDim + 2 * kRopeDim;
  static constexpr int kScaleBytes = 8;  // 7 ue8m0 and a zero byte
};

struct IndexFp4 {
  static constexpr int kWidth = kIndexDim;
  static constexpr int kDataBytes = kIndexDim / 2;
  static constexpr int kScaleBytes = 4;  // 4 ue8m0
};

struct IndexFp8 {
  static constexpr int kWidth = kIndexDim;
  static constexpr int kDataBytes = kIndexDim;
  static constexpr int kScaleBytes = 4;  // one float32
};

// A pool of rows: uint8 [groups, stride]. Offsets are 64 bits wide: a pool passes 2^32 bytes.
template <typename Layout>
struct RowPool {
  uint8_t* base;
  int64_t group_stride;  // bytes
  int64_t num_rows;

  __device__ __forceinline__ bool contains(int64_t row) const { return row >= 0 && row < num_rows; }
  __device__ __forceinline__ uint8_t* data(int64_t row) const {
    return base + (row / kGroupRows) * group_stride + (row % kGroupRows) * Layout::kDataBytes;
  }
  __device__ __forceinline__ uint8_t* scale(int64_t row) const {
    return base + (row / kGroupRows) * group_stride + kGroupRows * Layout::kDataBytes +
           (row % kGroupRows) * Layout::kScaleBytes;
  }
};

}  // namespace dsv4
