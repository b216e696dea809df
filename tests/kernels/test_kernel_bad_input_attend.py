"""Wrong arguments of the scoring and attention kernels: one ValueError that names the argument, before any launch.

Everything lies on the CPU: the checks come before the device is touched, and the device is the last of them.
"""

from __future__ import annotations

import pytest
import torch
from kernel_steps import Plan, make_step

from sglang_dsv4.formats import index_codec, main_codec
from sglang_dsv4.geometry import INDEX_FP4, INDEX_FP32, MAIN_FP8, MAIN_FP32
from sglang_dsv4.ops import flash_mla
from sglang_dsv4.ops.checks import Check
from sglang_dsv4.ops.index_query import index_query_cuda
from sglang_dsv4.ops.index_scores import index_scores_cuda
from sglang_dsv4.ops.index_topk import MAX_TOPK, index_topk_cuda
from sglang_dsv4.ops.sparse_attention import choose, sparse_attention_cuda
from sglang_dsv4.ops.sparse_prefill import sparse_prefill_cuda

CPU = torch.device("cpu")
TOKENS, HEADS = 3, 64


def query_arguments():
    return {
        "q": torch.zeros(TOKENS, HEADS, 128, dtype=torch.bfloat16),
        "weights": torch.zeros(TOKENS, HEADS),
        "rope": torch.zeros(32, 64),
        "positions": torch.zeros(TOKENS, dtype=torch.int64),
        "codec": index_codec(INDEX_FP4),
        "scale": 1.0,
    }


def score_arguments():
    meta, _ = make_step(Plan([(30, 2), (9, 1)]), CPU)
    return {
        "q": torch.zeros(TOKENS, HEADS, 128),
        "weights": torch.zeros(TOKENS, HEADS),
        "index_keys": torch.zeros(4, INDEX_FP4.group_bytes, dtype=torch.uint8),
        "meta": meta,
        "codec": index_codec(INDEX_FP4),
        "max_entries": 8,
    }


def topk_arguments():
    return {
        "scores": torch.zeros(TOKENS, 8),
        "meta": score_arguments()["meta"],
        "topk": 512,
        "physical": False,
        "first": None,
        "out": None,
    }


def attention_arguments():
    return {
        "q": torch.zeros(TOKENS, HEADS, 512, dtype=torch.bfloat16),
        "window": torch.zeros(4, MAIN_FP8.group_bytes, dtype=torch.uint8),
        "window_rows": torch.zeros(TOKENS, 128, dtype=torch.int32),
        "entries": torch.zeros(4, MAIN_FP8.group_bytes, dtype=torch.uint8),
        "entry_rows": torch.zeros(TOKENS, 64, dtype=torch.int32),
        "sink": torch.zeros(HEADS),
        "rope": torch.zeros(32, 64),
        "positions": torch.zeros(TOKENS, dtype=torch.int64),
        "scale": 1.0,
        "codec": main_codec(MAIN_FP8),
    }


def prefill_arguments():
    shared = attention_arguments()
    return {
        "q": shared["q"],
        "workspace": torch.zeros(200, 512, dtype=torch.bfloat16),
        "indices": torch.zeros(TOKENS, 192, dtype=torch.int32),
        **{k: shared[k] for k in ("sink", "rope", "positions", "scale")},
    }


OPERATIONS = {
    "index_query": (index_query_cuda, query_arguments),
    "index_scores": (index_scores_cuda, score_arguments),
    "index_topk": (index_topk_cuda, topk_arguments),
    "sparse_attention": (sparse_attention_cuda, attention_arguments),
    "sparse_prefill": (sparse_prefill_cuda, prefill_arguments),
}

