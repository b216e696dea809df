"""SGLang's own DeepSeek-V4 kernels that do the work of append_window and flush, as rivals.

They are compiled by SGLang 0.5.23 from its sources, so only these have to be there: where the rest of SGLang cannot
be imported, the handful of helpers that its kernel loader asks for are stood in by constants of a CUDA machine.

One decode step of a CSA layer is five launches there: the window rows' store, and for main rows and indexer keys
each the compression (state write included) and the norm, rotation, quantisation and store. The plan of a step is
made once for all layers and is not timed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4.geometry import CSA_RATIO, HEAD_DIM, INDEX_DIM, INDEX_FP4, MAIN_FP8

NAME = "SGLang 0.5.23 (store, 2 x compress, 2 x norm-rope-store)"
PAGE = 64


class _Setting:
    def get(self) -> Any:
        return None


class _Settings:
    def __getattr__(self, name: str) -> _Setting:
        return _Setting()


def _stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def _package(name: str, path: str) -> None:
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module


@functools.cache
def load() -> dict[str, Any] | None:
    """The functions by name, or None without SGLang's sources."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = next(iter(spec.submodule_search_locations))
    try:
        importlib.import_module("sglang.kernels.ops.attention.dsv4")
    except Exception:
        for name in [n for n in sys.modules if n == "sglang" or n.startswith("sglang.")]:
            del sys.modules[name]
        for name in ("", ".kernels", ".kernels.ops", ".kernels.ops.attention", ".kernels.ops.attention.dsv4"):
            _package("sglang" + name, root + name.replace(".", "/"))
        no, version = (lambda: False), tuple(int(v) for v in (torch.version.cuda or "0.0").split("."))
        common: dict[str, Any] = {"is_cuda": lambda: True, "is_hip": no, "is_xpu": no, "is_gfx95_supported": no}
        common["get_cuda_version"] = lambda: version
        _stand_in("sglang.srt")
        _stand_in("sglang.srt.environ", envs=_Settings())
        _stand_in("sglang.srt.utils", **common)
        _stand_in("sglang.srt.utils.common", **common)
        for name in ("sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.layers.attention.dsa"):
            _stand_in(name)
        _stand_in(
            "sglang.srt.layers.attention.dsa.utils",
            INDEXER_K_CACHE_PRESHUFFLE_TILE=0,
            aiter_can_use_preshuffle_paged_mqa=no,
        )
    try:
        compress = importlib.import_module("sglang.kernels.ops.attention.dsv4.compress")
        store = importlib.import_module("sglang.kernels.ops.attention.dsv4.attn")
    except ImportError as error:
        print(f"SGLang's kernels cannot be loaded: {error}", flush=True)
        return None
    return {
        "decode_plan": compress.CompressorDecodePlan,
        "prefill_plan": compress.CompressorPrefillPlan,
        "compress": compress.compress_forward,
        "finish": compress.compress_norm_rope_store,
        "store": store.fused_store_cache,
    }


class Compressor:
    """One compressor's rotated inputs and its state ring; `launch` is what a layer runs."""

    def __init__(self, functions: dict[str, Any], sets: int, batch: int, width: int, device: torch.device) -> None:
        self.functions, self.width = functions, width
        self.x = torch.randn(sets, batch, 4 * width, device=device)
        self.ring = torch.randn(2 * (1 + sets * batch), CSA_RATIO, 4 * width, device=device)
        self.ape = torch.randn(2 * CSA_RATIO, width, device=device)
        self.norm = torch.ones(width, device=device)
        self.pooled = torch.empty(sets, batch, width, device=device)

    def launch(self, i: int, plan: Any, freqs: Any, where: torch.Tensor, pool: torch.Tensor) -> None:
        self.functions["compress"](
            self.ring, self.x[i], self.ape, plan, head_dim=self.width, compress_ratio=CSA_RATIO, out=self.pooled[i]
        )
        self.functions["finish"](
            self.pooled[i],
            plan,
            norm_weight=self.norm,
            norm_eps=1e-6,
            freq_cis=freqs,
            out_loc=where,
            kvcache=pool,
            page_size=PAGE,
            use_fp4=self.width == INDEX_DIM,
        )


def store_raw(
    kv: torch.Tensor, weight: torch.Tensor, positions: list[torch.Tensor], device: torch.device
) -> Callable[[int], object] | None:
    """Norm, rotation, quantisation and store of raw window rows `kv` [sets, N, 512]; None without SGLang."""
    if load() is None:
        return None
    try:
        module = importlib.import_module("sglang.kernels.ops.attention.dsv4.norm_rope")
    except ImportError as error:
        print(f"SGLang's norm_rope cannot be loaded: {error}", flush=True)
        return None
    sets, batch = kv.shape[:2]
    groups = sets * batch // PAGE + 2
    window = torch.zeros(2 * groups, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    rows = (torch.randperm(groups * PAGE - 1, device=device)[: sets * batch].view(sets, batch) + 1).int()
    freqs = torch.view_as_complex(torch.randn(1 << 16, HEAD_DIM // 16, 2, device=device))
    narrow = [p.int() for p in positions]

    def run(i: int) -> None:
        module.fused_k_norm_rope_flashmla(kv[i], weight, 1e-6, freqs, narrow[i], rows[i], window, PAGE)

    return run


def decode_layer(positions: list[int], sets: int, device: torch.device) -> Callable[[int], object] | None:
    """One CSA layer's decode step of requests at `positions`, on rotated inputs; None without SGLang."""
    functions = load()
    if functions is None:
        return None
    batch = len(positions)
    main = Compressor(functions, sets, batch, HEAD_DIM, device)
    index = Compressor(functions, sets, batch, INDEX_DIM, device)
    groups = sets * batch // PAGE + 2
    # Whole window pools are not needed: what matters is that every row lies apart from the others.
    window = torch.zeros(2 * groups, MAIN_FP8.group_bytes, dtype=torch.uint8, device=device)
    entries, keys = (
        torch.zeros_like(window),
        torch.zeros(2 * groups, INDEX_FP4.group_bytes, dtype=torch.uint8, device=device),
    )
    rows = torch.randperm(groups * PAGE - 1, device=device)[: sets * batch].view(sets, batch) + 1
    kv = torch.randn(sets, batch, HEAD_DIM, device=device, dtype=torch.bfloat16)
    freqs = torch.view_as_complex(torch.randn(max(positions) + 1, HEAD_DIM // 16, 2, device=device))
    position = torch.tensor(positions, dtype=torch.int32, device=device)
    plans = []
    for i in range(sets):
        page = 2 * (1 + i * batch + torch.arange(batch, dtype=torch.int32, device=device))
        here = page + position // CSA_RATIO % 2
        before = page + (position // CSA_RATIO - 1) % 2
        fields = torch.stack([position + 1, here * CSA_RATIO + position % CSA_RATIO, before, here], dim=1)
        plans.append(functions["decode_plan"](CSA_RATIO, fields.int().contiguous().view(torch.uint8)))

    def run(i: int) -> None:
        main.launch(i, plans[i], freqs, rows[i], entries)
        index.launch(i, plans[i], freqs, rows[i], keys)
        functions["store"](kv[i], window, rows[i], page_size=PAGE, type="flashmla")

    return run
