"""Random layers and inputs for tests of the operations; the same seed gives the same numbers."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_dsv4.attention.core import LayerInputs, LayerParams, Step, attend
from sglang_dsv4.geometry import INDEX_LAYOUTS, MAIN_LAYOUTS, Geometry
from sglang_dsv4.ops.flush import CompressorParams

RATIOS = (0, 4, 128)
HEADS, INDEX_HEADS = 4, 16


def geometry(*, store: str = "fp8", page: int = 128, topk: int = 24) -> Geometry:
    keys = {"fp8": "fp4", "fp32": "fp32"}[store]
    return Geometry(RATIOS, HEADS, 64, INDEX_HEADS, topk, page, MAIN_LAYOUTS[store], INDEX_LAYOUTS[keys])


def rope_table(length: int) -> torch.Tensor:
    angle = torch.arange(length)[:, None].double() * 10000.0 ** (-torch.arange(32).double() / 32)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def layer(ratio: int, *, topk: int = 24, length: int = 4096, seed: int = 0) -> LayerParams:
    g = torch.Generator().manual_seed(seed * 1000 + ratio)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    rope = rope_table(length)
    main = index = None
    if ratio:
        wide = 2 if ratio == 4 else 1
        main = CompressorParams(random(ratio, wide * 512), 1 + 0.1 * random(512), 1e-6, rope)
    if ratio == 4:
        index = CompressorParams(random(4, 256), 1 + 0.1 * random(128), 1e-6, rope)
    return LayerParams(RATIOS.index(ratio), ratio, HEADS, 512**-0.5, random(HEADS), rope, main, index, topk)


def inputs(ratio: int, tokens: int, *, seed: int = 0) -> LayerInputs:
    g = torch.Generator().manual_seed(seed * 1000 + ratio + 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    x = LayerInputs(3 * random(tokens, HEADS, 512), random(tokens, 512))
    if ratio:
        x = replace(x, kv_score=random(tokens, 2 * (2 if ratio == 4 else 1) * 512))
    if ratio == 4:
        x = replace(
            x,
            index_kv_score=random(tokens, 512),
            index_q=random(tokens, INDEX_HEADS, 128),
            index_weights=random(tokens, INDEX_HEADS),
        )
    return x


def part(x: LayerInputs, *spans: tuple[int, int], padding: int = 0) -> LayerInputs:
    """The tokens of the spans, then NaN padding."""

    def cut(t: torch.Tensor | float | None) -> torch.Tensor | float | None:
        if not isinstance(t, torch.Tensor):
            return t
        rows = [t[a:b] for a, b in spans]
        if padding:
            rows.append(torch.full((padding, *t.shape[1:]), float("nan")))
        return torch.cat(rows)

    return LayerInputs(*(cut(getattr(x, f)) for f in x.__dataclass_fields__))


def run(params: LayerParams, x: LayerInputs, step: Step) -> torch.Tensor:
    return attend(params, x, step)
