"""Rotary position embedding: interleaved pairs on the last 64 channels, one table per kind of layer.

Layers of ratio 0 rotate with `rope_theta` alone. Layers of ratio 4 and 128 use `compress_rope_theta` with
YaRN for everything they rotate: queries, window rows, entries (at the first token of their block), indexer
queries and keys. YaRN changes frequencies only; neither the table nor the softmax scale carries a magnitude
factor.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

ROPE_DIM = 64
PAIRS = ROPE_DIM // 2


def _yarn_settings(config: Any) -> Mapping[str, Any]:
    scaling = getattr(config, "rope_scaling", None)
    if not isinstance(scaling, Mapping) or scaling.get("type", scaling.get("rope_type")) != "yarn":
        raise ValueError(f"rope_scaling must describe YaRN, as in the released checkpoints; got {scaling!r}")
    missing = [k for k in ("factor", "original_max_position_embeddings") if k not in scaling]
    if missing:
        raise ValueError(f"rope_scaling lacks {', '.join(missing)}")
    return scaling


def inverse_frequencies(config: Any, ratio: int) -> Tensor:
    """Angles per position of the 32 pairs, float32 `[32]`.

    float32 on purpose: the released model forms its angles in float32, and at a million positions the
    difference from float64 is no longer small.
    """
    if config.qk_rope_head_dim != ROPE_DIM:
        raise ValueError(f"qk_rope_head_dim is {config.qk_rope_head_dim}; only {ROPE_DIM} is supported")
    base = float(config.compress_rope_theta if ratio else config.rope_theta)
    pair = torch.arange(PAIRS, dtype=torch.float32)
    frequency = 1.0 / base ** (pair * 2 / ROPE_DIM)
    if not ratio:
        return frequency
    yarn = _yarn_settings(config)
    length = yarn["original_max_position_embeddings"]

    def pair_with_turns(turns: float) -> float:
        return ROPE_DIM * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(pair_with_turns(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_with_turns(yarn.get("beta_slow", 1))), ROPE_DIM - 1)
    ramp = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency * (1 - ramp) + frequency / yarn["factor"] * ramp


def rope_table(config: Any, ratio: int, length: int) -> Tensor:
    """Table for positions `0 .. length-1` of a layer: float32 `[length, 64]`, 32 cosines then 32 sines.

    `length` is the context that is served, not the model's maximum: a million rows would take 256 MiB.
    A row does not depend on `length`. Raises ValueError where the configuration is not the released scheme.
    """
    if ratio not in (0, 4, 128):
        raise ValueError(f"compress ratio {ratio} is not one of 0, 4, 128")
    position = torch.arange(length, dtype=torch.float32)
    angle = (position[:, None] * inverse_frequencies(config, ratio)).to(torch.float64)
    return torch.cat([angle.cos(), angle.sin()], dim=-1).to(torch.float32)


def _rotate(x: Tensor, table: Tensor, positions: Tensor, sign: float) -> Tensor:
    rows = table[positions].to(torch.float32)
    rows = rows.reshape(rows.shape[0], *(1,) * (x.dim() - 2), ROPE_DIM)
    cos, sin = rows[..., :PAIRS], rows[..., PAIRS:] * sign
    tail = x[..., -ROPE_DIM:].to(torch.float32).unflatten(-1, (PAIRS, 2))
    even, odd = tail[..., 0], tail[..., 1]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-ROPE_DIM], turned.to(x.dtype)], dim=-1)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotates the last 64 channels of `x [N, ..., C]` to `positions` (int `[N]`); same shape and dtype."""
    return _rotate(x, table, positions, 1.0)


def apply_inverse_rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Undoes `apply_rope`: the conjugate rotation at the same positions."""
    return _rotate(x, table, positions, -1.0)
