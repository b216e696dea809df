"""A model that is not ours is served as if the plugin were not installed."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from workload import words

from sglang_dsv4.serving import Launch, Server
from sglang_dsv4.tiny import train_tokenizer

VOCABULARY = 1280


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    train_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def answers(folder, log, plugins):
    """Ids, logprobs and cached tokens of a prompt, its repeat and a branch of it."""
    prompt = words("llama", 300)
    launch = Launch(folder, max_total_tokens=4096, plugin=False, extra_args=("--attention-backend", "torch_native"))
    with Server(launch, log, env={"SGLANG_PLUGINS": plugins}) as server:
        sent = [prompt, prompt, [*prompt[:200], *words("llama's branch", 50)]]
        got = [server.client.generate(ids, 24) for ids in sent]
    assert "sglang-dsv4:" not in log.read_text() and "slot cache" not in log.read_text()
    return [(a.output_ids, a.logprobs, a.cached_tokens) for a in got]


def test_a_llama_is_served_alike_with_and_without_the_plugin(llama, tmp_path):
    without = answers(llama, tmp_path / "without.log", "no_plugin_of_this_name")
    assert without[1][2] > 0 and without[2][2] > 0  # its own prefix cache works
    assert answers(llama, tmp_path / "with.log", "sglang_dsv4") == without