WRONG = [
    ("index_query", "q", lambda x: x.half()),
    ("index_query", "q", lambda x: x[..., :64]),
    ("index_query", "q", lambda x: torch.zeros(TOKENS, 65, 128)),
    ("index_query", "q", lambda x: torch.zeros(TOKENS, HEADS, 256)[..., ::2]),
    ("index_query", "q", lambda x: torch.zeros(TOKENS, HEADS, 129)[..., 1:]),
    ("index_query", "weights", lambda x: x[:2]),
    ("index_query", "weights", lambda x: x.half()),
    ("index_query", "rope", lambda x: x[:, :32]),
    ("index_query", "rope", lambda x: x[:0]),
    ("index_query", "rope", lambda x: x.double()),
    ("index_query", "positions", lambda x: x.int()),
    ("index_query", "codec", lambda x: index_codec(INDEX_FP32)),
    ("index_scores", "q", lambda x: x.half()),
    ("index_scores", "q", lambda x: torch.zeros(TOKENS, 65, 128)),
    ("index_scores", "q", lambda x: torch.zeros(TOKENS, 4096, dtype=torch.uint8)),
    ("index_scores", "q", lambda x: torch.zeros(TOKENS, 32, 128, dtype=torch.uint8)),
    ("index_scores", "weights", lambda x: x[:, :8]),
    ("index_scores", "weights", lambda x: x.double()),
    ("index_scores", "index_keys", lambda x: x[:, :-16]),
    ("index_scores", "index_keys", lambda x: x[:0]),
    ("index_scores", "codec", lambda x: index_codec(INDEX_FP32)),
    ("index_scores", "max_entries", lambda x: 0),
    ("index_topk", "scores", lambda x: x.half()),
    ("index_topk", "scores", lambda x: x[:2]),
    ("index_topk", "scores", lambda x: torch.zeros(8, TOKENS).t()),
    ("index_topk", "topk", lambda x: MAX_TOPK + 1),
    ("index_topk", "first", lambda x: torch.zeros(TOKENS, dtype=torch.int64)),
    ("index_topk", "first", lambda x: torch.zeros(TOKENS + 1, dtype=torch.int32)),
    ("index_topk", "out", lambda x: torch.zeros(TOKENS, 3, dtype=torch.int32)),
    ("index_topk", "out", lambda x: torch.zeros(TOKENS, 4)),
    ("sparse_attention", "q", lambda x: x.float()),
    ("sparse_attention", "q", lambda x: x[..., :256]),
    ("sparse_attention", "window_rows", lambda x: x[:, :64]),
    ("sparse_attention", "entry_rows", lambda x: x.long()),
    ("sparse_attention", "entry_rows", lambda x: None),
    ("sparse_attention", "sink", lambda x: x[:8]),
    ("sparse_attention", "rope", lambda x: x[:, :32]),
    ("sparse_attention", "positions", lambda x: x.int()),
    ("sparse_attention", "scale", lambda x: -1.0),
    ("sparse_attention", "codec", lambda x: main_codec(MAIN_FP32)),
    ("sparse_prefill", "workspace", lambda x: x.float()),
    ("sparse_prefill", "indices", lambda x: x.long()),
    ("sparse_prefill", "indices", lambda x: x[:1]),
]


@pytest.mark.parametrize("op,argument,change", WRONG, ids=[f"{op}-{a}-{i}" for i, (op, a, _) in enumerate(WRONG)])
def test_a_wrong_argument_is_named(op, argument, change):
    run, build = OPERATIONS[op]
    arguments = build()
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"^{op}: {argument}\b.* must be ") as caught:
        run(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", OPERATIONS)
def test_only_the_device_is_wrong_with_arguments_on_a_cpu(op):
    run, build = OPERATIONS[op]
    with pytest.raises(ValueError, match=f"^{op}: device is cpu"):
        run(**build())


def test_an_unknown_kernel_is_named():
    for kernel, arch in (("fastest", "90a"), ("hopper", "80")):
        with pytest.raises(ValueError, match=r"^sparse_attention: kernel is"):
            choose(kernel, 64, arch, Check("sparse_attention"))


@pytest.mark.parametrize(
    "heads,arch,served,kernel",
    [
        (64, "90a", True, "hopper"),
        (128, "90a", True, "flash_mla"),
        (64, "100a", True, "flash_mla"),
        (32, "90a", False, "hopper"),
        (64, "120a", False, "portable"),
    ],
)
def test_decode_takes_the_kernel_that_was_fastest(monkeypatch, heads, arch, served, kernel):
    monkeypatch.setattr(flash_mla, "serves", lambda heads, arch: served)
    assert choose("auto", heads, arch, Check("sparse_attention")) == kernel
