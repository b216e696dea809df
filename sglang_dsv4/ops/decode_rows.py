"""What every layer of a decode step reads besides pools and projections, made once a step from SGLang's own tensors.

Reads the request table, the slots of its rows and the batch's lengths; writes `DecodeRows` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dsv4.geometry import GROUP_ROWS, HCA_RATIO, PAGE_SIZES, WINDOW
from sglang_dsv4.ops import jit
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.meta import StepMeta, all_entry_ids


@dataclass
class DecodeRows:
    """Tensors of at most M requests, one token each. A captured graph keeps their addresses.

    req_rows, slots, prefix_lens, seq_lens, token_to_req   int32 [M], as in StepMeta
    token_offsets  int32 [M + 1], 0 .. M
    positions      int64 [M]
    page_table     int32 [M, P]; behind a request's last page stand pages of earlier steps, which no layer reads
    window_rows    int32 [M, 128], window-pool rows of positions t-127 .. t; -1 before position 0 and if padded
    hca_rows       int32 [M, W], pool rows of the visible HCA entries in order, -1 behind; W is a multiple of 64
    hca_lens       int32 [M], visible HCA entries, at least 1 (whose row is then -1)
    """

    req_rows: Tensor
    slots: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    token_to_req: Tensor
    token_offsets: Tensor
    positions: Tensor
    page_table: Tensor
    window_rows: Tensor
    hca_rows: Tensor
    hca_lens: Tensor
    page_size: int

    @classmethod
    def allocate(cls, requests: int, tokens: int, page_size: int, device: torch.device) -> DecodeRows:
        """For `requests` of at most `tokens` tokens each."""

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        width = -(-(tokens // HCA_RATIO) // GROUP_ROWS) * GROUP_ROWS
        return cls(
            req_rows=ints(requests),
            slots=ints(requests),
            prefix_lens=ints(requests),
            seq_lens=ints(requests),
            token_to_req=ints(requests),
            token_offsets=torch.arange(requests + 1, dtype=torch.int32, device=device),
            positions=ints(requests, dtype=torch.int64),
            page_table=ints(requests, -(-tokens // page_size)),
            window_rows=ints(requests, WINDOW),
            hca_rows=ints(requests, width),
            hca_lens=ints(requests),
            page_size=page_size,
        )

    def first(self, requests: int) -> DecodeRows:
        """Views of the first `requests` of them."""
        part = slice(requests)
        return DecodeRows(
            req_rows=self.req_rows[part],
            slots=self.slots[part],
            prefix_lens=self.prefix_lens[part],
            seq_lens=self.seq_lens[part],
            token_to_req=self.token_to_req[part],
            token_offsets=self.token_offsets[: requests + 1],
            positions=self.positions[part],
            page_table=self.page_table[part],
            window_rows=self.window_rows[part],
            hca_rows=self.hca_rows[part],
            hca_lens=self.hca_lens[part],
            page_size=self.page_size,
        )

    def meta(self) -> StepMeta:
        """The step without snapshots: those of decode steps are copied behind the last layer."""
        none = self.slots.new_empty((self.slots.shape[0], 0))
        return StepMeta(
            self.req_rows,
            self.slots,
            self.prefix_lens,
            self.seq_lens,
            self.token_offsets,
            self.token_to_req,
            self.positions,
            self.page_table,
            none,
            none,
            self.page_size,
        )


def decode_rows(
    out: DecodeRows, rows: Tensor, seq_lens: Tensor, positions: Tensor, req_to_token: Tensor, slot_of_row: Tensor
) -> None:
    """Fill `out` for a batch of as many requests as it holds.

    rows          int64 [M]: rows of the request table; 0 pads a batch
    seq_lens      int [M] with this step's token; positions int64 [M] of that token
    req_to_token  int32 [R, C]: token slot of each position, whole pages of `page_size`
    slot_of_row   int32 [R]
    """
    real = rows > 0
    index = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
    lens = torch.where(real, seq_lens, torch.zeros_like(seq_lens)).int()
    out.req_rows.copy_(rows)
    out.slots.copy_(slot_of_row[rows])
    out.prefix_lens.copy_((lens - 1).clamp(min=0))
    out.seq_lens.copy_(lens)
    out.token_to_req.copy_(torch.where(real, index, torch.full_like(index, -1)))
    out.positions.copy_(positions)
    columns = torch.arange(out.page_table.shape[1], device=rows.device) * out.page_size
    table = req_to_token[rows[:, None], columns.clamp(max=req_to_token.shape[1] - 1)] // out.page_size
    out.page_table.copy_(torch.where(columns < lens[:, None], table, out.page_table))
    meta = out.meta()
    out.window_rows.copy_(meta.window_rows())
    width = out.hca_rows.shape[1]
    if width:
        requests = meta.token_to_req.clamp(min=0)[:, None]
        out.hca_rows.copy_(meta.entry_rows(requests, all_entry_ids(meta, HCA_RATIO, width), HCA_RATIO))
    out.hca_lens.copy_(meta.visible_entries(HCA_RATIO).clamp(min=1, max=max(width, 1)))


def decode_rows_cuda(
    out: DecodeRows, rows: Tensor, seq_lens: Tensor, positions: Tensor, req_to_token: Tensor, slot_of_row: Tensor
) -> None:
    """CUDA face of `decode_rows`: one launch. A row outside the table counts as padding.

    Raises ValueError for an argument that the kernel cannot take.
    """
    check = Check("decode_rows")
    ints = (torch.int32, torch.int64)
    check.tensor("rows", rows, torch.int64, ("requests",))
    check.tensor("seq_lens", seq_lens, ints, ("requests",))
    check.tensor("positions", positions, torch.int64, ("requests",))
    check.tensor("req_to_token", req_to_token, torch.int32, ("table rows", None), strided=1)
    check.tensor("slot_of_row", slot_of_row, torch.int32, ("table rows",))
    fields = (
        ("req_rows", torch.int32, ()),
        ("slots", torch.int32, ()),
        ("prefix_lens", torch.int32, ()),
        ("seq_lens", torch.int32, ()),
        ("token_to_req", torch.int32, ()),
        ("positions", torch.int64, ()),
        ("page_table", torch.int32, (None,)),
        ("window_rows", torch.int32, (WINDOW,)),
        ("hca_rows", torch.int32, (None,)),
        ("hca_lens", torch.int32, ()),
    )
    values = [
        check.tensor(f"out.{name}", getattr(out, name), dtype, ("requests", *more), strided=len(more))
        for name, dtype, more in fields
    ]
    if out.page_size not in PAGE_SIZES:
        raise check.fail("out.page_size", repr(out.page_size), " or ".join(map(str, PAGE_SIZES)))
    device = check.cuda()
    if rows.shape[0]:
        launch = jit.function("decode_rows", "decode_rows", device)
        launch(rows, seq_lens, positions, req_to_token, slot_of_row, *values, out.page_size)
