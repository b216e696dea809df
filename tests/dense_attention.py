"""Attention of one request by the book: the whole history is kept unrounded and recomputed in every step.

No pages, slots, tails or rings, and no code shared with the operations: an independent oracle for them and
for the model around them. Everything runs in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WINDOW, ROPE_DIM, CSA_RATIO = 128, 64, 4
Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


@dataclass
class DenseRequest:
    """Stands for `forward_batch`: one request's projections so far, by layer and by name.

    round_row    what storing a window token or an entry `[..., 512]` does to it
    round_index  what storing an indexer key `[..., 128]`, or preparing a query for it, does to it
    """

    round_row: Rounding = exact
    round_index: Rounding = exact
    history: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)

    def extend(self, layer: int, name: str, new: Tensor) -> Tensor:
        old = self.history.get((layer, name))
        self.history[layer, name] = new.double() if old is None else torch.cat([old, new.double()])
        return self.history[layer, name]


def rotate(x: Tensor, rope: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
    """Complex multiplication on the last 64 channels of `[N, ..., c]`."""
    angle = torch.complex(rope[positions, :32].double(), sign * rope[positions, 32:].double())
    angle = angle.reshape(-1, *[1] * (x.dim() - 2), 32)
    pairs = torch.view_as_complex(x[..., -ROPE_DIM:].unflatten(-1, (32, 2)).contiguous())
    return torch.cat([x[..., :-ROPE_DIM], torch.view_as_real(pairs * angle).flatten(-2)], dim=-1)


def pool_entries(params: Any, ratio: int, kv_score: Tensor, rope: Tensor) -> Tensor:
    """float64 `[P // ratio, c]` entries, normalised and rotated, of the float64 projections of P tokens."""
    count = kv_score.shape[0] // ratio
    c, z = kv_score[: count * ratio].unflatten(0, (count, ratio)).chunk(2, dim=-1)
    z = z + params.ape.double()
    if ratio == CSA_RATIO:
        width = c.shape[-1] // 2
        before = torch.zeros(1, ratio, width, dtype=c.dtype)
        c_before = torch.cat([before, c[:-1, :, :width]])[:count]
        z_before = torch.cat([before - float("inf"), z[:-1, :, :width]])[:count]
        c, z = torch.cat([c_before, c[..., width:]], dim=1), torch.cat([z_before, z[..., width:]], dim=1)
    entries = (z.softmax(dim=1) * c).sum(dim=1)
    entries = entries * (entries.square().mean(-1, keepdim=True) + params.eps).rsqrt()
    return rotate(entries * params.norm_weight.double(), rope, torch.arange(count) * ratio)


class DenseCore:
    """Takes the place of `SlotRadixAttention`; `forward_batch` is a `DenseRequest`."""

    def __init__(self, **arguments: Any) -> None:
        self.__dict__.update(arguments)

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        forward_batch: DenseRequest,
        *,
        kv_score: Tensor | None = None,
        index_kv_score: Tensor | None = None,
        index_q: Tensor | None = None,
        index_weights: Tensor | None = None,
        index_scale: float = 1.0,
    ) -> Tensor:
        request, layer = forward_batch, self.layer_id
        keys = request.round_row(request.extend(layer, "kv", kv)).double()
        total = keys.shape[0]
        queries = torch.arange(total - q.shape[0], total)
        distance = queries[:, None] - torch.arange(total)
        visible = (distance >= 0) & (distance < WINDOW)
        if kv_score is not None:
            scores = request.extend(layer, "kv_score", kv_score)
            entries = request.round_row(pool_entries(self.compressor, self.ratio, scores, self.rope)).double()
            chosen = torch.arange(entries.shape[0]) < (queries[:, None] + 1) // self.ratio
            if index_kv_score is not None:
                scores = request.extend(layer, "index_kv_score", index_kv_score)
                index_keys = request.round_index(pool_entries(self.index_compressor, self.ratio, scores, self.rope))
                turned = request.round_index(rotate(index_q.double(), self.rope, queries))
                chosen = self.choose(turned, index_scale * index_weights.double(), index_keys, chosen)
                request.selected[layer] = chosen
            keys, visible = torch.cat([keys, entries]), torch.cat([visible, chosen], dim=1)
        logits = torch.einsum("nhc,kc->nhk", q.double(), keys) * self.scale
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
        sink = self.sink.double()[None, :, None].expand(*logits.shape[:2], 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
        out = torch.einsum("nhk,kc->nhc", weights, keys)
        return rotate(out, self.rope, queries, sign=-1).to(q.dtype)

    def choose(self, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """bool `[N, entries]`: the `index_topk` best of the visible entries of each query."""
        scores = (torch.einsum("nhc,kc->nhk", q, keys).relu() * weights.double()[..., None]).sum(dim=1)
        scores = scores.masked_fill(~visible, float("-inf"))
        top = scores.topk(min(self.index_topk, scores.shape[1]), dim=-1).indices
        return torch.zeros_like(visible).scatter_(1, top, True) & visible
