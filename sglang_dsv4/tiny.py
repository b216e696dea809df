"""Writes a small DeepSeek-V4 checkpoint: real architecture, official names, random weights, own tokenizer.

    python -m sglang_dsv4.tiny PATH [--seed N]

The folder is what SGLang and transformers expect of a released checkpoint (config, weights, fast tokenizer,
generation defaults), about 17 MB. Everything is made from code and a seed: the same arguments give the same
bytes. No parameter is left at a neutral value, so that a weight which is ignored or mixed up changes the
output.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4.geometry import CSA_RATIO, HEAD_DIM, INDEX_DIM

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids follow this order. The first line is all that a chat needs, the second its tasks, which SGLang adds; the
# rest only exists as in a released tokenizer.
_NAMES = (
    "System User Assistant latest_reminder "
    "action query authority domain title read_url "
    "deepseek_image image ref /ref box /box point /point polygon /polygon"
).split()
SPECIAL_TOKENS = (BOS, EOS, PAD, "<think>", "</think>", "｜DSML｜", *(f"<｜{name}｜>" for name in _NAMES))
_QUIET = 0.05  # head weight of special tokens: a random model would otherwise print them or stop at random


def tiny_config() -> dict[str, Any]:
    """The raw `config.json` of the tiny model: the released fields, except `quantization_config`."""
    name = "tiny.json"
    try:
        text = (resources.files("sglang_dsv4.configs") / name).read_text()
    except ModuleNotFoundError:  # a source tree that was not installed
        text = (Path(__file__).parent.parent / "configs" / name).read_text()
    return json.loads(text)


class _Draw:
    """Random tensors in a fixed order from one seed."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * std

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) * (high - low) + low

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        return self.normal(out_features, in_features, std=gain * in_features**-0.5)

    def distinct(self, rows: int, chosen: int, count: int) -> Tensor:
        """int64 `[rows, chosen]`, each row different numbers below `count`."""
        drawn = torch.rand(rows, count, generator=self.generator, device=self.device)
        return drawn.argsort(dim=-1)[:, :chosen].contiguous()


