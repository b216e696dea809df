"""Mixture of experts: a router by score or by token id, routed experts and one shared expert.

The up projections of every expert run on every token. The chosen activations, weighted, then stand at their
expert's place in one wide row, zero elsewhere, and a single down projection sums over experts. No shape
depends on the routing and nothing synchronises with the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_dsv4.models.invariant import GridRows, RowLinear, grid_rows, ordered_sum, silu, softplus


def check_moe(config: Any) -> None:
    """Raises ValueError where the configuration asks for a router that the released models do not use."""
    expected = {
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_shared_experts": 1,
    }
    for name, value in expected.items():
        found = getattr(config, name, value)
        if found != value:
            raise ValueError(f"{name} is {found!r}; only {value!r} is supported")
    chosen, experts = config.num_experts_per_tok, config.n_routed_experts
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok is {chosen}, but n_routed_experts is {experts}")


class Router(nn.Module):
    """Chooses experts by score plus bias, or by token id in the first layers; weighs them by score alone."""

    def __init__(self, config: Any, hashed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        self.linear = RowLinear(config.hidden_size, experts, dtype=dtype)
        self.chosen, self.factor = chosen, config.routed_scaling_factor
        self.bias: nn.Parameter | None = None
        self.tid2eid: nn.Parameter | None = None
        if hashed:
            # Distinct experts in every row, also where no checkpoint is loaded.
            table = (torch.arange(config.vocab_size)[:, None] + torch.arange(chosen)) % experts
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: GridRows, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids int64 `[N, chosen]` and their weights float64 `[N, chosen]`."""
        scores = softplus(self.linear(x, torch.float64)).sqrt()
        if self.tid2eid is not None:
            experts = self.tid2eid[input_ids]
        else:
            assert self.bias is not None
            # float32, as everywhere: an expert must not be chosen by digits that other hosts do not keep.
            experts = torch.topk(scores.float() + self.bias, self.chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        return experts, weights / ordered_sum(weights, dim=-1).unsqueeze(-1) * self.factor


class MoE(nn.Module):
    """Feed-forward block of one layer; the shared expert stands behind the routed ones with weight 1.

    up    [(experts + 1) * 2 * inner, hidden]: w1 and w3 of each expert in turn
    down  [hidden, (experts + 1) * inner]: w2 of each expert side by side
    """

    def __init__(self, config: Any, hashed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        check_moe(config)
        self.routed, self.inner = config.n_routed_experts, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate = Router(config, hashed, dtype)
        self.up = RowLinear(config.hidden_size, (self.routed + 1) * 2 * self.inner, dtype=dtype)
        self.down = RowLinear((self.routed + 1) * self.inner, config.hidden_size, dtype=dtype)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """`x [N, hidden]` in and out, `input_ids int [N]` (the hash layers route by them)."""
        rows = grid_rows(x)
        experts, weights = self.gate(rows, input_ids)
        experts = torch.cat([experts, experts.new_full((x.shape[0], 1), self.routed)], dim=-1)
        weights = torch.cat([weights, weights.new_ones(x.shape[0], 1)], dim=-1)
        place = experts.unsqueeze(-1).expand(-1, -1, 2 * self.inner)
        both = self.up(rows, torch.float32).unflatten(-1, (self.routed + 1, 2 * self.inner)).gather(1, place)
        gate, up = both.split(self.inner, dim=-1)
        hidden = silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit) * weights.unsqueeze(-1)
        wide = hidden.new_zeros(x.shape[0], self.routed + 1, self.inner, dtype=x.dtype)
        wide.scatter_(1, place[..., : self.inner], hidden.to(x.dtype))
        return self.down(wide.flatten(1))

    def named_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by official name below `prefix`; those of the experts are views of the stacked weights."""
        named: dict[str, Tensor] = {f"{prefix}.gate.weight": self.gate.linear.weight}
        if self.gate.bias is not None:
            named[f"{prefix}.gate.bias"] = self.gate.bias
        if self.gate.tid2eid is not None:
            named[f"{prefix}.gate.tid2eid"] = self.gate.tid2eid
        up = self.up.weight.unflatten(0, (self.routed + 1, 2, self.inner))
        down = self.down.weight.unflatten(1, (self.routed + 1, self.inner))
        for i in range(self.routed + 1):
            name = f"{prefix}.experts.{i}" if i < self.routed else f"{prefix}.shared_experts"
            named[f"{name}.w1.weight"], named[f"{name}.w3.weight"] = up[i, 0], up[i, 1]
            named[f"{name}.w2.weight"] = down[:, i]
        return named
