"""Wrong arguments of the state kernels: one ValueError that names the argument, before anything is launched.

Everything lies on the CPU: the checks come before the device is touched, and the device is the last of them.
"""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Guarded, Plan, csa_buffers, hca_buffers, make_step, window_pool

from sglang_dsv4.formats import index_codec, main_codec
from sglang_dsv4.geometry import INDEX_FP4, INDEX_FP32, MAIN_FP8, MAIN_FP32
from sglang_dsv4.ops.append_window import WindowNorm, append_window_cuda
from sglang_dsv4.ops.copy_state import copy_state_cuda
from sglang_dsv4.ops.flush import flush_csa_cuda, flush_hca_cuda
from sglang_dsv4.ops.gather import gather_cuda
from sglang_dsv4.ops.meta import Workspace

CPU = torch.device("cpu")
CODEC = main_codec(MAIN_FP8)


def step():
    return make_step(Plan([(3, 2), (0, 1)]), CPU)


def append_arguments():
    meta, numbers = step()
    return {
        "window": window_pool(numbers, Guarded(CPU)),
        "kv": torch.zeros(meta.num_tokens, 512, dtype=torch.bfloat16),
        "meta": meta,
        "codec": CODEC,
    }


def gather_arguments():
    arguments = append_arguments()
    meta = arguments["meta"]
    plan = Workspace.plan(meta.prefix_lens.tolist(), meta.seq_lens.tolist(), 4, CPU)
    workspace = torch.zeros(plan.num_rows, 512, dtype=torch.bfloat16)
    entries = torch.zeros(4, MAIN_FP8.group_bytes, dtype=torch.uint8)
    return {**arguments, "workspace": workspace, "entries": entries, "plan": plan, "ratio": 4}


def csa_arguments():
    meta, numbers = step()
    buffers = csa_buffers(meta, numbers, INDEX_FP4, Guarded(CPU))
    codecs = {"codec": CODEC, "index_codec": index_codec(INDEX_FP4)}
    return {**{k: getattr(buffers, k) for k in buffers.__dataclass_fields__}, "meta": meta, **codecs}


def hca_arguments():
    meta, numbers = step()
    buffers = hca_buffers(meta, numbers, Guarded(CPU))
    return {**{k: getattr(buffers, k) for k in buffers.__dataclass_fields__}, "meta": meta, "codec": CODEC}


def copy_arguments():
    return {
        "windows": torch.zeros(2, 3, 2 * MAIN_FP8.group_bytes, dtype=torch.uint8),
        "overlaps": torch.zeros(1, 3, 4, 2, 640),
        "src": torch.tensor([1]),
        "dst": torch.tensor([2]),
    }


OPERATIONS = {
    "append_window": (append_window_cuda, append_arguments),
    "gather": (gather_cuda, gather_arguments),
    "flush_csa": (flush_csa_cuda, csa_arguments),
    "flush_hca": (flush_hca_cuda, hca_arguments),
    "copy_state": (copy_state_cuda, copy_arguments),
}