def draw_weights(config: Mapping[str, Any], seed: int = 0, device: str = "cpu") -> Iterator[dict[str, Tensor]]:
    """float32 weights (int64 for `tid2eid`) under the official names, part by part: the embedding, each layer, the
    head. A part may be dropped before the next is asked for; a device draws numbers of its own."""
    draw = _Draw(seed, device)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield {"embed.weight": draw.normal(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        weights = _attention(draw, config, f"{prefix}.attn", config["compress_ratios"][layer])
        weights |= _feed_forward(draw, config, f"{prefix}.ffn", layer < config["num_hash_layers"])
        for name in ("attn", "ffn"):
            weights[f"{prefix}.{name}_norm.weight"] = draw.uniform(hidden, low=0.7, high=1.3)
            weights |= _mixer(draw, config, f"{prefix}.hc_{name}", (2 + config["hc_mult"]) * config["hc_mult"], 3)
        yield weights
    weights = {"norm.weight": draw.uniform(hidden, low=0.7, high=1.3)}
    head = draw.linear(vocab, hidden)
    head[: len(SPECIAL_TOKENS)] *= _QUIET
    weights["head.weight"] = head
    yield weights | _mixer(draw, config, "hc_head", config["hc_mult"], 1)


def make_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """All of `draw_weights` at once."""
    return {name: value for part in draw_weights(config, seed) for name, value in part.items()}


def _mixer(draw: _Draw, config: Mapping[str, Any], name: str, outputs: int, parts: int) -> dict[str, Tensor]:
    return {
        f"{name}_fn": draw.linear(outputs, config["hc_mult"] * config["hidden_size"]),
        f"{name}_base": draw.normal(outputs, std=0.5),
        f"{name}_scale": draw.uniform(parts, low=0.5, high=1.5),
    }


def _compressor(draw: _Draw, hidden: int, width: int, ratio: int, prefix: str) -> dict[str, Tensor]:
    channels = width * (2 if ratio == CSA_RATIO else 1)
    return {
        f"{prefix}.ape": draw.normal(ratio, channels, std=0.7),
        f"{prefix}.wkv.weight": draw.linear(channels, hidden),
        f"{prefix}.wgate.weight": draw.linear(channels, hidden, gain=1.5),
        f"{prefix}.norm.weight": draw.uniform(width, low=1.1, high=1.6),
    }


def _attention(draw: _Draw, config: Mapping[str, Any], prefix: str, ratio: int) -> dict[str, Tensor]:
    hidden, lora, heads = config["hidden_size"], config["q_lora_rank"], config["num_attention_heads"]
    groups, out_lora = config["o_groups"], config["o_lora_rank"]
    weights = {
        "wq_a.weight": draw.linear(lora, hidden),
        "q_norm.weight": draw.uniform(lora, low=0.7, high=1.3),
        "wq_b.weight": draw.linear(heads * HEAD_DIM, lora),
        "wkv.weight": draw.linear(HEAD_DIM, hidden),
        # Keys longer than unit rows: attention picks some tokens instead of averaging all of them.
        "kv_norm.weight": draw.uniform(HEAD_DIM, low=1.1, high=1.6),
        "wo_a.weight": draw.linear(groups * out_lora, heads // groups * HEAD_DIM),
        "wo_b.weight": draw.linear(hidden, groups * out_lora, gain=2.0),
        "attn_sink": draw.normal(heads),
    }
    if ratio:
        weights |= _compressor(draw, hidden, HEAD_DIM, ratio, "compressor")
    if ratio == CSA_RATIO:
        index_heads = config["index_n_heads"]
        weights["indexer.wq_b.weight"] = draw.linear(index_heads * INDEX_DIM, lora)
        weights["indexer.weights_proj.weight"] = draw.linear(index_heads, hidden)
        weights |= _compressor(draw, hidden, INDEX_DIM, ratio, "indexer.compressor")
    return {f"{prefix}.{name}": value for name, value in weights.items()}


def _feed_forward(draw: _Draw, config: Mapping[str, Any], prefix: str, hashed: bool) -> dict[str, Tensor]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
    weights = {"gate.weight": draw.linear(experts, hidden, gain=2.0)}
    if hashed:
        weights["gate.tid2eid"] = draw.distinct(config["vocab_size"], chosen, experts)
    else:
        weights["gate.bias"] = draw.normal(experts, std=0.1)
    for name in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
        weights[f"{name}.w1.weight"] = draw.linear(inner, hidden, gain=2.0)
        weights[f"{name}.w2.weight"] = draw.linear(hidden, inner)
        weights[f"{name}.w3.weight"] = draw.linear(inner, hidden)
    return {f"{prefix}.{name}": value for name, value in weights.items()}


_SUBJECTS = (
    "cache page slot server request token window model layer reader writer worker engineer kernel user"
).split()
_VERBS = "reads writes keeps shares copies drops opens closes measures restores merges answers checks follows".split()
_OBJECTS = (
    "prefix snapshot answer question buffer record table message branch number letter weight shape stream "
    "result history position length budget forest river garden mountain window station village kitchen "
    "library market"
).split()
_ADJECTIVES = (
    "small large quiet recent cold warm exact shared empty full simple careful early late broken clean "
    "narrow open strong gentle distant"
).split()
_LINKS = "because while although before after unless until whenever and but so then".split()
_PLACES = "in the morning,at the boundary,on the other side,under load,near the end,without a hit,every time".split(",")
_CODE = (
    "def {s}_{o}(self, {o}: int) -> None:\n    return self.{s}.{o}[{n}]\n",
    'if {o} is None:\n    raise ValueError("{s} {v} no {o}")\n',
    "for {s} in range({n}):\n    {o}.append({s} * {n})\n",
    '{{"{s}": "{o}", "{a}": {n}, "items": [true, false, null]}}\n',
    "import {s}\nfrom {o} import {a}, {s}\n",
)
_CHAT = (
    "What does the {s} do with the {o}? Please explain it in {n} words.",
    "You are a helpful assistant. The {a} {s} {v} the {o} {p}.",
    "Could you write a {a} function that returns the {o}?",
    "Yes, of course: the {s} {v} it, {l} the {o} is {a}.",
)


def training_text(lines: int = 6000) -> list[str]:
    """Sentences, code and chat from templates; always the same."""
    choose = random.Random(20240229)
    words = {"s": _SUBJECTS, "v": _VERBS, "o": _OBJECTS, "a": _ADJECTIVES, "l": _LINKS, "p": _PLACES}
    sentence = "The {a} {s} {v} a {o} {p}, {l} the {s2} {v2} the {a2} {o2}."

    def fill(template: str) -> str:
        values = {key + suffix: choose.choice(pool) for key, pool in words.items() for suffix in ("", "2")}
        return template.format(n=choose.randrange(1000), **values)

    return [fill(choose.choice((sentence, sentence, *_CHAT, *_CODE))) for _ in range(lines)]


def train_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of exactly `vocab_size` tokens, DeepSeek's control tokens
    first.

    Raises ValueError if the training text cannot fill the vocabulary.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not vocab_size = {vocab_size}")
    return tokenizer


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def write_checkpoint(path: str | Path, config: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """Writes the checkpoint folder and returns it; `config` is a raw config.json, `tiny_config()` unless
    given.

    Raises ValueError if the tokenizer's text cannot fill `vocab_size`. Files that are there are replaced.
    """
    from safetensors.torch import save_file

    raw = dict(tiny_config() if config is None else config)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(raw["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(raw["max_position_embeddings"]))
    _write_json(folder / "config.json", raw)
    ids = {"bos_token_id": raw["bos_token_id"], "eos_token_id": raw["eos_token_id"]}
    _write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0, "top_p": 1.0})
    weights = folder / "model.safetensors"
    save_file(make_weights(raw, seed), str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes for its owner only
    return folder


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def seed_number(text: str) -> int:
    """Type of an argument: what torch takes as a seed."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_dsv4.tiny", description="Write a tiny checkpoint.")
    parser.add_argument("path", help="folder to write")
    parser.add_argument("--seed", type=seed_number, default=0, help="seed of the weights (default 0)")
    options = parser.parse_args(arguments)
    try:
        folder = write_checkpoint(options.path, seed=options.seed)
    except (OSError, ValueError) as error:
        sys.exit(f"tiny: {error}")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
