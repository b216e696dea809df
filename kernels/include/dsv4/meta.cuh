// What one forward step looks like on the device; the fields are those of sglang_dsv4/ops/meta.py.
//
// Everything a padded request or token holds is untrusted: request_of() hides tokens whose request does not exist,
// entry_row() answers -1 for a page that does not, and kernels skip rows that a pool does not contain.
#pragma once

#include <cstdint>

#include "dsv4/check.h"
#include "dsv4/rows.cuh"

namespace dsv4 {

struct StepMeta {
  const int32_t* req_rows;
  const int32_t* slots;
  const int32_t* prefix_lens;
  const int32_t* seq_lens;
  const int32_t* token_offsets;
  const int32_t* token_to_req;
  const int64_t* positions;
  const int32_t* page_table;
  const int32_t* snapshot_slots;
  const int32_t* snapshot_lens;
  int64_t page_table_stride;
  int64_t snapshot_stride;
  int num_requests;
  int num_tokens;
  int max_pages;
  int max_snapshots;
  int page_shift;  // log2 of the page size in tokens

  // Request of a token, -1 for padding.
  __device__ __forceinline__ int request_of(int token) const {
    const int request = token_to_req[token];
    return request < num_requests ? request : -1;
  }

  // Pool row of an entry; ratio_shift is log2 of the layer's ratio. -1 where the page table has no such page.
  __device__ __forceinline__ int64_t entry_row(int request, int entry, int ratio_shift) const {
    return row_of_page(entry_page(request, entry, ratio_shift), entry, ratio_shift);
  }

  // The two halves of entry_row(): a load that others need not wait for, and what is made of it.
  __device__ __forceinline__ int entry_page(int request, int entry, int ratio_shift) const {
    const int column = entry >> (page_shift - ratio_shift);
    return entry >= 0 && column < max_pages ? page_table[request * page_table_stride + column] : -1;
  }
  __device__ __forceinline__ int64_t row_of_page(int page, int entry, int ratio_shift) const {
    const int rows_shift = page_shift - ratio_shift;
    return page < 0 ? -1 : (int64_t{page} << rows_shift) + (entry & ((1 << rows_shift) - 1));
  }
};

}  // namespace dsv4

// The ten tensors and the page size that every operation receives, in the order of StepMeta's fields.
#define DSV4_META_PARAMS                                                                                          \
  ::dsv4::TensorView req_rows, ::dsv4::TensorView slots, ::dsv4::TensorView prefix_lens,                          \
      ::dsv4::TensorView seq_lens, ::dsv4::TensorView token_offsets, ::dsv4::TensorView token_to_req,             \
      ::dsv4::TensorView positions, ::dsv4::TensorView page_table, ::dsv4::TensorView snapshot_slots,             \
      ::dsv4::TensorView snapshot_lens, int64_t page_size
#define DSV4_META                                                                                                  \
  ::dsv4::make_meta(req_rows, slots, prefix_lens, seq_lens, token_offsets, token_to_req, positions, page_table,    \
                    snapshot_slots, snapshot_lens, page_size)

namespace dsv4 {

inline StepMeta make_meta(DSV4_META_PARAMS) {
  StepMeta meta = {};
  meta.req_rows = data_of<const int32_t>(req_rows);
  meta.slots = data_of<const int32_t>(slots);
  meta.prefix_lens = data_of<const int32_t>(prefix_lens);
  meta.seq_lens = data_of<const int32_t>(seq_lens);
  meta.token_offsets = data_of<const int32_t>(token_offsets);
  meta.token_to_req = data_of<const int32_t>(token_to_req);
  meta.positions = data_of<const int64_t>(positions);
  meta.page_table = data_of<const int32_t>(page_table);
  meta.snapshot_slots = data_of<const int32_t>(snapshot_slots);
  meta.snapshot_lens = data_of<const int32_t>(snapshot_lens);
  meta.page_table_stride = page_table.stride(0);
  meta.snapshot_stride = snapshot_slots.stride(0);
  meta.num_requests = static_cast<int>(req_rows.size(0));
  meta.num_tokens = static_cast<int>(positions.size(0));
  meta.max_pages = static_cast<int>(page_table.size(1));
  meta.max_snapshots = static_cast<int>(snapshot_slots.size(1));
  while ((int64_t{1} << meta.page_shift) < page_size) ++meta.page_shift;
  return meta;
}

template <typename Layout>
RowPool<Layout> make_pool(const TensorView& pool) {
  return {data_of<uint8_t>(pool), pool.stride(0), pool.size(0) * kGroupRows};
}

}  // namespace dsv4
