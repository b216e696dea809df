// Host side of the two attention operations.
#pragma once

#include "dsv4/attention_hopper.cuh"
#include "dsv4/attention_portable.cuh"
#include "dsv4/check.h"

namespace dsv4 {

template <typename Rows>
void fill_attention(AttentionParams<Rows>& p, const TensorView& q, const TensorView& sink, const TensorView& rope,
                    const TensorView& positions, const TensorView& out, const TensorView& partial,
                    const TensorView& partial_stat, double scale) {
  p.q = data_of<const __nv_bfloat16>(q);
  p.q_stride = q.stride(0);
  p.out = data_of<__nv_bfloat16>(out);
  p.sink = data_of<const float>(sink);
  p.rope = data_of<const float>(rope);
  p.rope_rows = rope.size(0);
  p.positions = data_of<const int64_t>(positions);
  p.partial = data_of<float>(partial);
  p.partial_stat = data_of<float2>(partial_stat);
  p.num_tokens = static_cast<int>(q.size(0));
  p.heads = static_cast<int>(q.size(1));
  p.scale = static_cast<float>(scale) * kLog2e;
}

inline int shared_limit() {
  static int limits[64] = {};
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  int& limit = limits[device & 63];
  if (limit == 0) {
    cuda_check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
  }
  return limit;
}

template <int kHeads, typename Rows>
void launch_portable(const TensorView& anchor, const AttentionParams<Rows>& p, int splits) {
  LaunchShape shape;
  shape.grid = dim3(p.num_tokens, (p.heads + kHeads - 1) / kHeads, splits);
  shape.block = dim3(portable::kThreads);
  shape.dynamic_smem = portable::shared_bytes<kHeads>();
  launch(anchor, shape, portable::attention_kernel<kHeads, Rows>, p);
}

inline LaunchShape hopper_shape(int tokens, int heads, int parts, int splits) {
  LaunchShape shape;
  shape.grid = dim3(tokens * parts, (heads + hopper::kBlockHeads - 1) / hopper::kBlockHeads, splits);
  shape.block = dim3(hopper::kAttentionThreads);
  shape.dynamic_smem = hopper::kAttentionShared;
  shape.cluster = parts;
  shape.overlap = true;
  return shape;
}

// parts > 0: the Hopper kernel with clusters of `parts` blocks, 1, 2, 4 or 8, `splits` clusters a query. parts = 0: the
// portable one.
template <typename Rows>
void launch_attention(const TensorView& anchor, const AttentionParams<Rows>& p, int parts, int splits) {
  if (p.num_tokens == 0 || p.heads == 0) return;
  if (parts > 0 && DSV4_ARCH == 90) {
    int bits = 0;
    while ((1 << bits) < parts) ++bits;
    launch(anchor, hopper_shape(p.num_tokens, p.heads, parts, splits), hopper::attention_kernel<Rows>, p, bits);
  } else if (p.heads <= 16) {
    launch_portable<16>(anchor, p, splits);
  } else if (p.heads <= 32 || shared_limit() < static_cast<int>(portable::shared_bytes<64>())) {
    launch_portable<32>(anchor, p, splits);
  } else {
    launch_portable<64>(anchor, p, splits);
  }
  if (splits > 1) {
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>((int64_t{p.num_tokens} * p.heads + 3) / 4));
    shape.block = dim3(128);
    launch(anchor, shape, combine_kernel<Rows>, p, splits);
  }
}

}  // namespace dsv4
