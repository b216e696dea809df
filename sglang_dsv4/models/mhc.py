"""Hyper-connections: the residual is several streams, mixed around every sub-layer by weights of their own.

With `n` streams a sub-layer computes, per token and from the streams themselves, `pre [n]` (how much of each
stream enters), `post [n]` (how much of the output each stream receives) and `comb [n, n]` (how streams mix),
which normalising columns and rows in turn makes nearly doubly stochastic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_dsv4.models.invariant import RowLinear, exp, inverse_rms, ordered_sum, sigmoid

# Mixing weights live on a grid of 2**-40 below 2**12: their sums are exact, whatever the order of additions.
_GRID = 1.5 * 2.0**12


class StreamMixer(nn.Module):
    """Weights of one mixing: float32 `fn [outputs, n * hidden]`, `base [outputs]`, `scale [parts]`."""

    def __init__(self, config: Any, outputs: int, parts: int) -> None:
        super().__init__()
        self.linear = RowLinear(config.hc_mult * config.hidden_size, outputs, dtype=torch.float32)
        self.base = nn.Parameter(torch.zeros(outputs, dtype=torch.float32), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(parts, dtype=torch.float32), requires_grad=False)
        self.streams, self.norm_eps, self.eps = config.hc_mult, config.rms_norm_eps, config.hc_eps

    def mix(self, streams: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        """float64 logits, one `[N, width]` per part, from `streams [N, n, hidden]`."""
        flat = streams.flatten(1)
        logits = self.linear(flat, torch.float64) * inverse_rms(flat, self.norm_eps)
        parts = zip(logits.split(widths, -1), self.scale.double(), self.base.double().split(widths), strict=True)
        return tuple(part * scale + base for part, scale, base in parts)

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by official name, e.g. `hc_attn_fn` for the prefix `hc_attn`."""
        return {
            f"{prefix}_fn": self.linear.weight,
            f"{prefix}_base": self.base,
            f"{prefix}_scale": self.scale,
        }


def collapse(pre: Tensor, streams: Tensor) -> Tensor:
    """`[N, hidden]` in the streams' dtype: `[N, n, hidden]` weighted by `pre [N, n]`, added in float32."""
    return ordered_sum(pre.float().unsqueeze(-1) * streams.float(), dim=1).to(streams.dtype)


class HyperConnection(StreamMixer):
    """Mixing around one sub-layer."""

    def __init__(self, config: Any) -> None:
        n = config.hc_mult
        super().__init__(config, outputs=(2 + n) * n, parts=3)
        self.iterations = config.hc_sinkhorn_iters

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sub-layer input `[N, hidden]`, float64 `post [N, n]`, `comb [N, n, n]`, from `[N, n, hidden]`."""
        n = self.streams
        pre, post, comb = self.mix(streams, [n, n, n * n])
        gates = sigmoid(torch.cat([pre, post], dim=-1))
        comb = self._balance(comb.unflatten(-1, (n, n)))
        return collapse(gates[:, :n] + self.eps, streams), 2.0 * gates[:, n:], comb

    def _balance(self, logits: Tensor) -> Tensor:
        comb = exp(logits - logits.amax(-1, keepdim=True)).add_(_GRID).sub_(_GRID)
        comb = (comb / comb.sum(-1, keepdim=True)).add_(self.eps + _GRID).sub_(_GRID)
        for i in range(2 * self.iterations - 1):
            total = comb.sum(-1 if i % 2 else -2, keepdim=True).add_(self.eps)
            comb.div_(total).add_(_GRID).sub_(_GRID)
        return comb

    @staticmethod
    def merge(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Streams after the sub-layer: `post_k * output + sum_j comb[j, k] * streams_j`, added in float32."""
        merged = post.float().unsqueeze(-1) * output.float().unsqueeze(1)
        for weights, stream in zip(comb.float().unbind(1), streams.float().unbind(1), strict=True):
            merged += weights.unsqueeze(-1) * stream.unsqueeze(1)
        return merged.to(streams.dtype)


class HyperHead(StreamMixer):
    """Collapse of the streams in front of the final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, outputs=config.hc_mult, parts=1)

    def forward(self, streams: Tensor) -> Tensor:
        """`[N, hidden]` from `streams [N, n, hidden]`."""
        (pre,) = self.mix(streams, [self.streams])
        return collapse(sigmoid(pre) + self.eps, streams)
