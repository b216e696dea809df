"""Registration: a plugin that does not fit leaves no parser of its name, and never serves over foreign pools."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_dsv4 import hooks
from sglang_dsv4.refusals import BACKEND, Refused

REGISTER = """
from sglang_dsv4 import hooks, plugin
{breakage}
try:
    plugin.register()
    print("registered")
except Exception as error:
    print(type(error).__name__, error)
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as parsers
print("dsv4_slot" in parsers)
"""


def register(breakage=""):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REGISTER.format(breakage=breakage)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return run.stdout.strip().splitlines()[-2:]


def test_a_fitting_sglang_registers_the_parser_last():
    assert register() == ["registered", "True"]


def test_a_hook_with_another_signature_is_named_and_no_parser_remains():
    breakage = (
        "import dataclasses; "
        "hooks.HOOKS = (dataclasses.replace(hooks.HOOKS[0], expected=('self', 'other')), *hooks.HOOKS[1:])"
    )
    message, parser = register(breakage)
    assert message.startswith("RuntimeError") and "_build_hybrid_req_pool takes (self, max_num_reqs" in message
    assert parser == "False"


def test_another_sglang_version_is_refused_and_no_parser_remains():
    message, parser = register("import sglang; sglang.__version__ = '0.5.99'")
    assert message.startswith("Refused") and "0.5.23" in message
    assert parser == "False"


def test_every_hook_matches_the_installed_sglang():
    assert hooks.problems() == []


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda h: h.target.rsplit(".", 1)[1])
def test_a_missing_target_is_one_line_with_its_remedy(hook):
    import dataclasses

    gone = dataclasses.replace(hook, target=hook.target + "_gone")
    line = gone.problem()
    assert line is not None and "\n" not in line and "install the tested SGLang" in line and hook.purpose in line


def test_the_backend_refuses_pools_that_are_not_ours():
    from sglang_dsv4.attention.backend import SlotAttentionBackend

    runner = SimpleNamespace(device="cpu", req_to_token_pool=object(), token_to_kv_pool=object())
    with pytest.raises(Refused, match="did not take effect"):
        SlotAttentionBackend(runner)


def test_hooks_hand_foreign_models_to_sglang_unchanged():
    """Each wrapper is called as SGLang would for a model of another kind and must only pass the call on."""
    foreign = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=object()),
        req_to_token_pool=object(),
        model_config_parser="auto",
        get_kvcache=object,
        origin_input_ids=[10**9],
    )
    assert foreign.model_config_parser != BACKEND
    for hook in hooks.HOOKS:
        calls = []

        def original(*args, calls=calls, **kwargs):
            calls.append((args, kwargs))
            return "sglang's own"

        names = list(hook.expected)
        keyword_only = {"up_to": 5} if "up_to" in names else {}
        if "sizes" in names or "extra_max_context_len" in names:
            keyword_only = {n: object() for n in names[1:]}
            args = [foreign]
        else:
            args = [foreign, *(object() for n in names[1:] if n not in ("up_to", "kwargs"))] if names else []
        assert hook.wrapper(original, *args, **keyword_only) in ("sglang's own", None)
        assert calls == [(tuple(args), keyword_only)]


@pytest.mark.parametrize("extends, queue, called", [(True, ["a prompt"], 1), (True, [], 0), (False, ["a prompt"], 0)])
def test_prompts_in_flight_are_published_before_a_prefill_is_prepared_for_others(monkeypatch, extends, queue, called):
    from sglang_dsv4.cache import publish
    from sglang_dsv4.cache.slots import SlotReqToTokenPool

    calls = []
    monkeypatch.setattr(publish, "publish_ahead", lambda *args: calls.append(args))
    wrapper = next(h.wrapper for h in hooks.HOOKS if h.target.endswith("get_new_batch_prefill"))
    last = SimpleNamespace(reqs=["in flight"], forward_mode=SimpleNamespace(is_extend=lambda: extends))
    pool = SlotReqToTokenPool.__new__(SlotReqToTokenPool)
    scheduler = SimpleNamespace(req_to_token_pool=pool, waiting_queue=queue, tree_cache="tree", last_batch=last)
    assert wrapper(lambda self, batch: batch, scheduler, "running") == "running"
    assert calls == [("tree", ["in flight"], queue)] * called
    scheduler.last_batch = None
    assert wrapper(lambda self, batch: batch, scheduler, "running") == "running"


def test_a_prompt_that_reaches_into_the_page_held_back_is_refused_instead_of_waiting_for_ever():
    from sglang_dsv4.cache.pages import PagePool

    wrapper = next(h.wrapper for h in hooks.HOOKS if h.target.endswith("max_new_tokens_for_memory"))
    allocator = SimpleNamespace(page_size=128, get_kvcache=lambda: PagePool.__new__(PagePool))
    limits = {"token_capacity": 1024, "sliding_window_size": None, "chunk_size": 256}
    assert wrapper(lambda *a, **k: 7, allocator, 895, 16, **limits) == 7
    for length in (896, 960, 1017):
        assert wrapper(lambda *a, **k: 0, allocator, length, 16, **limits) is None


def test_a_refusal_in_a_child_process_is_reported_as_its_line_only():
    wrapper = next(h.wrapper for h in hooks.HOOKS if h.target.endswith("get_exception_traceback"))
    for error, expected in ((Refused("too small: why; what"), "too small: why; what"), (OSError("x"), "a traceback")):
        try:
            raise error
        except Exception:
            assert wrapper(lambda: "a traceback") == expected


LETHAL = {
    "an empty prompt": ({"origin_input_ids": []}, "the prompt is empty"),
    "a token past the vocabulary": ({"origin_input_ids": [5, 1280]}, "outside the vocabulary of 1280"),
    "a negative token": ({"origin_input_ids": [-1, 5]}, "outside the vocabulary of 1280"),
    "embeddings": ({"input_embeds": [[0.1]]}, "input_embeds are not supported"),
    "more logprobs than tokens": (
        {"logprob": SimpleNamespace(top_logprobs_num=1281)},
        "top_logprobs_num is 1281",
    ),
    "a stop token past the vocabulary": (
        {"sampling_params": SimpleNamespace(stop_token_ids=[1280], min_new_tokens=2)},
        "stop_token_ids contain",
    ),
}


def checked(**fields):
    """What SGLang's check of a request's input says with ours around it; a refused request must do no harm after."""
    wrapper = next(h.wrapper for h in hooks.HOOKS if h.target.endswith("validate_input_length"))
    request = {
        "origin_input_ids": [0, 5, 1279],
        "vocab_size": 1280,
        "input_embeds": None,
        "logprob": SimpleNamespace(top_logprobs_num=1280),
        "sampling_params": SimpleNamespace(stop_token_ids=[1280], min_new_tokens=0),
    }
    req = SimpleNamespace(**{**request, **fields})
    said = wrapper(lambda *a: "SGLang's own", req, 1000, False)
    if said != "SGLang's own":
        left = (req.input_embeds, req.logprob.top_logprobs_num, req.sampling_params.min_new_tokens)
        assert left == (None, 0, 0)
    return said


@pytest.mark.parametrize("case", LETHAL)
def test_a_request_that_would_end_the_server_or_be_answered_wrongly_is_refused_in_one_line(case, monkeypatch):
    from sglang_dsv4 import config

    fields, says = LETHAL[case]
    monkeypatch.setattr(config, "_parsed", False)
    assert checked(**fields) == "SGLang's own"  # another model's requests are not ours to judge
    monkeypatch.setattr(config, "_parsed", True)
    assert says in checked(**fields)
    assert checked() == "SGLang's own"


def asked(**fields):
    """What SGLang's check in front of the scheduler says of a request with ours around it."""
    wrapper = next(h.wrapper for h in hooks.HOOKS if h.target.endswith("_validate_token_ids_logprob"))
    request = {"logprob_start_len": -1, "top_logprobs_num": 0, "positional_embed_overrides": None, **fields}
    wrapper(lambda self, obj: None, None, SimpleNamespace(**request))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprob_start_len": -2}, "logprob_start_len is -2: send an integer from -1 on"),
        ({"logprob_start_len": [0]}, r"logprob_start_len is \[0\]: send an integer"),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1: send an integer from 0 on"),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides are not supported"),
    ],
    ids=str,
)
def test_what_the_scheduler_does_not_check_is_refused_before_it(fields, says, monkeypatch):
    from sglang_dsv4 import config

    monkeypatch.setattr(config, "_parsed", False)
    asked(**fields)  # another model's requests are not ours to judge
    monkeypatch.setattr(config, "_parsed", True)
    with pytest.raises(ValueError, match=says) as caught:
        asked(**fields)
    assert "\n" not in str(caught.value)
    asked()
    asked(logprob_start_len=None, top_logprobs_num=None)
    asked(logprob_start_len=500, top_logprobs_num=5)


def test_an_allocation_that_does_not_fit_is_one_line_and_other_errors_stay_themselves():
    with pytest.raises(Refused, match=r"no memory for pages of 9 tokens: .*allocate.*; lower it") as caught:
        with hooks._memory_for("pages of 9 tokens", "lower it"):
            torch.zeros(1 << 55, dtype=torch.uint8)
    assert "\n" not in str(caught.value)
    with pytest.raises(Refused, match="out of memory"), hooks._memory_for("slots", "lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has")
    with pytest.raises(RuntimeError, match="something else"), hooks._memory_for("slots", "lower it"):
        raise RuntimeError("something else")


def test_a_config_that_is_no_json_is_named_in_one_line(tmp_path):
    from sglang_dsv4.config import SlotConfigParser

    (tmp_path / "config.json").write_text("{\n")
    with pytest.raises(Refused, match=r"config.json is not JSON: .*; fetch") as caught:
        SlotConfigParser().parse(str(tmp_path), False)
    assert "\n" not in str(caught.value)
