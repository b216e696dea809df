// Attention of a prefill step over the dense workspace; contract in sglang_dsv4/ops/sparse_prefill.py.
#include "dsv4/check.h"
#include "dsv4/attention_launch.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

// `hopper` takes the Hopper kernel; both take one block a query and group of heads.
void sparse_prefill(TensorView q, TensorView workspace, TensorView indices, TensorView sink, TensorView rope,
                    TensorView positions, TensorView out, double scale, bool hopper) {
  const DeviceGuard guard(q);
  AttentionParams<DenseRows> p = {};
  p.rows.workspace = data_of<const __nv_bfloat16>(workspace);
  p.rows.row_stride = workspace.stride(0);
  p.rows.num_rows = static_cast<int>(workspace.size(0));
  p.rows.indices = data_of<const int32_t>(indices);
  p.rows.index_stride = indices.stride(0);
  p.rows.num_columns = static_cast<int>(indices.size(1));
  fill_attention(p, q, sink, rope, positions, out, out, out, scale);
  launch_attention(out, p, hopper ? 1 : 0, 1);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_prefill, sparse_prefill);
