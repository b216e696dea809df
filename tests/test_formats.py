"""Row codecs and number formats against decoders written from the bit definitions."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch
from formats_by_hand import (
    CODECS,
    E2M1_VALUES,
    IDS,
    KEY4,
    KEY8,
    KEY_EXACT,
    MAIN,
    MAIN_EXACT,
    bits_of_e2m1,
    bits_of_e4m3,
    decode_fp4_by_hand,
    decode_fp8_key_by_hand,
    decode_main_by_hand,
    nearest_even,
    random_rows,
    raw,
    same_bits,
)

from sglang_dsv4 import formats
from sglang_dsv4.formats import check_finite, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, hadamard
from sglang_dsv4.geometry import INDEX_FP8, MAIN_FP8

# e4m3


def test_every_e4m3_code_decodes_to_its_bit_definition():
    codes = torch.arange(256, dtype=torch.uint8)
    expect = torch.tensor([bits_of_e4m3(c) for c in range(256)])
    got = e4m3_decode(codes)
    assert torch.equal(got.isnan(), expect.isnan()) and int(got.isnan().sum()) == 2
    assert same_bits(got.nan_to_num(), expect.nan_to_num())
    assert same_bits(got.nan_to_num(), codes.view(torch.float8_e4m3fn).float().nan_to_num())


def test_every_e4m3_code_survives_decode_and_encode():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = ~e4m3_decode(codes).isnan()
    assert torch.equal(e4m3_encode(e4m3_decode(codes))[finite], codes[finite])


def test_e4m3_rounds_to_nearest_even_between_all_neighbours():
    values = [bits_of_e4m3(c) for c in range(0x7F)]
    probes = []
    for low, high in pairwise(values):
        middle = torch.tensor((low + high) / 2)
        probes += [
            middle,
            torch.nextafter(middle, torch.tensor(0.0)),
            torch.nextafter(middle, torch.tensor(1e9)),
        ]
    probes = torch.stack(probes)
    for sign in (1, -1):
        signed = sign * probes
        assert e4m3_encode(signed).tolist() == [nearest_even(x, values, 0x80) for x in signed.tolist()]


@pytest.mark.parametrize(
    "x, code",
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (2.0**-10, 0x00),
        (-(2.0**-10), 0x80),
        (3 * 2.0**-10, 0x02),
        (2.0**-6, 0x08),
        (448.0, 0x7E),
        (449.0, 0x7E),
        (-1e30, 0xFE),
        (math.inf, 0x7E),
    ],
)
def test_e4m3_zeros_subnormals_and_saturation(x, code):
    assert e4m3_encode(torch.tensor([x])).item() == code


def test_e4m3_keeps_nan():
    assert e4m3_encode(torch.tensor([math.nan])).item() & 0x7F == 0x7F


# ue8m0


def test_every_ue8m0_code_decodes_to_its_power_of_two():
    got = formats.ue8m0_decode(torch.arange(256, dtype=torch.uint8))
    assert got[:255].tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert got[255].isnan()


@pytest.mark.parametrize("exponent", [-22, -21, -8, -1, 0, 1, 8, 60])
def test_main_scale_at_an_exact_power_of_two_is_not_rounded_up(exponent):
    """448 * 2**e needs the scale 2**e; the next float above it already needs 2**(e + 1)."""
    exact = torch.tensor(448 * 2.0**exponent)
    above, below = torch.nextafter(exact, torch.tensor(math.inf)), torch.nextafter(exact, torch.tensor(0.0))
    for amax, want in ((exact, exponent), (above, exponent + 1), (below, exponent)):
        x = torch.zeros(512)
        x[64 + 17] = -amax
        data, scale = MAIN.encode(x)
        assert scale[1] == want + 127
        assert data[64 + 17] == (0xFE if amax <= exact else 0xF6)


@pytest.mark.parametrize("exponent", [-126, -40, -1, 0, 1, 40, 125])
def test_fp4_scale_at_an_exact_power_of_two_is_not_rounded_up(exponent):
    exact = torch.tensor(6 * 2.0**exponent)
    above, below = torch.nextafter(exact, torch.tensor(math.inf)), torch.nextafter(exact, torch.tensor(0.0))
    for amax, want in ((exact, exponent), (above, exponent + 1), (below, max(exponent, -126))):
        x = torch.zeros(128)
        x[33] = amax
        data, scale = KEY4.encode(x)
        assert scale.tolist() == [1, want + 127, 1, 1]
        assert data[16] == (7 << 4 if amax <= exact else 5 << 4)


@pytest.mark.parametrize("codec, limit, channels, size", [(MAIN, 448.0, 64, 7), (KEY4, 6.0, 32, 4)])
def test_scale_is_the_smallest_power_of_two_that_holds_the_largest_channel(codec, limit, channels, size):
    x = random_rows(64, codec.width, seed=5)
    _, scale = codec.encode(x)
    for row in range(64):
        for block in range(size):
            amax = x[row, block * channels : (block + 1) * channels].abs().max().item()
            s = 2.0 ** (scale[row, block].item() - 127)
            floor = 1e-4 if codec is MAIN else 0.0
            assert amax <= limit * s and max(amax, floor) > limit * s / 2


# FP8 main row


def test_main_row_bytes_decode_by_hand():
    x = random_rows(24, 512)
    data, scale = MAIN.encode(x)
    assert data.shape == (24, 576) and scale.shape == (24, 8) and data.dtype == scale.dtype == torch.uint8
    by_hand = torch.tensor([decode_main_by_hand(raw(d), raw(s)) for d, s in zip(data, scale, strict=True)])
    assert same_bits(MAIN.decode(data, scale), by_hand)
    assert (scale[:, 7] == 0).all()


def test_main_row_codes_are_the_nearest_ones():
    values = [bits_of_e4m3(c) for c in range(0x7F)]
    x = random_rows(4, 512, seed=1)
    data, scale = MAIN.encode(x)
    for row in range(4):
        for c in range(448):
            scaled = x[row, c].item() / 2.0 ** (scale[row, c // 64].item() - 127)
            assert data[row, c] == nearest_even(scaled, values, 0x80)


def test_main_row_keeps_rotary_channels_in_bf16():
    x = torch.zeros(512)
    x[448:452] = torch.tensor(
        [1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -0.0, 3e38]
    )  # two ties, a sign, a large value
    data, _ = MAIN.encode(x)
    assert raw(data[448:456]) == bytes.fromhex("803f 823f 0080 627f")


def test_main_row_of_zeros_has_the_floor_scale():
    """Scale of amax 1e-4: 1e-4 / 448 = 2**-22.1, so 2**-22."""
    data, scale = MAIN.encode(torch.zeros(2, 512))
    assert not data.any()
    assert scale.tolist() == [[127 - 22] * 7 + [0]] * 2


def test_main_row_below_the_floor_uses_the_floor_scale():
    x = torch.zeros(512)
    x[0], x[64] = 9e-5, 1e-30
    data, scale = MAIN.encode(x)
    assert scale[:2].tolist() == [105, 105]
    assert MAIN.decode(data, scale)[0].item() == pytest.approx(9e-5, rel=2**-4)
    assert data[64] == 0


def test_main_outlier_only_costs_its_own_64_channels():
    x = torch.full((512,), 1.0)
    x[130] = 1e6
    y = MAIN.round_trip(x)
    assert (y[:128] == 1).all() and (y[192:] == 1).all()
    assert y[130] == pytest.approx(1e6, rel=2**-4)
    assert (y[128:192] != 1).any()


def test_main_signs_survive():
    x = random_rows(8, 512, seed=3)
    x[:, 5] = -0.0
    y = MAIN.round_trip(x)
    assert torch.equal(torch.signbit(x), torch.signbit(y))


def test_main_error_is_within_half_a_step():
    x = random_rows(64, 512, seed=4)
    data, scale = MAIN.encode(x)
    s = formats.ue8m0_decode(scale[:, :7]).repeat_interleave(64, dim=1)
    error = (MAIN.decode(data, scale) - x).abs()
    assert (error[:, :448] <= torch.maximum(x[:, :448].abs() * 2**-4, s * 2**-10)).all()
    assert (error[:, 448:] <= x[:, 448:].abs() * 2**-8).all()


# MXFP4 keys


def test_every_e2m1_code_decodes_to_its_bit_definition():
    got = e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert same_bits(got, torch.tensor([bits_of_e2m1(c) for c in range(16)]))
    assert got[:8].tolist() == E2M1_VALUES
    assert e2m1_encode(got).tolist() == list(range(16))


@pytest.mark.parametrize(
    "x, code",
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (0.0, 0),
        (-0.0, 8),
        (-0.25, 8),
        (-0.75, 10),
        (-5.0, 14),
        (6.0, 7),
        (1e9, 7),
        (-1e9, 15),
        (1e-40, 0),
        (-1e-40, 8),
    ],
)
def test_e2m1_ties_go_to_the_even_code_and_signs_stay(x, code):
    assert e2m1_encode(torch.tensor([x])).item() == code


def test_e2m1_rounds_to_nearest_beside_every_tie():
    for low, high in pairwise(E2M1_VALUES):
        middle = torch.tensor((low + high) / 2)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
        assert e2m1_encode(torch.stack((below, above))).tolist() == [
            E2M1_VALUES.index(low),
            E2M1_VALUES.index(high),
        ]


def test_fp4_even_channel_is_the_low_nibble():
    x = torch.zeros(128)
    x[0], x[1], x[2], x[127] = 6.0, -1.0, 0.5, 3.0
    x[32], x[64] = 6.0, 6.0
    x[96] = 6.0
    data, scale = KEY4.encode(x)
    assert data.shape == (64,) and scale.tolist() == [127] * 4
    assert data[0] == 0xA7 and data[1] == 0x01 and data[63] == 0x50


def test_fp4_key_bytes_decode_by_hand():
    x = random_rows(64, 128)
    data, scale = KEY4.encode(x)
    by_hand = torch.tensor([decode_fp4_by_hand(raw(d), raw(s)) for d, s in zip(data, scale, strict=True)])
    assert same_bits(KEY4.decode(data, scale), by_hand)


def test_fp4_key_codes_are_the_nearest_ones():
    x = random_rows(8, 128, seed=2)
    data, scale = KEY4.encode(x)
    for row in range(8):
        for c in range(128):
            code = data[row, c // 2].item() >> 4 * (c % 2) & 0xF
            scaled = x[row, c].item() / 2.0 ** (scale[row, c // 32].item() - 127)
            assert code == nearest_even(scaled, E2M1_VALUES, 8)


def test_fp4_key_of_zeros_has_the_smallest_normal_scale():
    data, scale = KEY4.encode(torch.zeros(128))
    assert not data.any() and scale.tolist() == [1] * 4
    x = torch.full((128,), -0.0)
    assert KEY4.encode(x)[0].tolist() == [0x88] * 64
    assert same_bits(KEY4.round_trip(x), x)


def test_fp4_key_of_tiny_channels_is_not_flushed_to_the_fp8_floor():
    x = torch.full((128,), 3e-7)
    assert KEY4.round_trip(x)[0].item() == pytest.approx(3e-7, rel=0.2)


def test_fp4_outlier_only_costs_its_own_32_channels():
    x = torch.ones(128)
    x[40] = 1e5
    y = KEY4.round_trip(x)
    assert (y[:32] == 1).all() and (y[64:] == 1).all()
    assert (y[32:40] == 0).all() and y[40] == pytest.approx(1e5, rel=0.2)


def test_fp4_gaussian_key_stays_close():
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(9))
    y = KEY4.round_trip(x)
    assert (y - x).norm() / x.norm() < 0.13
    assert torch.nn.functional.cosine_similarity(x, y, dim=-1).mean() > 0.99


# FP8 keys


def test_fp8_key_scale_is_amax_over_448_in_float32():
    x = random_rows(16, 128, seed=6)
    data, scale = KEY8.encode(x)
    stored = [struct.unpack("<f", raw(s))[0] for s in scale]
    expect = torch.clamp(x.abs().amax(-1), min=1e-4) / torch.tensor(448.0)
    assert stored == expect.tolist()
    by_hand = torch.tensor([decode_fp8_key_by_hand(raw(d), raw(s)) for d, s in zip(data, scale, strict=True)])
    assert same_bits(KEY8.decode(data, scale), by_hand)


def test_fp8_key_largest_channel_takes_the_largest_code():
    x = torch.zeros(128)
    x[7], x[8] = -3.7, 3.7
    data, _ = KEY8.encode(x)
    assert data[7] == 0xFE and data[8] == 0x7E


def test_fp8_key_of_zeros_has_the_floor_scale():
    data, scale = KEY8.encode(torch.zeros(128))
    assert not data.any()
    assert struct.unpack("<f", raw(scale))[0] == (torch.tensor(1e-4) / 448).item()


# Exact rows


@pytest.mark.parametrize("codec", [MAIN_EXACT, KEY_EXACT], ids=["main", "key"])
def test_fp32_rows_are_identical_bit_for_bit(codec):
    g = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (32, codec.width), generator=g, dtype=torch.int64).int()
    x = bits.view(torch.float32)  # NaN payloads, infinities and subnormals among them
    data, scale = codec.encode(x)
    assert raw(data[3]) == struct.pack(f"<{codec.width}i", *bits[3].tolist()) and scale.shape == (32, 0)
    assert torch.equal(codec.decode(data, scale).view(torch.int32), bits)
    assert torch.equal(codec.round_trip(x).view(torch.int32), bits)
    pool = torch.zeros(1, codec.layout.group_bytes, dtype=torch.uint8)
    rows = torch.arange(32) * 2
    codec.scatter(pool, rows, x)
    assert torch.equal(codec.gather(pool, rows).view(torch.int32), bits)


# All codecs


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_codec_takes_any_float_dtype_leading_shape_and_stride(codec, dtype):
    x = random_rows(3, 5, codec.width, seed=7).to(dtype)
    data, scale = codec.encode(x)
    assert data.shape == (3, 5, codec.layout.data_bytes) and scale.shape == (3, 5, codec.layout.scale_bytes)
    y = codec.decode(data, scale)
    assert y.dtype == torch.float32 and y.shape == x.shape
    flat = codec.round_trip(x.float().reshape(15, codec.width))
    assert same_bits(y.reshape(15, codec.width), flat)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(codec.round_trip(strided), y)
    assert same_bits(codec.round_trip(x[1, 2]), y[1, 2])


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_round_trip_of_a_stored_row_changes_nothing(codec):
    once = codec.round_trip(random_rows(64, codec.width, seed=8))
    assert torch.equal(codec.round_trip(once), once)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_rows_do_not_depend_on_their_neighbours(codec):
    x = random_rows(9, codec.width, seed=10)
    together = codec.encode(x)
    for row in range(9):
        data, scale = codec.encode(x[row])
        assert torch.equal(data, together[0][row]) and torch.equal(scale, together[1][row])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_check_finite_refuses_what_a_row_cannot_hold(bad):
    x = torch.zeros(4, 512)
    check_finite(x)
    x[2, 500] = bad
    with pytest.raises(ValueError, match="entry has 1 non-finite values of 2048") as error:
        check_finite(x, "entry")
    assert "\n" not in str(error.value)


def test_layouts_of_the_other_pool_are_refused():
    with pytest.raises(ValueError, match="MAIN_FP8"):
        formats.main_codec(INDEX_FP8)
    with pytest.raises(ValueError, match="INDEX_FP4"):
        formats.index_codec(MAIN_FP8)


# Hadamard


def sylvester(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


def test_hadamard_is_the_sylvester_matrix():
    got = hadamard(torch.eye(128))
    assert torch.equal(torch.sign(got).double(), sylvester(128))
    assert (got.abs() == torch.tensor(1 / math.sqrt(128))).all()


def test_hadamard_is_orthonormal_and_its_own_inverse():
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
    y = hadamard(x)
    torch.testing.assert_close(y.double(), x.double() @ sylvester(128) / math.sqrt(128), rtol=0, atol=2e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(hadamard(y), x, rtol=0, atol=2e-6)


def test_hadamard_keeps_dot_products():
    q, k = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=0, atol=2e-5)


def test_hadamard_adds_in_the_documented_order():
    """Strides 1, 2, 4 ... 64, one multiplication at the end: the bits depend on it."""
    x = random_rows(1, 128, seed=17)[0]
    y = x.clone()
    for stride in (1, 2, 4, 8, 16, 32, 64):
        for i in range(128):
            if not i & stride:
                a, b = y[i].clone(), y[i + stride].clone()
                y[i], y[i + stride] = a + b, a - b
    y *= torch.tensor(1 / math.sqrt(128), dtype=torch.float32)
    assert same_bits(hadamard(x), y)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_hadamard_of_another_length_is_refused(n):
    with pytest.raises(ValueError, match="power of two"):
        hadamard(torch.zeros(2, n))
