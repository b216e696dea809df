"""What one forward step looks like to every operation.

Pure tensors, no SGLang: the attention backend fills a `StepMeta` from SGLang's batch, tests fill one by hand.
All tensors keep their address for a captured CUDA graph; work that does not exist (a padded token, a padded
request, a snapshot that is not due) is marked in the tensors and masked on the device, never by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_dsv4.geometry import WINDOW


def from_host(values: Sequence[int] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host integers on a device. From pinned memory: a copy from any other waits for all that was launched before."""
    pinned = device.type == "cuda"
    held = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype, pin_memory=pinned)
    if pinned and not held.is_pinned():
        held = held.pin_memory()
    return held.to(device, dtype, non_blocking=pinned)


@dataclass
class StepMeta:
    """B requests with N tokens in all.

    req_rows       int32 [B]     row of the request in the request pool (tails); 0 is the dummy row
    slots          int32 [B]     the request's state slot (window, overlap rows); 0 is the dummy slot
    prefix_lens    int32 [B]     tokens that stand before this step
    seq_lens       int32 [B]     tokens that stand after it; a padded request has both lengths 0
    token_offsets  int32 [B+1]   request b owns tokens [token_offsets[b], token_offsets[b+1])
    token_to_req   int32 [N]     request of each token, -1 for a padded token
    positions      int64 [N]     position of each token in its request
    page_table     int32 [B, P]  physical page of tokens [j * page_size, (j + 1) * page_size)
    snapshot_slots int32 [B, S]  slot that receives the state after `snapshot_lens` tokens, -1 for none
    snapshot_lens  int32 [B, S]  page-aligned, prefix_len + 128 <= len <= seq_len, -1 for none
    page_size      tokens a page
    """

    req_rows: Tensor
    slots: Tensor
    prefix_lens: Tensor
    seq_lens: Tensor
    token_offsets: Tensor
    token_to_req: Tensor
    positions: Tensor
    page_table: Tensor
    snapshot_slots: Tensor
    snapshot_lens: Tensor
    page_size: int

    @property
    def num_requests(self) -> int:
        return self.req_rows.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    def tokens(self, start: int, stop: int) -> StepMeta:
        """The same requests with the tokens [start, stop) alone: for operations that read entries, not state."""
        return replace(
            self,
            token_offsets=self.token_offsets.clamp(start, stop) - start,
            token_to_req=self.token_to_req[start:stop],
            positions=self.positions[start:stop],
        )

    def valid_tokens(self) -> Tensor:
        """bool [N]: tokens that belong to a request."""
        return self.token_to_req >= 0

    def of_token(self, per_request: Tensor) -> Tensor:
        """int64 [N, ...]: a per-request value for each token; padded tokens read request 0, mask them."""
        return per_request[self.token_to_req.clamp(min=0).long()].long()

    def visible_entries(self, ratio: int) -> Tensor:
        """int64 [N]: entries that a token may attend to, its own block's included once complete; 0 if padded."""
        return torch.where(self.valid_tokens(), (self.positions + 1) // ratio, torch.zeros_like(self.positions))

    def entry_rows(self, requests: Tensor, entry_ids: Tensor, ratio: int) -> Tensor:
        """int64: pool row of each entry id of its request (same shapes, broadcast); -1 where the id is negative."""
        rows_per_page = self.page_size // ratio
        safe = entry_ids.clamp(min=0).long()
        column = (safe // rows_per_page).clamp(max=self.page_table.shape[1] - 1)
        page = self.page_table[requests.long(), column].long()
        return torch.where(entry_ids >= 0, page * rows_per_page + safe % rows_per_page, torch.full_like(safe, -1))

    def window_rows(self) -> Tensor:
        """int64 [N, 128]: window-pool rows of positions t-127 .. t in that order; -1 before position 0."""
        back = torch.arange(-(WINDOW - 1), 1, device=self.device)
        wanted = self.positions[:, None] + back
        rows = self.of_token(self.slots)[:, None] * WINDOW + wanted % WINDOW
        valid = (wanted >= 0) & self.valid_tokens()[:, None]
        return torch.where(valid, rows, torch.full_like(rows, -1))


# FlashMLA's prefill takes index rows of whole multiples; others would be copied in every layer.
INDEX_MULTIPLE = 128


@dataclass
class Workspace:
    """Dense rows of one prefill step, per request `[history 128 | this step's tokens | entries]`.

    offsets     int64 [B]  first row of each request
    num_rows    rows in all
    num_entries int64 [B]  entries gathered per request, all those visible to its last token
    """

    offsets: Tensor
    num_rows: int
    num_entries: Tensor

    @classmethod
    def plan(cls, prefix_lens: list[int], seq_lens: list[int], ratio: int, device: torch.device) -> Workspace:
        """Lay the requests out one after another from host lengths (no device synchronisation)."""
        offsets, entries, total = [], [], 0
        for prefix, length in zip(prefix_lens, seq_lens, strict=True):
            count = length // ratio if ratio else 0
            offsets.append(total)
            entries.append(count)
            total += WINDOW + (length - prefix) + count
        return cls(from_host(offsets, torch.int64, device), total, from_host(entries, torch.int64, device))

    def token_rows(self, meta: StepMeta, positions: Tensor) -> Tensor:
        """int64, shape of `positions` [N, ...]: workspace row of a position (history or this step's token)."""
        base = self.offsets[meta.token_to_req.clamp(min=0).long()] - meta.of_token(meta.prefix_lens) + WINDOW
        return base.reshape(-1, *[1] * (positions.dim() - 1)) + positions

    def window_indices(self, meta: StepMeta) -> Tensor:
        """int32 [N, 128]: workspace rows of positions t-127 .. t, -1 before position 0 and for padded tokens."""
        back = torch.arange(-(WINDOW - 1), 1, device=meta.device)
        wanted = meta.positions[:, None] + back
        valid = (wanted >= 0) & meta.valid_tokens()[:, None]
        rows = self.token_rows(meta, wanted)
        return torch.where(valid, rows, torch.full_like(rows, -1)).int()

    def first_entries(self, meta: StepMeta) -> Tensor:
        """int32 [N]: workspace row of the first entry of each token's request."""
        return self.token_rows(meta, meta.of_token(meta.seq_lens)).int()

    def entry_indices(self, meta: StepMeta, entry_ids: Tensor) -> Tensor:
        """int32 [N, K]: workspace rows of logical entry ids, -1 kept."""
        rows = self.first_entries(meta)[:, None] + entry_ids
        return torch.where(entry_ids >= 0, rows, torch.full_like(rows, -1)).int()

    def indices(self, meta: StepMeta, entry_ids: Tensor | None = None, *, room: int = 0) -> Tensor:
        """int32 [N, K]: workspace rows of the window, of the entries, then -1 in `room` columns and up to a whole
        INDEX_MULTIPLE."""
        parts = [self.window_indices(meta)]
        if entry_ids is not None:
            parts.append(self.entry_indices(meta, entry_ids))
        room += -(sum(part.shape[1] for part in parts) + room) % INDEX_MULTIPLE
        parts.append(parts[0].new_full((parts[0].shape[0], room), -1))
        return torch.cat(parts, dim=1)


def all_entry_ids(meta: StepMeta, ratio: int, width: int) -> Tensor:
    """int32 [N, width]: ids 0 .. visible-1 in order, -1 behind: what a layer without an indexer attends to."""
    ids = torch.arange(width, device=meta.device)
    return torch.where(ids < meta.visible_entries(ratio)[:, None], ids, torch.full_like(ids, -1)).int()
