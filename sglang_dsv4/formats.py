"""Row codecs: how a window token, an entry or an indexer key becomes the bytes of a row, and back.

Every codec maps float channels to `(data, scale)` uint8 rows of a `RowLayout` and reads them as float32:

=========  =====================================  =====================================================
layout     data bytes                             scale bytes
=========  =====================================  =====================================================
MAIN_FP8   448 e4m3, then 64 bf16                 7 ue8m0 (one per 64 of the first 448 channels), one 0
INDEX_FP4  channel 2k in the low, 2k + 1 in the   4 ue8m0 (one per 32 channels)
           high nibble of byte k
INDEX_FP8  128 e4m3                               one float32
*_FP32     float32                                none
=========  =====================================  =====================================================

Multi-byte values are little endian.  The FP8 main row and the MXFP4 key are what the model was trained with:
their round trip is part of its forward pass.  The float32 rows exist for exact comparisons.

Nothing here waits for the device (no `.item()`, no boolean selection, no tensor built from host values), so
all of it but `check_finite` may be captured in a CUDA graph.  That is also why `encode` does not look for NaN
or infinity: the row it makes of them is unspecified, and `check_finite` refuses them where the host may wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sglang_dsv4.geometry import (
    FP4_QUANT,
    FP8_QUANT,
    GROUP_ROWS,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_FP4,
    INDEX_FP8,
    INDEX_FP32,
    MAIN_FP8,
    MAIN_FP32,
    NOPE_DIM,
    RowLayout,
)

E4M3_MAX = 448.0  # 1.75 * 2**8
E4M3_MAX_EXPONENT, E4M3_MAX_MANTISSA = 8, 0x600000
E2M1_MAX = 6.0  # 1.5 * 2**2
E2M1_MAX_EXPONENT, E2M1_MAX_MANTISSA = 2, 0x400000
FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = 6.0 * 2.0**-126  # the smallest scale stays a normal float32
UE8M0_BIAS = 127


def check_finite(x: Tensor, what: str = "tensor") -> None:
    """Raises ValueError when `x` holds a NaN or an infinity.  Waits for the device."""
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(
            f"{what} has {bad} non-finite values of {x.numel()}: a stored row cannot represent them; "
            f"find the layer that produced them"
        )


def _reinterpret(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes [..., n * itemsize] as [..., n] of `dtype`; a view unless they are strided or misaligned."""
    data = data.contiguous()
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of `x` [..., n] as uint8 [..., n * itemsize]."""
    return x.contiguous().view(torch.uint8)


# Scalar formats


def e4m3_encode(x: Tensor) -> Tensor:
    """float [...] to e4m3 codes, uint8 [...]: clamped to +-448, ties to even, -0 and NaN kept."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """e4m3 codes, uint8 [...], to float32 [...]; exact."""
    return codes.view(torch.float8_e4m3fn).float()


def ue8m0_decode(codes: Tensor) -> Tensor:
    """ue8m0 codes, uint8 [...], to float32 [...]: 2**(code - 127); 255 is NaN."""
    codes = codes.int()
    bits = torch.where(codes == 0, 1 << 22, codes << 23)  # 2**-127 is a subnormal float32
    return torch.where(codes == 255, math.nan, bits.view(torch.float32))


def ue8m0_ceil(amax: Tensor, exponent: int, mantissa: int) -> Tensor:
    """ue8m0 code, int32, of the smallest power of two >= amax / limit.

    `limit` is 2**exponent * (1 + mantissa / 2**23) and `amax` a normal positive float32.  Comparing mantissas
    decides the ceiling exactly; a rounded division, or product with 1 / limit, gives the same code for both
    limits in use.
    """
    bits = amax.view(torch.int32)
    return (bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa).int()


def e2m1_encode(x: Tensor) -> Tensor:
    """float32 [...] to e2m1 codes, uint8 [...] in 0..15: the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6.

    A tie goes to the even code, larger magnitudes saturate at 6.  Bit 3 is the sign, kept for -0 and for
    negatives that round to zero.  NaN gives a zero code.
    """
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    # Strict where the lower neighbour's code is even (a tie stays below), inclusive where the upper one's is.
    for above in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """e2m1 codes, uint8 [...] in 0..15, to float32 [...]; exact, -0 kept."""
    codes = codes.int()
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    # Built from bits: a lookup table would be a host tensor copied in the middle of a captured graph.
    normal = ((exponent + UE8M0_BIAS - 1) << 23) | (mantissa << 22)
    magnitude = torch.where(exponent == 0, mantissa * 0.5, normal.view(torch.float32))
    return torch.where(codes >= 8, -magnitude, magnitude)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform of the last dimension, float [..., 2**k] to float32 [..., 2**k].

    Sylvester order: out[i] = sum_j (-1)**popcount(i & j) x[j] / sqrt(n).  The float32 result is fixed to the
    bit: butterflies with stride 1, 2, 4, ... n/2 in that order, each `(a, b) -> (a + b, a - b)` with a the
    lower channel, then one multiplication by float32(1 / sqrt(n)).  Raises ValueError for other lengths.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"hadamard of {n} channels: it needs a power of two; pass {INDEX_DIM} channels")
    y = x.float()
    stride = 1
    while stride < n:
        pairs = y.unflatten(-1, (n // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return y * (1.0 / math.sqrt(n))


# Row codecs


class RowCodec(ABC):
    """Codec between `width` float channels and the rows of one `RowLayout`.

    `encode` and `decode` work on any leading shape.  `scatter` and `gather` address rows of a pool,
    uint8 [groups, group_bytes], by row id: group `row // 64`, index `row % 64`.
    """

    def __init__(self, layout: RowLayout, width: int) -> None:
        self.layout = layout
        self.width = width

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float [..., width] to uint8 data [..., data_bytes] and uint8 scales [..., scale_bytes]."""

    @abstractmethod
    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        """uint8 data [..., data_bytes] and scales [..., scale_bytes] to float32 [..., width]."""

    def round_trip(self, x: Tensor) -> Tensor:
        """float [..., width] to float32 [..., width] as a later read of the stored row would return it."""
        return self.decode(*self.encode(x))

    def rows_of(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a pool: data [groups, 64, data_bytes] and scales [groups, 64, scale_bytes]."""
        self._check_pool(pool)
        layout = self.layout
        scale_start = GROUP_ROWS * layout.data_bytes
        scale_end = scale_start + GROUP_ROWS * layout.scale_bytes
        data = pool[:, :scale_start].unflatten(1, (GROUP_ROWS, layout.data_bytes))
        scale = pool[:, scale_start:scale_end].unflatten(1, (GROUP_ROWS, layout.scale_bytes))
        return data, scale

    def scatter(self, pool: Tensor, rows: Tensor, x: Tensor) -> None:
        """Encodes x, float [M, width], into the pool's rows, int64 [M]; rows < 0 leave every byte as it was.

        Valid rows must be distinct.  Raises IndexError (CPU) or a device assertion for a row past the pool.
        """
        if rows.shape[0] == 0:
            return
        data, scale = self.encode(x)
        data_rows, scale_rows = self.rows_of(pool)
        rows = rows.long()
        valid = rows >= 0
        # A masked element repeats the first valid one: equal bytes meet on one row, so the order of writes
        # cannot matter.  With no valid element they all put row 0's own bytes back.
        first = valid.int().argmax(dim=0, keepdim=True)
        target = torch.where(valid, rows, rows.index_select(0, first).clamp(min=0))
        group, index = target // GROUP_ROWS, target % GROUP_ROWS
        for part, pool_rows in ((data, data_rows), (scale, scale_rows)):
            if part.shape[-1] == 0:
                continue
            spare = torch.where(valid.any(), part.index_select(0, first), pool_rows[0, 0])
            pool_rows[group, index] = torch.where(valid[:, None], part, spare)

    def gather(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Decodes the pool's rows, int64 [...], to float32 [..., width]; rows < 0 give zeros."""
        data_rows, scale_rows = self.rows_of(pool)
        if rows.numel() == 0:
            return torch.zeros(*rows.shape, self.width, device=pool.device)
        safe = rows.long().clamp(min=0)
        group, index = safe // GROUP_ROWS, safe % GROUP_ROWS
        x = self.decode(data_rows[group, index], scale_rows[group, index])
        return torch.where((rows >= 0)[..., None], x, 0.0)

    def _check_pool(self, pool: Tensor) -> None:
        if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != self.layout.group_bytes:
            raise ValueError(
                f"pool is {pool.dtype} {tuple(pool.shape)}: {self.layout.name} rows live in uint8 "
                f"[groups, {self.layout.group_bytes}]; allocate it with the shapes of geometry.py"
            )


class Fp32Codec(RowCodec):
    """The channels themselves: bit for bit."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        data = _bytes(x.float())
        return data, data[..., :0]

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        return _reinterpret(data, torch.float32)


class MainFp8Codec(RowCodec):
    """Window tokens and entries: e4m3 with a power-of-two scale per 64 channels, rotary channels in bf16."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        nope = x[..., :NOPE_DIM].unflatten(-1, (-1, FP8_QUANT))
        amax = nope.abs().amax(-1).clamp(min=FP8_AMAX_FLOOR)
        exponents = ue8m0_ceil(amax, E4M3_MAX_EXPONENT, E4M3_MAX_MANTISSA)
        codes = e4m3_encode(nope / (exponents << 23).view(torch.float32)[..., None])
        data = torch.cat((codes.flatten(-2), _bytes(x[..., NOPE_DIM:].bfloat16())), dim=-1)
        scale = torch.nn.functional.pad(exponents.to(torch.uint8), (0, 1))
        return data, scale

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        nope = e4m3_decode(data[..., :NOPE_DIM]).unflatten(-1, (-1, FP8_QUANT))
        nope = nope * ue8m0_decode(scale[..., : NOPE_DIM // FP8_QUANT])[..., None]
        rope = _reinterpret(data[..., NOPE_DIM:], torch.bfloat16).float()
        return torch.cat((nope.flatten(-2), rope), dim=-1)


class IndexFp4Codec(RowCodec):
    """Indexer keys: MXFP4, a power-of-two scale per 32 channels.  Apply `hadamard` first."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.float().unflatten(-1, (-1, FP4_QUANT))
        amax = groups.abs().amax(-1).clamp(min=FP4_AMAX_FLOOR)
        exponents = ue8m0_ceil(amax, E2M1_MAX_EXPONENT, E2M1_MAX_MANTISSA)
        codes = e2m1_encode(groups / (exponents << 23).view(torch.float32)[..., None]).flatten(-2)
        return codes[..., 0::2] | (codes[..., 1::2] << 4), exponents.to(torch.uint8)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
        groups = e2m1_decode(codes).unflatten(-1, (-1, FP4_QUANT))
        return (groups * ue8m0_decode(scale)[..., None]).flatten(-2)


class IndexFp8Codec(RowCodec):
    """Indexer keys: e4m3 with one float32 scale per key.  Apply `hadamard` first."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=FP8_AMAX_FLOOR) / E4M3_MAX
        return e4m3_encode(x / scale), _bytes(scale)

    def decode(self, data: Tensor, scale: Tensor) -> Tensor:
        return e4m3_decode(data) * _reinterpret(scale, torch.float32)


def main_codec(layout: RowLayout) -> RowCodec:
    """Codec of window tokens and entries (512 channels).  Raises ValueError for any other layout."""
    if layout == MAIN_FP8:
        return MainFp8Codec(layout, HEAD_DIM)
    if layout == MAIN_FP32:
        return Fp32Codec(layout, HEAD_DIM)
    raise ValueError(f"no main row codec for {layout}: only two formats exist; use MAIN_FP8 or MAIN_FP32")


def index_codec(layout: RowLayout) -> RowCodec:
    """Codec of indexer keys (128 channels).  Raises ValueError for any other layout."""
    if layout == INDEX_FP4:
        return IndexFp4Codec(layout, INDEX_DIM)
    if layout == INDEX_FP8:
        return IndexFp8Codec(layout, INDEX_DIM)
    if layout == INDEX_FP32:
        return Fp32Codec(layout, INDEX_DIM)
    raise ValueError(
        f"no indexer key codec for {layout}: only three formats exist; use INDEX_FP4, INDEX_FP8 or INDEX_FP32"
    )
