"""The model against transformers' DeepseekV4ForCausalLM: float32, rows stored exactly, no quantiser on either side.

One HF forward over the whole text gives the expected logits of every position. Ours runs through the real pools,
slots and operations (`harness.Stage`, poisoned with NaN) and must agree however the text is cut into steps; among
ourselves, cuts must agree to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import DenseCore, DenseRequest
from harness import Request, Stage
from hf_oracle import hf_model
from torch import Tensor

from sglang_dsv4.geometry import Geometry
from sglang_dsv4.models.backbone import SlotModel
from sglang_dsv4.tiny import SPECIAL_TOKENS, make_weights, tiny_config

TOLERANCE = 1e-4  # on logits of magnitude 4 to 6
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257, 600)

# "released": every kind of layer, top-k of 64 entries binds past 256 tokens, YaRN's original length far away.
# "short": HCA first as in V4-Pro, top-k never binds, positions run past YaRN's original length, 256-token pages.
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "short": {
        "compress_ratios": [128, 4, 4, 0, 0],
        "num_hidden_layers": 4,
        "num_hash_layers": 2,
        "index_topk": 512,
        "num_attention_heads": 2,
    },
}


@dataclass
class Case:
    raw: dict[str, Any]
    ids: Tensor
    expected: Tensor  # [T, vocab]
    hf: Any
    model: SlotModel
    dense: SlotModel
    page_size: int

    def stage(self) -> Stage:
        geometry = Geometry.from_config(self.raw, page_size=self.page_size, store="fp32", indexer="fp32")
        return Stage(geometry, pages=8, slots=4, rows=4)

    def advance(self, stage: Stage, requests: list[Request], ids: list[Tensor], decode: bool = False) -> Tensor:
        """Logits `[N, vocab]` of one step in which request i gets the tokens `ids[i]`."""
        positions = [torch.arange(r.length, r.length + len(x)) for r, x in zip(requests, ids, strict=True)]
        step = stage.step(requests, [len(x) for x in ids], decode=decode)
        return self.model.logits(self.model.hidden_states(torch.cat(ids), torch.cat(positions), step))

    def run(self, chunks: list[int], decode: int = 0) -> Tensor:
        """Logits of all positions when the text arrives in chunks and then token by token."""
        stage = self.stage()
        request, done, out = stage.admit(), 0, []
        for count, is_decode in [(n, False) for n in chunks] + [(1, True)] * decode:
            out.append(self.advance(stage, [request], [self.ids[done : done + count]], is_decode))
            done += count
        return torch.cat(out)


@cache
def case(name: str) -> Case:
    raw = tiny_config() | VARIANTS[name]
    if name == "short":
        raw["rope_scaling"] = raw["rope_scaling"] | {"original_max_position_embeddings": 64}
    weights = make_weights(raw, seed=3)
    models = []
    for core in (None, DenseCore):
        models.append(SlotModel(SimpleNamespace(**raw), length=640, core=core))
        models[-1].load_weights(weights.items())
    length = 600 if name == "released" else 300
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(len(SPECIAL_TOKENS), raw["vocab_size"], (length,), generator=generator)
    hf = hf_model(raw, weights)
    with torch.no_grad():
        expected = hf(ids[None]).logits[0]
    return Case(raw, ids, expected, hf, *models, 128 if name == "released" else 256)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max().item() <= TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", LENGTHS)
def test_one_prefill_of_any_length_matches(length: int) -> None:
    c = case("released")
    assert_close(c.run([length]), c.expected[:length])


@pytest.mark.parametrize("length", [1, 6, 131, 300])
def test_layer_order_of_pro_and_positions_past_the_original_length_match(length: int) -> None:
    c = case("short")
    assert_close(c.run([length]), c.expected[:length])


@pytest.mark.parametrize("name", VARIANTS)
def test_dense_reference_matches(name: str) -> None:
    c = case(name)
    positions = torch.arange(len(c.ids))
    assert_close(c.dense.logits(c.dense.hidden_states(c.ids, positions, DenseRequest())), c.expected)


@pytest.mark.parametrize("prompt", [1, 123, 251])
def test_decode_token_by_token_matches_and_equals_prefill(prompt: int) -> None:
    c = case("released")
    got = c.run([prompt], decode=10)
    assert_close(got, c.expected[: prompt + 10])
    assert torch.equal(got, c.run([prompt + 10]))


@pytest.mark.parametrize(
    "chunks",
    [
        [1, 2, 1, 3, 1, 119, 1, 1, 127, 1, 2, 30],
        [126, 4, 125, 3, 31],
        [128, 128, 33],
    ],
    ids=lambda chunks: "-".join(map(str, chunks)),
)
def test_cuts_at_block_and_page_edges_match_and_equal_one_prefill(chunks: list[int]) -> None:
    c = case("released")
    got = c.run(chunks)
    assert_close(got, c.expected[:289])
    assert torch.equal(got, c.run([289]))


def test_company_in_the_batch_changes_no_bit() -> None:
    c = case("released")
    stage = c.stage()
    first, second = stage.admit(), stage.admit()
    other = c.ids[300:433]
    c.advance(stage, [second], [other[:5]])
    mixed = c.advance(stage, [first, second], [c.ids[:130], other[5:129]])
    assert torch.equal(mixed[:130], c.run([130]))
    both = c.advance(stage, [first, second], [c.ids[130:131], other[129:130]], decode=True)
    assert torch.equal(both[:1], c.run([130], decode=1)[-1:])


def test_greedy_continuation_is_the_same_text() -> None:
    c = case("released")
    prompt, count = 250, 12
    stage = c.stage()
    request, ours = stage.admit(), []
    logits = c.advance(stage, [request], [c.ids[:prompt]])[-1:]
    for _ in range(count):
        ours.append(logits.argmax(-1))
        logits = c.advance(stage, [request], [ours[-1]], decode=True)
    with torch.no_grad():
        text = c.hf.generate(c.ids[None, :prompt], max_new_tokens=count, do_sample=False, eos_token_id=None)
    assert torch.cat(ours).tolist() == text[0, prompt:].tolist()


def test_bfloat16_stays_near_float32() -> None:
    c = case("released")
    model = SlotModel(SimpleNamespace(**c.raw), length=640, dtype=torch.bfloat16, core=DenseCore)
    model.load_weights(make_weights(c.raw, seed=3).items())
    got = model.logits(model.hidden_states(c.ids[:64], torch.arange(64), DenseRequest()))
    assert got.dtype == torch.float32
    # Rounding moves single tokens to another expert; a wrong term anywhere would cost as much as the logits' own 1.0.
    assert (got - c.expected[:64]).abs().mean().item() < 0.3
