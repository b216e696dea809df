"""Arithmetic whose rows do not depend on the batch.

A BLAS picks another kernel, and so another order of additions, when the number of rows changes; a vectorised
`exp` may round differently from the scalar one that finishes a buffer. Either makes a resumed request differ
from a cold one in its last bits. Everything here is built so that the order cannot matter:

* Sums: the summands are first rounded to a grid so coarse that every partial sum is exact in float64. Then
  any order of additions, any number of rows or threads, and any BLAS give the same bits. `RowLinear` does so
  with both factors of a product, the weights in two slices so that nothing of float32's precision is lost.
* Functions: `exp` and `log1p` are polynomials of elementwise additions and products, which IEEE 754 defines
  completely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

_ROW_BITS = 24  # float32 keeps as many for the largest element of a row
_SUM_BITS = 53  # integers up to 2**53 are exact in float64
_MAX_WIDTH = 1 << 15  # leaves 14 bits a weight slice: 28 in all, 4 more than float32 keeps
_EXPONENT = 0x7FF0000000000000
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.6931471803691238  # the upper 33 bits: its product with any exponent below 2**20 is exact
_LN2_LOW = 1.9082149292705877e-10
_EXP_TERMS = [1.0 / math.factorial(k) for k in range(9)]
_ATANH_TERMS = [1.0 / (2 * k + 1) for k in range(10)]


class GridRows(NamedTuple):
    """float64 rows `[..., K]` on the grid that `RowLinear` multiplies exactly; made by `grid_rows`."""

    values: Tensor


def _magnet(x: Tensor, bits: int) -> Tensor:
    """float64 `[..., 1]`: adding and subtracting it rounds a row to `bits` bits of its largest magnitude.

    It is 1.5 * 2**52 grid steps, where float64's own spacing is one step. A row of zeros gets zero; a row
    with a NaN or an infinity gets infinity and so becomes NaN, alone.
    """
    top = x.abs().amax(-1, keepdim=True).to(torch.float64)
    power = (top.view(torch.int64) & _EXPONENT).view(torch.float64)  # 2**floor(log2(top))
    return power * (1.5 * 2.0 ** (_SUM_BITS - bits))


def _round_to_grid(x: Tensor, magnet: Tensor) -> Tensor:
    return (x + magnet).sub_(magnet)


def round_rows(x: Tensor, bits: int) -> Tensor:
    """float64 `[..., K]`: rows rounded to `bits` bits relative to each row's largest magnitude."""
    return _round_to_grid(x, _magnet(x, bits))


def grid_rows(x: Tensor) -> GridRows:
    """Rounds float rows `[..., K]` to 24 bits relative to each row's largest magnitude."""
    return GridRows(_round_to_grid(x, _magnet(x, _ROW_BITS)))


def slice_bits(width: int) -> int:
    """Bits of a weight slice such that `width` products with 24-bit numbers add up exactly."""
    if not 1 <= width <= _MAX_WIDTH:
        raise ValueError(f"dot products of {width} terms are not supported: the limit is {_MAX_WIDTH}")
    return _SUM_BITS - _ROW_BITS - math.ceil(math.log2(width))


class RowLinear(nn.Module):
    """Linear map without bias, batch-invariant: accumulated exactly, rounded once.

    `weight` is `[N, K]`, or `[G, N, K]` with `groups=G` independent maps. It is also held as two float64
    slices, built at the first use: 16 bytes a parameter, so this is for small models. `refresh` after
    changing it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        groups: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (out_features, in_features) if groups is None else (groups, out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self._slices: Tensor | None = None

    def refresh(self) -> None:
        """Drops what was derived from `weight`."""
        self._slices = None

    def _make_slices(self) -> Tensor:
        """float64 `[.., 2N, K]`: the upper slices of all rows, then the lower ones."""
        weight = self.weight.detach().to(torch.float64)
        bits = slice_bits(weight.shape[-1])
        magnet = _magnet(weight, bits)
        high = _round_to_grid(weight, magnet)
        low = _round_to_grid(weight - high, magnet * 2.0**-bits)
        return torch.cat([high, low], dim=-2)

    def forward(self, x: Tensor | GridRows, out_dtype: torch.dtype | None = None) -> Tensor:
        """`x`: `[M, K]` (`[M, G, K]` with groups) or its `grid_rows`, which several maps can share.

        Returns `[M, N]` (`[M, G, N]`) in `out_dtype`, the weight's dtype unless given.
        """
        if self._slices is None:
            self._slices = self._make_slices()
        rows = (x if isinstance(x, GridRows) else grid_rows(x)).values
        shape = self.weight.shape
        if rows.dim() != len(shape) or rows.shape[-1] != shape[-1]:
            raise ValueError(f"rows of shape {tuple(rows.shape)} do not fit a weight of shape {tuple(shape)}")
        if rows.dim() == 3:
            rows = rows.transpose(0, 1)
        sums = torch.matmul(rows, self._slices.transpose(-1, -2))
        y = sums[..., : shape[-2]] + sums[..., shape[-2] :]
        return (y.transpose(0, 1) if y.dim() == 3 else y).to(out_dtype or self.weight.dtype)


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a short axis (removed), added in index order."""
    first, *rest = x.unbind(dim)
    for part in rest:
        first = first + part
    return first


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """float64 `1 / sqrt(mean(x**2) + eps)` over the last axis (kept)."""
    width = x.shape[-1]
    bits = (_SUM_BITS - math.ceil(math.log2(width))) // 2
    square = _round_to_grid(x, _magnet(x, bits)).square_().sum(-1, keepdim=True)
    return 1.0 / (square / width + eps).sqrt()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS normalisation of the last axis, float32 inside, in `x`'s dtype; no scale if `weight` is None."""
    y = x.to(torch.float32) * inverse_rms(x, eps).to(torch.float32)
    return (y if weight is None else y * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation with a learned float32 scale `weight [width]`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` in and out, same dtype."""
        return rms_norm(x, self.weight, self.eps)


def _polynomial(x: Tensor, terms: list[float]) -> Tensor:
    y = x * terms[-1]
    for term in terms[-2:0:-1]:
        y.add_(term).mul_(x)
    return y.add_(terms[0])


def exp(x: Tensor) -> Tensor:
    """float64 `e**x`, relative error below 1e-9; the argument is clamped to [-700, 700]."""
    x = x.to(torch.float64).clamp(-700.0, 700.0)
    n = (x * _LOG2_E).round_()
    r = (x - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    # 2**n from its bits; a NaN has no integer, and the polynomial already carries it.
    power = ((n.nan_to_num(0.0).to(torch.int64) + 1023) << 52).view(torch.float64)
    return _polynomial(r, _EXP_TERMS).mul_(power)


def log1p(u: Tensor) -> Tensor:
    """float64 `log(1 + u)` for float64 `u` in [0, 1], error below 1e-10."""
    s = u / (u + 2.0)
    return _polynomial(s * s, _ATANH_TERMS).mul_(s).mul_(2.0)


def sigmoid(x: Tensor) -> Tensor:
    """float64 logistic function."""
    return 1.0 / exp(-x).add_(1.0)


def silu(x: Tensor) -> Tensor:
    """float64 `x * sigmoid(x)`."""
    return x / exp(-x).add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """float64 `log(1 + e**x)`."""
    return x.clamp(min=0.0) + log1p(exp(-x.abs()))
