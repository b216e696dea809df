"""Decoders written from the bit definitions, sharing nothing with the code under test, and test rows."""

from __future__ import annotations

import math
import struct

import torch

from sglang_dsv4 import formats
from sglang_dsv4.geometry import INDEX_FP4, INDEX_FP8, INDEX_FP32, MAIN_FP8, MAIN_FP32

MAIN = formats.main_codec(MAIN_FP8)
MAIN_EXACT = formats.main_codec(MAIN_FP32)
KEY4 = formats.index_codec(INDEX_FP4)
KEY8 = formats.index_codec(INDEX_FP8)
KEY_EXACT = formats.index_codec(INDEX_FP32)
CODECS = [MAIN, MAIN_EXACT, KEY4, KEY8, KEY_EXACT]
IDS = ["main-fp8", "main-fp32", "key-fp4", "key-fp8", "key-fp32"]

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def bits_of_e4m3(code: int) -> float:
    """Sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, only S.1111.111 is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def bits_of_e2m1(code: int) -> float:
    """Sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def nearest_even(x: float, values: list[float], sign_bit: int) -> int:
    """Code of the value nearest to x: its index in the ascending `values`, even at a tie, and the sign."""
    best = min(range(len(values)), key=lambda i: (abs(values[i] - abs(x)), i % 2))
    return best | (sign_bit if math.copysign(1.0, x) < 0 else 0)


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def decode_main_by_hand(data: bytes, scale: bytes) -> list[float]:
    """512 channels of a 576 B data row and its 8 B scale row."""
    nope = [bits_of_e4m3(data[c]) * 2.0 ** (scale[c // 64] - 127) for c in range(448)]
    rope = [struct.unpack("<f", b"\0\0" + data[448 + 2 * k : 450 + 2 * k])[0] for k in range(64)]
    return nope + rope


def decode_fp4_by_hand(data: bytes, scale: bytes) -> list[float]:
    """128 channels of a 64 B data row and its 4 B scale row."""
    codes = [data[c // 2] >> 4 if c % 2 else data[c // 2] & 0xF for c in range(128)]
    return [bits_of_e2m1(code) * 2.0 ** (scale[c // 32] - 127) for c, code in enumerate(codes)]


def decode_fp8_key_by_hand(data: bytes, scale: bytes) -> list[float]:
    factor = torch.tensor(struct.unpack("<f", scale)[0])
    return [float(torch.tensor(bits_of_e4m3(code)) * factor) for code in data]


def decode_by_hand(codec: formats.RowCodec, data: bytes, scale: bytes) -> list[float]:
    if codec is MAIN:
        return decode_main_by_hand(data, scale)
    if codec is KEY4:
        return decode_fp4_by_hand(data, scale)
    if codec is KEY8:
        return decode_fp8_key_by_hand(data, scale)
    return list(struct.unpack(f"<{codec.width}f", data))


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian channels with outliers and rows of very different size."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    x *= torch.where(torch.rand(*shape, generator=g) < 0.02, 40.0, 1.0)
    return x * torch.exp2(torch.randint(-20, 21, (*shape[:-1], 1), generator=g))
