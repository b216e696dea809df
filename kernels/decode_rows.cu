// A decode step's metadata and index rows in one launch; contract in sglang_dsv4/ops/decode_rows.py.
#include "dsv4/check.h"
#include "dsv4/rows.cuh"

namespace {

using namespace dsv4;

constexpr int kThreads = 256, kSlices = 8;  // a request's pages and entries are cut among so many blocks
constexpr int kHcaShift = 7;
static_assert(kThreads >= kWindow, "a thread a row of the window");

struct Params {
  const int64_t* rows;
  const void* lens;
  const int64_t* positions;
  const int32_t* req_to_token;
  const int32_t* slot_of_row;
  int32_t *req_rows, *slots, *prefix_lens, *seq_lens, *token_to_req;
  int64_t* positions_out;
  int32_t *page_table, *window_rows, *hca_rows, *hca_lens;
  int64_t token_stride, page_stride, window_stride, hca_stride;
  int64_t table_rows, table_columns;
  int max_pages, hca_width, page_shift;
  bool wide_lens;
};

__global__ void __launch_bounds__(kThreads) decode_rows_kernel(const __grid_constant__ Params p) {
  const int request = blockIdx.x, first = blockIdx.y * kThreads + threadIdx.x;
  const int64_t row = p.rows[request], position = p.positions[request];
  const int64_t given = p.wide_lens ? static_cast<const int64_t*>(p.lens)[request]
                                    : static_cast<const int32_t*>(p.lens)[request];
  const bool inside = row >= 0 && row < p.table_rows, real = inside && row > 0;
  const int length = real ? static_cast<int>(given) : 0;
  const int slot = inside ? p.slot_of_row[row] : 0;

  if (first == 0) {
    p.req_rows[request] = inside ? static_cast<int32_t>(row) : 0;
    p.slots[request] = slot;
    p.prefix_lens[request] = max(length - 1, 0);
    p.seq_lens[request] = length;
    p.token_to_req[request] = real ? request : -1;
    p.positions_out[request] = position;
  }
  if (first < kWindow) {
    const int64_t wanted = position - (kWindow - 1) + first;
    p.window_rows[request * p.window_stride + first] =
        real && wanted >= 0 ? slot * kWindow + static_cast<int>(wanted & (kWindow - 1)) : -1;
  }

  const int32_t* const tokens = p.req_to_token + (real ? row : 0) * p.token_stride;
  const auto page_of = [&](int64_t token) {  // physical page that holds a position's token
    return tokens[min(token, p.table_columns - 1)] >> p.page_shift;
  };
  const int pages = min((length + (1 << p.page_shift) - 1) >> p.page_shift, p.max_pages);
  for (int i = first; i < pages; i += kSlices * kThreads) {
    p.page_table[request * p.page_stride + i] = page_of(int64_t{i} << p.page_shift);
  }

  const int visible = real ? static_cast<int>(min((position + 1) >> kHcaShift, int64_t{p.hca_width})) : 0;
  if (first == 0) p.hca_lens[request] = max(visible, 1);
  const int rows_shift = p.page_shift - kHcaShift;
  for (int i = first; i < p.hca_width; i += kSlices * kThreads) {
    int stored = -1;
    if (i < visible) {
      const int64_t start = int64_t{i >> rows_shift} << p.page_shift;
      stored = (page_of(start) << rows_shift) + (i & ((1 << rows_shift) - 1));
    }
    p.hca_rows[request * p.hca_stride + i] = stored;
  }
}

void decode_rows(TensorView rows, TensorView seq_lens, TensorView positions, TensorView req_to_token,
                 TensorView slot_of_row, TensorView req_rows_out, TensorView slots_out, TensorView prefix_lens_out,
                 TensorView seq_lens_out, TensorView token_to_req_out, TensorView positions_out,
                 TensorView page_table_out, TensorView window_rows_out, TensorView hca_rows_out,
                 TensorView hca_lens_out, int64_t page_size) {
  const DeviceGuard guard(rows);
  Params p = {};
  p.rows = data_of<const int64_t>(rows);
  p.lens = data_of<const void>(seq_lens);
  p.wide_lens = seq_lens.dtype().bits == 64;
  p.positions = data_of<const int64_t>(positions);
  p.req_to_token = data_of<const int32_t>(req_to_token);
  p.slot_of_row = data_of<const int32_t>(slot_of_row);
  p.req_rows = data_of<int32_t>(req_rows_out);
  p.slots = data_of<int32_t>(slots_out);
  p.prefix_lens = data_of<int32_t>(prefix_lens_out);
  p.seq_lens = data_of<int32_t>(seq_lens_out);
  p.token_to_req = data_of<int32_t>(token_to_req_out);
  p.positions_out = data_of<int64_t>(positions_out);
  p.page_table = data_of<int32_t>(page_table_out);
  p.window_rows = data_of<int32_t>(window_rows_out);
  p.hca_rows = data_of<int32_t>(hca_rows_out);
  p.hca_lens = data_of<int32_t>(hca_lens_out);
  p.token_stride = req_to_token.stride(0);
  p.page_stride = page_table_out.stride(0);
  p.window_stride = window_rows_out.stride(0);
  p.hca_stride = hca_rows_out.stride(0);
  p.table_rows = req_to_token.size(0);
  p.table_columns = req_to_token.size(1);
  p.max_pages = static_cast<int>(page_table_out.size(1));
  p.hca_width = static_cast<int>(hca_rows_out.size(1));
  while ((int64_t{1} << p.page_shift) < page_size) ++p.page_shift;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows.size(0)), kSlices);
  shape.block = dim3(kThreads);
  launch(rows, shape, decode_rows_kernel, p);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_rows, decode_rows);
