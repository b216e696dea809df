// Decode attention over packed window rows and packed entries; contract in sglang_dsv4/ops/sparse_attention.py.
#include "dsv4/check.h"
#include "dsv4/attention_launch.cuh"
#include "dsv4/meta.cuh"

namespace {

using namespace dsv4;

// `partial` and `partial_stat` have room for `splits` results a query and head. `parts` > 0 takes the Hopper kernel, a
// cluster of that many blocks a query and `splits` groups of them; 0 takes the portable one, `splits` blocks a query.
void sparse_attention(TensorView q, TensorView window, TensorView window_rows, TensorView entries,
                      TensorView entry_rows, TensorView sink, TensorView rope, TensorView positions, TensorView out,
                      TensorView partial, TensorView partial_stat, double scale, int64_t parts, int64_t splits) {
  const DeviceGuard guard(q);
  AttentionParams<PackedRows> p = {};
  p.rows.window = make_pool<MainFp8>(window);
  p.rows.entries = make_pool<MainFp8>(entries);
  p.rows.window_rows = data_of<const void>(window_rows);
  p.rows.window_wide = window_rows.dtype().bits == 64;
  p.rows.window_stride = window_rows.stride(0);
  p.rows.entry_rows = data_of<const int32_t>(entry_rows);
  p.rows.entry_stride = entry_rows.stride(0);
  p.rows.num_entries = static_cast<int>(entry_rows.size(1));
  fill_attention(p, q, sink, rope, positions, out, partial, partial_stat, scale);
  launch_attention(out, p, static_cast<int>(parts), static_cast<int>(splits));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sparse_attention, sparse_attention);
