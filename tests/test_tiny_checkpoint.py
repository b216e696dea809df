"""The tiny checkpoint: reproducible, complete, nothing neutral, readable by transformers and by SGLang's chat code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import DenseCore, DenseRequest
from safetensors.torch import load_file

from sglang_dsv4 import tiny
from sglang_dsv4.models.backbone import SlotModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def test_same_arguments_give_the_same_bytes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.main([str(tmp_path / "again")])
    assert " MB" in capsys.readouterr().out
    names = sorted(file.name for file in folder.iterdir())
    expected = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert names == expected.split()
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_another_seed_gives_other_weights() -> None:
    first, second = (tiny.make_weights(tiny.tiny_config(), seed) for seed in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_it_is_small(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6


def test_config_is_the_raw_released_shape(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    assert raw == tiny.tiny_config()
    assert raw["architectures"] == ["DeepseekV4ForCausalLM"]
    assert "quantization_config" not in raw
    assert {0, 4, 128} == set(raw["compress_ratios"][: raw["num_hidden_layers"]])


def test_weights_are_the_model_s_and_none_is_neutral(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    SlotModel(SimpleNamespace(**tiny.tiny_config()), length=8, core=DenseCore).load_weights(weights.items())
    for name, value in weights.items():
        if value.is_floating_point():
            assert value.ne(0).all() and value.ne(1).all(), name
            # No two rows or channels alike: a permuted or repeated read shows.
            assert value.unique().numel() > 0.9 * value.numel(), name
            assert value.unique(dim=0).shape[0] == value.shape[0], name


def test_hash_rows_hold_distinct_experts_and_use_all(folder: Path) -> None:
    table = load_file(folder / "model.safetensors")["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (1280, 2)
    assert table[:, 0].ne(table[:, 1]).all()
    assert table.unique().tolist() == list(range(8))


def test_control_tokens_come_first_and_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 1280
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    for i, token in enumerate(tiny.SPECIAL_TOKENS):
        assert tokenizer.encode(token, add_special_tokens=False) == [i]


@pytest.mark.parametrize(
    "text",
    [
        "The small server keeps a cold prefix under load.",
        "def cache_page(self) -> None:\n\treturn x[12345]\n",
        "wörld 你好 😀 <not a token>",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 1280


def test_words_of_the_training_text_are_short(tokenizer: Any) -> None:
    text = " ".join(tiny.training_text(200))
    assert len(tokenizer.encode(text)) < len(text) / 3


@pytest.mark.parametrize(("mode", "mark"), [("chat", "</think>"), ("thinking", "<think>")])
def test_sglang_s_chat_encoding_works(tokenizer: Any, mode: str, mark: str) -> None:
    pytest.importorskip("deepseek_recipe")
    encoding = pytest.importorskip("sglang.srt.entrypoints.openai.chat_encoding")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does the server do?"},
    ]
    ids = encoding.encode_simple_chat(tokenizer=tokenizer, spec="dsv4", messages=messages, thinking_mode=mode)
    text = tokenizer.decode(ids)
    assert text.startswith(f"{tiny.BOS}")
    assert text.endswith(f"Be brief.<｜User｜>What does the server do?<｜Assistant｜>{mark}")
    assert [ids[0], ids[-2], ids[-1]] == tokenizer.convert_tokens_to_ids([tiny.BOS, "<｜Assistant｜>", mark])


def test_a_vocabulary_that_the_text_cannot_fill_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not vocab_size = 90000"):
        tiny.write_checkpoint(tmp_path, tiny.tiny_config() | {"vocab_size": 90000})


def test_greedy_text_does_not_get_stuck() -> None:
    raw = tiny.tiny_config()
    model = SlotModel(SimpleNamespace(**raw), length=128, core=DenseCore)
    model.load_weights(tiny.make_weights(raw).items())
    request, ids, written = DenseRequest(), torch.tensor([0, 400, 500, 600]), []
    for _ in range(48):
        positions = torch.arange(len(ids)) + len(written) + (3 if written else 0)
        ids = model.logits(model.hidden_states(ids, positions, request))[-1:].argmax(-1)
        written.append(ids.item())
    assert len(set(written)) >= 24
    assert min(written) >= len(tiny.SPECIAL_TOKENS)
