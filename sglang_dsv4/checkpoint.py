"""Writes a DeepSeek-V4 checkpoint of full width and cut depth: real sizes, official names, random weights.

    python -m sglang_dsv4.checkpoint PATH --layers 6 --experts 16 [--released-formats] [--config configs/v4_flash.json]

With --released-formats linear layers are FP8 in blocks of 128 x 128 and routed experts packed FP4, both with ue8m0
scales, as in the released checkpoint; otherwise everything that it holds in 16 bits or less is bfloat16. For tests and
benchmarks on a GPU; there is no tokenizer. The same arguments on the same kind of device give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.formats import (
    E4M3_MAX_EXPONENT,
    E4M3_MAX_MANTISSA,
    FP8_AMAX_FLOOR,
    e4m3_encode,
    index_codec,
    ue8m0_ceil,
    ue8m0_decode,
)
from sglang_dsv4.geometry import HCA_RATIO, INDEX_FP4
from sglang_dsv4.tiny import draw_weights, seed_number

FP8_BLOCK = 128  # rows and columns that share a scale
QUANTISATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
_FP8_NAMES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
_NEEDED = ("compress_ratios", "num_hidden_layers", "n_routed_experts", "num_experts_per_tok")
_FLOAT32_SUFFIXES = ("_fn", "_base", "_scale", "ape", "attn_sink", "gate.bias")


def cut(config: Mapping[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """The raw config.json with fewer layers and experts.

    Layers are taken from the front. Raises ValueError unless window-only, CSA and HCA layers are all left, and for more
    experts than there are or fewer than a token needs.
    """
    raw = dict(config)
    most, chosen = raw["num_hidden_layers"], raw["num_experts_per_tok"]
    ratios = raw["compress_ratios"][: max(0, layers)]
    if layers > most or HCA_RATIO not in ratios or not {0, 4} <= set(ratios):
        raise ValueError(f"{layers} layers do not hold all three kinds: use 4 to {most}")
    if not chosen <= experts <= raw["n_routed_experts"]:
        raise ValueError(f"{experts} experts: use {chosen}, which a token needs, to {raw['n_routed_experts']}")
    # The entry behind the layers belongs to the draft layer, which is not written.
    raw.update(num_hidden_layers=layers, n_routed_experts=experts, num_nextn_predict_layers=0, compress_ratios=ratios)
    return raw


def raw_config(path: Path) -> dict[str, Any]:
    """A DeepSeek-V4 config.json. Raises ValueError, naming the file, where it is none; OSError where there is none."""
    try:
        raw = json.loads(path.read_text())
        missing = [name for name in _NEEDED if name not in raw]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a config.json: {error!r}") from None
    if missing:
        raise ValueError(f"{path} is not a DeepSeek-V4 config.json: it lacks {', '.join(missing)}")
    return dict(raw)


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [rows, columns] and ue8m0 [rows / 128, columns / 128] of a float32 weight."""
    rows, columns = weight.shape
    blocks = weight.view(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp(min=FP8_AMAX_FLOOR)
    exponents = ue8m0_ceil(amax, E4M3_MAX_EXPONENT, E4M3_MAX_MANTISSA)
    codes = e4m3_encode(blocks / ue8m0_decode(exponents.to(torch.uint8))[:, None, :, None])
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return codes.view(rows, columns).view(torch.float8_e4m3fn), scales


def to_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns / 2], the even column in the low half, and ue8m0 [rows, columns / 32]: as indexer keys."""
    packed, scales = index_codec(INDEX_FP4).encode(weight)
    return packed.view(torch.int8), scales.view(torch.float8_e8m0fnu)


def stored(name: str, weight: Tensor, *, released: bool) -> dict[str, Tensor]:
    """A weight as the checkpoint stores it, under its name and, where it has scales, that of its scales."""
    if weight.dtype == torch.int64 or name.endswith(_FLOAT32_SUFFIXES):
        return {name: weight}
    module = name.removesuffix(".weight")
    in_compressor = ".compressor." in name
    if not released or in_compressor or module.rsplit(".", 1)[-1] not in _FP8_NAMES:
        return {name: weight.bfloat16()}
    quantise = to_fp4 if ".experts." in name else to_fp8
    codes, scales = quantise(weight)
    return {name: codes, f"{module}.scale": scales}


def write(path: str | Path, config: Mapping[str, Any], *, seed: int = 0, device: str = "cpu", released: bool) -> Path:
    """Write config.json and one safetensors file a part; returns the folder. Files that are there are replaced."""
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    raw = dict(config) | {"torch_dtype": "bfloat16"}
    if released:
        raw["quantization_config"] = QUANTISATION
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    where: dict[str, str] = {}
    total = 0
    for number, part in enumerate(draw_weights(raw, seed, device)):
        file = f"model-{number:05}.safetensors"
        tensors = {
            key: value.contiguous().cpu()
            for name, weight in part.items()
            for key, value in stored(name, weight, released=released).items()
        }
        save_file(tensors, str(folder / file), metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_dsv4.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("path", help="folder to write")
    parser.add_argument("--config", type=Path, default=Path("configs/v4_flash.json"), help="raw config.json to cut")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--released-formats", action="store_true", help="FP8 linears and FP4 experts")
    parser.add_argument("--seed", type=seed_number, default=0)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = cut(raw_config(options.config), options.layers, options.experts)
        folder = write(options.path, config, seed=options.seed, device=device, released=options.released_formats)
    except (OSError, ValueError) as error:
        sys.exit(f"checkpoint: {error}")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