def unaligned(x: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
    return flat[1:].view(x.shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*x.shape, 2, dtype=x.dtype)[..., 0]


CASES = [
    ("append_window", "kv", lambda x: x.half(), r"kv is float16 \[3, 512\], must be bfloat16 or float32 \[3, 512\]"),
    ("append_window", "kv", lambda x: x[:2], r"kv is bfloat16 \[2, 512\], must be"),
    ("append_window", "kv", lambda x: x[:, :511], r"kv is bfloat16 \[3, 511\], must be"),
    ("append_window", "kv", strided, r"kv is strided .* must be contiguous in all but its first 1"),
    ("append_window", "kv", unaligned, r"kv is at address .* must be aligned to 16 bytes"),
    ("append_window", "kv", lambda x: None, r"kv is NoneType, must be a tensor"),
    ("append_window", "kv", lambda x: x.to("meta"), r"kv is on meta, must be on cpu"),
    ("append_window", "window", lambda x: x[:, :-8], r"window is uint8 .* must be uint8 \[any, 37440\]"),
    ("append_window", "window", lambda x: x.float(), r"window is float32 .* must be uint8"),
    ("append_window", "codec", lambda x: main_codec(MAIN_FP32), r"codec is a codec of fp32 rows .* must be fp8"),
    ("gather", "workspace", lambda x: x.float(), r"workspace is float32 .* must be bfloat16"),
    ("gather", "workspace", lambda x: x[:-1], r"workspace is \[\d+, 512\], must be \[\d+, 512\] or more rows"),
    ("gather", "entries", lambda x: None, r"entries is None, must be the entry pool of a layer of ratio 4"),
    ("gather", "ratio", lambda x: 64, r"ratio is 64, must be 0, 4 or 128"),
    ("flush_csa", "main_kv_score", lambda x: x[:, :1024], r"main_kv_score is float32 \[3, 1024\], must be"),
    ("flush_csa", "index_kv_score", lambda x: x.bfloat16(), r"index_kv_score is bfloat16 .* must be float32"),
    ("flush_csa", "overlap", lambda x: x.bfloat16(), r"overlap is bfloat16 .* must be float32"),
    ("flush_csa", "tail", lambda x: x[:, :, 0], r"tail is float32 .* must be float32 \[any, 4, 2, 2, 640\]"),
    ("flush_csa", "index_keys", lambda x: x[:, :68], r"index_keys is uint8 .* must be uint8 \[any, 4352\]"),
    ("flush_csa", "index_codec", lambda x: index_codec(INDEX_FP32), r"index_codec is a codec of fp32 rows"),
    ("flush_hca", "kv_score", lambda x: x.double(), r"kv_score is float64 .* must be bfloat16 or float32"),
    ("flush_hca", "tail", strided, r"tail is strided"),
    ("copy_state", "windows", lambda x: x[:, :, :-16], r"windows is uint8 .* must be uint8 \[2, 3, 74880\]|windows"),
    (
        "copy_state",
        "overlaps",
        lambda x: x[:, :2],
        r"overlaps is float32 .* must be float32 \[any, 3, 4, 2, 640\]|\[CSA",
    ),
    ("copy_state", "src", lambda x: x.int(), r"src is int32 \[1\], must be int64"),
    ("copy_state", "dst", lambda x: torch.tensor([1, 2]), r"dst is int64 \[2\], must be int64 \[1\]"),
]


@pytest.mark.parametrize(("op", "argument", "spoil", "message"), CASES)
def test_a_bad_argument_is_named(op, argument, spoil, message):
    face, make = OPERATIONS[op]
    arguments = make()
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(ValueError, match=message) as caught:
        face(**arguments)
    assert str(caught.value).startswith(f"{op}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("slots", lambda x: x.long()),
        ("positions", lambda x: x.int()),
        ("token_offsets", lambda x: x[:-1]),
        ("token_to_req", lambda x: x[:-1]),
        ("page_table", lambda x: x[:1]),
        ("snapshot_lens", lambda x: torch.zeros(2, 3, dtype=torch.int32)),
        ("page_size", lambda x: 64),
    ],
)
@pytest.mark.parametrize("op", ["append_window", "gather", "flush_csa", "flush_hca"])
def test_bad_step_metadata_is_named(op, field, spoil):
    face, make = OPERATIONS[op]
    arguments = make()
    meta = arguments["meta"]
    setattr(meta, field, spoil(getattr(meta, field)))
    with pytest.raises(ValueError, match=rf"^{op}: meta\.\w+ is ") as caught:
        face(**arguments)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize("op", OPERATIONS)
def test_good_arguments_on_a_cpu_are_refused_for_their_device_alone(op):
    face, make = OPERATIONS[op]
    with pytest.raises(ValueError, match=rf"^{op}: device is cpu, must be cuda"):
        face(**make())


def test_weights_of_the_wrong_kind_are_named():
    arguments = csa_arguments()
    arguments["index"].ape = arguments["index"].ape.bfloat16()
    with pytest.raises(ValueError, match=r"flush_csa: index\.ape is bfloat16 \[4, 256\], must be float32 \[4, 256\]"):
        flush_csa_cuda(**arguments)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weight", torch.zeros(512, dtype=torch.float64), r"norm\.weight is float64 \[512\], must be bfloat16"),
        ("weight", torch.zeros(448), r"norm\.weight is float32 \[448\]"),
        ("weight", torch.zeros(513)[1:], r"norm\.weight is at address"),
        ("rope", torch.zeros(9, 32), r"norm\.rope is float32 \[9, 32\]"),
        ("rope", torch.zeros(0, 64), r"norm\.rope is an empty table, must be a table of at least one"),
        ("rope", torch.zeros(9, 64, dtype=torch.bfloat16), r"norm\.rope is bfloat16"),
    ],
)
def test_a_bad_norm_is_named(field, value, message):
    norm = WindowNorm(torch.zeros(512), 1e-6, torch.zeros(9, 64))
    with pytest.raises(ValueError, match="device is cpu"):
        append_window_cuda(**append_arguments(), norm=norm)
    setattr(norm, field, value)
    with pytest.raises(ValueError, match=f"^append_window: {message}"):
        append_window_cuda(**append_arguments(), norm=norm)


def test_metadata_replaced_after_a_first_step_is_looked_at_again():
    arguments = append_arguments()
    with pytest.raises(ValueError, match="device is cpu"):
        append_window_cuda(**arguments)
    arguments["meta"].slots = arguments["meta"].slots.long()
    with pytest.raises(ValueError, match=r"meta\.slots is int64"):
        append_window_cuda(**arguments)
