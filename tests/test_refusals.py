"""Refusals and defaults: the tables, the texts, and what SGLang's own argument resolution makes of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dsv4 import flag_rules, refusals
from sglang_dsv4.geometry import Geometry
from sglang_dsv4.refusals import Refused

ROOT = Path(__file__).parents[1]
TINY = json.loads((ROOT / "configs" / "tiny.json").read_text())


def args(**fields):
    """Server arguments as SGLang's record would hold them, with only these set."""
    return SimpleNamespace(**fields)


def refusal(call, *positional, **keywords):
    """The refusal's text, held to its form: one line that says what, why and what to do."""
    with pytest.raises(Refused) as caught:
        call(*positional, **keywords)
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]+: [^\n]+; [^\n]+", text), text
    return text


def decide(env=None, device="cuda", **fields):
    return refusals.decide(args(**fields), device=device, env=env or {})


# The tables


def unwanted(rule):
    """A value that the rule does not allow and a user could give."""
    if False in rule.allowed:
        return True
    numbers = [value for value in rule.allowed if isinstance(value, int)]
    return max(numbers) + 1 if numbers else "something"


@pytest.mark.parametrize("rule", flag_rules.RULES, ids=lambda rule: rule.field)
def test_each_flag_in_the_table_is_refused_by_name_and_its_allowed_values_are_not(rule):
    text = refusal(decide, **{rule.field: unwanted(rule)})
    assert refusals.flag(rule.field) in text and rule.why in text
    for value in rule.allowed:
        decide(**{rule.field: value})


@pytest.mark.parametrize("rule", flag_rules.CPU_RULES, ids=lambda rule: rule.field)
def test_each_flag_that_the_cpu_model_lacks_is_refused_there_and_accepted_on_cuda(rule):
    value = unwanted(rule)
    assert refusals.flag(rule.field) in refusal(decide, device="cpu", **{rule.field: value})
    decide(device="cuda", **{rule.field: value})
    for value in rule.allowed:
        decide(device="cpu", **{rule.field: value})


@pytest.mark.parametrize(("field", "value", "why"), flag_rules.REFUSED_VALUES)
def test_each_refused_value_of_an_otherwise_free_flag(field, value, why):
    assert f"{refusals.flag(field, value)} is" in refusal(decide, **{field: value})
    decide(**{field: "auto"})


@pytest.mark.parametrize(("name", "why"), flag_rules.ENVIRONMENT)
def test_each_environment_switch_of_the_in_tree_pools_is_refused_unless_it_is_off(name, why):
    assert f"{name}=1" in refusal(decide, env={name: "1"})
    decide(env={name: "0"})


# One case for each refusal that the users of the in-tree model are most likely to meet


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"page_size": 64}, "use --page-size 128 or --page-size 256"),
        ({"page_size": 384}, "--page-size 384"),
        ({"page_size": 1}, "--page-size 1"),
        ({"chunked_prefill_size": 100}, "use 128"),
        ({"chunked_prefill_size": 1000}, "use 896 or 1024"),
        ({"page_size": 256, "chunked_prefill_size": 384}, "use 256 or 512"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0"),
        ({"chunked_prefill_size": -1}, "--chunked-prefill-size -1"),
        ({"mamba_track_interval": 192}, "use 128 or 256"),
        ({"page_size": 256, "mamba_track_interval": 128}, "use 256"),
        ({"max_total_tokens": 256}, "one request needs 384 tokens"),
        ({"page_size": 256, "max_total_tokens": 512}, "one request needs 768 tokens"),
        ({"max_mamba_cache_size": 4}, "one request needs 5 slots"),
        ({"max_mamba_cache_size": 3, "disable_overlap_schedule": True}, "one request needs 4 slots"),
        ({"max_mamba_cache_size": 0, "disable_radix_cache": True}, "one request needs 1 slots"),
        ({"context_length": 0}, "--context-length 0"),
        ({"context_length": -5}, "--context-length -5"),
        ({"attention_backend": "flashmla"}, "use --attention-backend dsv4_slot"),
        ({"decode_attention_backend": "triton"}, "--decode-attention-backend triton"),
        ({"prefill_attention_backend": "fa3"}, "--prefill-attention-backend fa3"),
        ({"kv_cache_dtype": "bf16"}, "SGLANG_DSV4_ROWS=fp32"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"cuda_graph_backend_prefill": "breakable"}, "--cuda-graph-backend-prefill breakable"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "prefill backend full"),
        ({"json_model_override_args": '{"num_hidden_layers": 4}'}, "num_hidden_layers"),
        ({"json_model_override_args": '{"architectures": ["DeepseekV4ForCausalLM"]}'}, "architectures"),
        ({"swa_full_tokens_ratio": 0.1}, "--max-mamba-cache-size"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"dtype": "float16"}, "--dtype bfloat16"),
        ({"lora_paths": ["a"]}, "--lora-paths"),
    ],
)
def test_a_setting_that_would_break_the_pools_is_refused_with_its_remedy(fields, says):
    assert says in refusal(decide, **fields)


@pytest.mark.parametrize("device", ["npu", "xpu", "hpu", "mps", "musa"])
def test_a_device_without_kernels_or_references_is_refused(device):
    assert device in refusal(decide, device=device)


# What becomes of accepted values


def test_defaults_where_the_user_set_nothing():
    outcome = decide()
    assert outcome.overrides == {
        "page_size": 128,
        "attention_backend": "dsv4_slot",
        "mamba_radix_cache_strategy": "extra_buffer",
    }
    assert outcome.declarations == {
        "mamba_track_interval": 128,
        "mamba_max_states_per_path": 1,
        "max_running_requests": 256,
        "disable_prefill_cuda_graph": True,
    }


def test_values_that_the_user_set_stay():
    outcome = decide(page_size=256, max_running_requests=7, mamba_track_interval=512, chunked_prefill_size=1024)
    assert outcome.overrides["page_size"] == 256
    assert outcome.declarations["max_running_requests"] == 7
    assert outcome.declarations["mamba_track_interval"] == 512
    assert "chunked_prefill_size" not in outcome.overrides | outcome.declarations


@pytest.mark.parametrize(
    ("command", "interval"),
    [
        (None, 128),
        ("--model-path m --mamba-track-interval 256", 256),
        ("--mamba-track-interval=256 --page-size 128", 256),
        ("Engine(model_path='m', mamba_track_interval=256)", 256),
        ("--mamba-track-intervals 256", 128),
    ],
)
def test_sglangs_own_default_interval_counts_as_set_only_where_the_command_names_it(command, interval):
    outcome = decide(mamba_track_interval=256, _launch_command=command)
    assert outcome.declarations["mamba_track_interval"] == interval


@pytest.mark.parametrize("backend", ["dsv4", "compressed", "dsv4_slot"])
def test_the_in_tree_backends_names_are_translated_and_said_so(backend):
    outcome = decide(attention_backend=backend, decode_attention_backend=backend)
    assert outcome.overrides["attention_backend"] == "dsv4_slot"
    assert outcome.overrides.get("decode_attention_backend", "dsv4_slot") == "dsv4_slot"
    assert any(backend in note for note in outcome.notes) == (backend != "dsv4_slot")


def test_a_recipe_for_the_in_tree_model_is_served_with_a_line_for_each_translated_flag():
    outcome = decide(
        attention_backend="dsv4",
        page_size=256,
        kv_cache_dtype="fp8_e4m3",
        enable_deepseek_v4_fp4_indexer=True,
        moe_runner_backend="marlin",
        tp_size=8,
    )
    assert outcome.overrides["kv_cache_dtype"] == "auto"
    assert outcome.declarations["enable_deepseek_v4_fp4_indexer"] is False
    assert "moe_runner_backend" not in outcome.overrides
    for name in ("--attention-backend dsv4", "--kv-cache-dtype fp8_e4m3", "--enable-deepseek-v4-fp4-indexer"):
        assert any(name in note for note in outcome.notes)


def test_overrides_of_the_config_that_do_not_reach_the_pools_are_accepted():
    decide(json_model_override_args='{"rope_theta": 10000}')


# Row formats


@pytest.mark.parametrize(
    ("env", "formats"),
    [
        ({}, ("fp8", "fp4")),
        ({"SGLANG_DSV4_INDEXER": "fp8"}, ("fp8", "fp8")),
        ({"SGLANG_DSV4_ROWS": "", "SGLANG_DSV4_INDEXER": ""}, ("fp8", "fp4")),
        ({"SGLANG_DSV4_ROWS": "fp32"}, ("fp32", "fp32")),
        ({"SGLANG_DSV4_ROWS": "fp32", "SGLANG_DSV4_INDEXER": "fp4"}, ("fp32", "fp4")),
    ],
)
def test_row_formats_come_from_the_environment(env, formats):
    assert refusals.store_format(env=env) == formats


@pytest.mark.parametrize(
    ("env", "fields"),
    [
        ({"SGLANG_DSV4_ROWS": "bf16"}, {}),
        ({"SGLANG_DSV4_INDEXER": "int8"}, {}),
        ({"SGLANG_DSV4_ROWS": "fp32"}, {"kv_cache_dtype": "fp8_e4m3"}),
        ({"SGLANG_DSV4_INDEXER": "fp8"}, {"enable_deepseek_v4_fp4_indexer": True}),
    ],
)
def test_unknown_row_formats_and_flags_that_contradict_them_are_refused(env, fields):
    refusal(refusals.store_format, args(**fields), env)


def test_a_split_that_neither_moves_nor_stays_is_refused():
    assert "SGLANG_DSV4_SPLIT=maybe" in refusal(decide, env={"SGLANG_DSV4_SPLIT": "maybe"})
    decide(env={"SGLANG_DSV4_SPLIT": "moves"})


# The checkpoint


@pytest.mark.parametrize("name", ["tiny", "v4_flash", "v4_pro"])
def test_the_models_that_are_served_are_not_refused(name):
    refusals.refuse_checkpoint(json.loads((ROOT / "configs" / f"{name}.json").read_text()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "deepseek_v41"}, "V4.1"),
        ({"kv_source_layer_ids": [2, 8]}, "V4.1"),
        ({"compress_ratios": [0, 0, 2, 2, 1, 1, 0]}, "V4.1"),
        ({"compress_ratios": [0, 0, 4, 64, 4, 128, 0]}, "64"),
        ({"compress_ratios": [0]}, "compress_ratios"),
        ({"compress_ratios": None}, "compress_ratios"),
        ({"head_dim": 256}, "head_dim"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim"),
        ({"index_head_dim": 64}, "index_head_dim"),
        ({"sliding_window": 256}, "sliding_window"),
        ({"index_topk": None}, "index_topk"),
    ],
)
def test_a_checkpoint_that_the_pools_cannot_hold_is_refused(change, says):
    assert says in refusal(refusals.refuse_checkpoint, {**TINY, **change})
    assert says in refusal(refusals.geometry_of, args(), SimpleNamespace(**{**TINY, **change}), {})


def test_quantised_weights_are_refused_on_a_cpu_only():
    config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert "fp8" in refusal(refusals.check_weights, config, "cpu")
    refusals.check_weights(config, "cuda")
    refusals.check_weights(SimpleNamespace(), "cpu")


@pytest.mark.parametrize(
    "env", [{"SGLANG_DSV4_ROWS": "fp32"}, {"SGLANG_DSV4_INDEXER": "fp32"}], ids=["exact rows", "exact keys"]
)
def test_row_formats_without_kernels_are_refused_on_cuda_unless_the_reference_is_asked_for(env):
    assert "the kernels read FP8 rows" in refusal(refusals.check_cuda, args(), env)
    refusals.check_cuda(args(disable_cuda_graph=True), {**env, "SGLANG_DSV4_REFERENCE": "1"})


def test_torch_references_are_refused_inside_cuda_graphs():
    assert "--disable-cuda-graph" in refusal(refusals.check_cuda, args(), {"SGLANG_DSV4_REFERENCE": "1"})
    refusals.check_cuda(args(cuda_graph_backend_decode="disabled"), {"SGLANG_DSV4_REFERENCE": "1"})
    refusals.check_cuda(args(), {"SGLANG_DSV4_INDEXER": "fp8"})


# Pools


def pool_size(**changes):
    sizes = {"page": 128, "pool_tokens": 384, "state_slots": 5, "slots_per_request": 5, **changes}
    refusals.check_pool_size(**sizes)


def test_pools_that_hold_exactly_one_request_are_served():
    pool_size()
    pool_size(page=256, pool_tokens=768, state_slots=1, slots_per_request=1)


@pytest.mark.parametrize("tokens", [-128, 0, 128, 256, 383])
def test_a_page_pool_too_small_for_one_request_is_refused_with_the_number_needed(tokens):
    assert "one request needs 384 tokens" in refusal(pool_size, pool_tokens=tokens)


@pytest.mark.parametrize("slots", [-1, 0, 4])
def test_a_slot_pool_too_small_for_one_request_is_refused_with_the_number_needed(slots):
    assert "one request needs 5 slots" in refusal(pool_size, state_slots=slots)


def test_the_bytes_in_the_message_are_the_geometrys():
    geometry = Geometry.from_config(TINY)
    text = refusal(pool_size, pool_tokens=0, geometry=geometry)
    assert f"{geometry.page_pool_bytes(384)} B of pages" in text
    assert f"{geometry.slot_pool_bytes(5)} B of slots" in text


def test_a_slot_pool_that_the_user_sized_for_one_request_is_accepted():
    decide(max_mamba_cache_size=5)
    decide(max_mamba_cache_size=4, disable_overlap_schedule=True)
    decide(max_mamba_cache_size=1, disable_radix_cache=True)
    decide(max_mamba_cache_size=4, env={"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"})


# Versions


def test_the_tested_version_passes_and_another_one_is_refused_unless_allowed():
    assert refusals.check_version("0.5.23", env={}) is None
    assert "sglang==0.5.23" in refusal(refusals.check_version, "0.5.24", env={})
    assert "0.5.24" in refusals.check_version("0.5.24", env={"SGLANG_DSV4_ALLOW_UNTESTED": "1"})
    refusal(refusals.check_version, "0.5.24", env={"SGLANG_DSV4_ALLOW_UNTESTED": "0"})


# How a refusal ends a process

RAISE = """
from sglang_dsv4.refusals import Refused, install_excepthook
install_excepthook(); install_excepthook()
raise {}
"""


def ending(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stderr


def test_a_refusal_ends_the_process_with_one_line_and_an_error_code():
    assert ending(RAISE.format("Refused('a', 'b', 'c')")) == (1, "sglang-dsv4: a: b; c\n")


def test_other_errors_keep_their_traceback():
    code, text = ending(RAISE.format("ValueError('a')"))
    assert code == 1 and text.startswith("Traceback") and text.endswith("ValueError: a\n")


def test_a_refusal_survives_the_way_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(Refused("a", "b", "c")))
    assert isinstance(error, Refused) and str(error) == "a: b; c"


# SGLang's own argument resolution, in a process of its own

DRIVER = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
import argparse, os
from sglang.srt.arg_groups.arg_utils import record_fields, resolvable_fields
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs, prepare_server_args
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
out = {
    "fields": [field.name for field in record_fields(ServerArgs)],
    "resolvable": sorted(resolvable_fields(ServerArgs)),
    "options": {option: action.dest for action in parser._actions for option in action.option_strings},
    "cases": {},
}
request = json.load(sys.stdin)
for name, (argv, env) in request["cases"].items():
    os.environ.update(env)
    try:
        record = prepare_server_args(argv)
        record.resolve_once()
        view = resolving_view(record)
        result = {field: getattr(view, field) for field in request["report"]}
        graphs = view.cuda_graph_config
        result["prefill_graphs"] = graphs and graphs.prefill.backend
        out["cases"][name] = {"resolved": result}
    except Exception as error:
        out["cases"][name] = {"error": type(error).__name__, "text": str(error)}
    for key in env:
        del os.environ[key]
from types import SimpleNamespace as N
from unittest.mock import patch
from sglang.srt.beam_search import coordinator as beam
def beam_answer(page):
    server = N(
        spec_algorithm=N(is_none=lambda: True),
        dllm_enabled=False,
        model_config=N(is_encoder_decoder=False),
        tree_cache=N(supports_swa=lambda: False, supports_mamba=lambda: True),
    )
    state = {
        "get_disagg": N(disaggregation_mode="null"),
        "get_schedule": N(page_size=page),
        "get_memory": N(enable_hisparse=False, enable_hierarchical_cache=False),
        "get_parallel": N(pp_size=1),
        "is_dp_attention_enabled": False,
    }
    with patch.multiple(beam, **{name: (lambda value=value: value) for name, value in state.items()}):
        request = N(sampling_params=N(beam_width=4), session_id=None)
        return beam.BeamCoordinator.validate_and_init(server, request, N(session_params=None))
out["beam"] = [beam_answer(128), beam_answer(1)]
from sglang_dsv4.server_defaults import mark_fp4_experts
from sglang.srt.configs import deepseek_v4
def experts(found, **quantisation):
    raw = {"quantization_config": quantisation} if quantisation else {}
    with patch.object(deepseek_v4, "try_detect_fp4_experts", lambda path: found):
        mark_fp4_experts(raw, "model")
    return raw.get("quantization_config", {}).get("routed_experts_quant_method")
out["experts"] = {
    "packed": experts(True, quant_method="fp8"),
    "fp8": experts(False, quant_method="fp8"),
    "unreadable": experts(None, quant_method="fp8"),
    "not quantised": experts(True),
    "declared": experts(True, quant_method="fp8", routed_experts_quant_method="nvfp4"),
}
os.environ["SGLANG_DSV4_FP4_EXPERTS"] = "0"
out["experts"]["told otherwise"] = experts(True, quant_method="fp8")
print("RESULT" + json.dumps(out))
"""

REPORT = (
    "page_size attention_backend mamba_radix_cache_strategy mamba_track_interval max_running_requests "
    "chunked_prefill_size kv_cache_dtype disable_overlap_schedule uses_mamba_radix_cache "
    "enable_deepseek_v4_fp4_indexer"
).split()

FLAGS: dict[str, list[str]] = {
    "defaults": [],
    "recipe": "--attention-backend dsv4 --page-size 256 --kv-cache-dtype fp8_e4m3 "
    "--enable-deepseek-v4-fp4-indexer".split(),
    "old backend name": ["--attention-backend", "compressed"],
    "small": "--max-running-requests 4 --max-total-tokens 4096 --chunked-prefill-size 256 "
    "--max-mamba-cache-size 40".split(),
    "interval": ["--mamba-track-interval", "256"],
    "no overlap": ["--disable-overlap-schedule"],
    "no radix cache": ["--disable-radix-cache"],
    "page 64": ["--page-size", "64"],
    "no_buffer": ["--mamba-radix-cache-strategy", "no_buffer", "--page-size", "128"],
    "lazy": ["--mamba-radix-cache-strategy", "extra_buffer_lazy"],
    "chunk": ["--chunked-prefill-size", "1000"],
    "unified memory": ["--enable-unified-memory"],
    "hicache": ["--enable-hierarchical-cache"],
    "hisparse": ["--enable-hisparse"],
    "lora": ["--enable-lora"],
    "dp attention": "--tp-size 2 --dp-size 2 --enable-dp-attention".split(),
    "prefill server": ["--disaggregation-mode", "prefill"],
    "drafts": ["--speculative-algorithm", "EAGLE"],
    "prefill graphs": ["--cuda-graph-backend-prefill", "full"],
    "tokenizer workers": ["--tokenizer-worker-num", "2"],
    "language model only": ["--language-model-only"],
    "two batches": ["--enable-two-batch-overlap"],
    "kv dtype": ["--kv-cache-dtype", "bf16"],
    "tensor parallel": ["--tp-size", "2"],
}
CONFIGS = {
    "window": {"sliding_window": 64},
    "v41": {"kv_source_layer_ids": [2]},
    "quantised": {"quantization_config": {"quant_method": "fp8"}},
}


def environment():
    shim = os.pathsep.join([str(ROOT / "tools" / "cpu_shim"), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": shim.rstrip(os.pathsep),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def checkpoint(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """What SGLang makes of every case, and its fields and options."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ours = ["--device", "cpu", "--model-config-parser", "dsv4_slot"]
    tiny = checkpoint(folder / "tiny")
    cases = {name: (["--model-path", tiny, *ours, *flags], {}) for name, flags in FLAGS.items()}
    for name, change in CONFIGS.items():
        cases[name] = (["--model-path", checkpoint(folder / name, **change), *ours], {})
    cases["in-tree layout"] = (["--model-path", tiny, *ours], {"SGLANG_DSV4_KV_LAYOUT": "v41"})
    cases["rows"] = (["--model-path", tiny, *ours], {"SGLANG_DSV4_ROWS": "int8"})
    cases["another parser"] = (["--model-path", "dummy", "--device", "cpu", "--page-size", "64"], {})
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps({"cases": cases, "report": REPORT}),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT"))


def test_every_server_argument_of_sglang_is_judged_here_or_listed_as_its_own_business(sglang):
    listed = (Path(__file__).parent / "server_args_elsewhere.txt").read_text()
    elsewhere = [name for line in listed.splitlines() if not line.startswith("#") for name in line.split()]
    tables = {rule.field for rule in flag_rules.RULES + flag_rules.CPU_RULES}
    tables |= {field for field, _, _ in flag_rules.REFUSED_VALUES}
    read = set(re.findall(r'_value\(args, "(\w+)"\)', Path(refusals.__file__).read_text()))
    chosen = {
        "model_config_parser",
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "disable_prefill_cuda_graph",
    }
    judged = tables | read | chosen
    assert len(elsewhere) == len(set(elsewhere)) and not judged & set(elsewhere)
    assert judged | set(elsewhere) == set(sglang["fields"])


def test_every_flag_that_a_refusal_names_is_an_option_of_sglang(sglang):
    for rule in flag_rules.RULES + flag_rules.CPU_RULES:
        assert sglang["options"].get(refusals.flag(rule.field)) == rule.field
        for named in re.findall(r"--[a-z0-9-]+", f"{rule.why} {rule.remedy}"):
            assert named in sglang["options"], named


def test_every_flag_that_the_document_names_is_an_option_of_sglang_and_every_refused_one_is_in_it(sglang):
    text = (ROOT / "docs" / "sglang.md").read_text()
    for named in re.findall(r"`(--[a-z0-9-]+)[^*]", text):
        assert named in sglang["options"], named
    for rule in flag_rules.RULES + flag_rules.CPU_RULES:
        assert f"`{refusals.flag(rule.field)}`" in text, rule.field
    for name, _ in flag_rules.ENVIRONMENT:
        assert f"`{name}`" in text


def test_what_the_override_returns_are_fields_that_sglang_lets_a_model_set(sglang):
    outcome = decide(attention_backend="dsv4", decode_attention_backend="dsv4", kv_cache_dtype="fp8_e4m3")
    assert set(outcome.overrides) <= set(sglang["resolvable"])
    assert set(outcome.declarations) <= set(sglang["fields"])


def test_sglang_resolves_the_defaults(sglang):
    resolved = sglang["cases"]["defaults"]["resolved"]
    assert resolved["page_size"] == 128
    assert resolved["attention_backend"] == "dsv4_slot"
    assert resolved["mamba_radix_cache_strategy"] == "extra_buffer"
    assert resolved["mamba_track_interval"] == 128
    assert resolved["max_running_requests"] == 256
    assert resolved["prefill_graphs"] == "disabled"
    assert resolved["chunked_prefill_size"] % 128 == 0
    assert resolved["uses_mamba_radix_cache"] and not resolved["disable_overlap_schedule"]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "recipe",
            {
                "page_size": 256,
                "attention_backend": "dsv4_slot",
                "kv_cache_dtype": "auto",
                "mamba_track_interval": 256,
                "enable_deepseek_v4_fp4_indexer": False,
            },
        ),
        ("old backend name", {"attention_backend": "dsv4_slot"}),
        ("small", {"max_running_requests": 4, "chunked_prefill_size": 256, "page_size": 128}),
        ("interval", {"mamba_track_interval": 256, "page_size": 128}),
        ("no overlap", {"disable_overlap_schedule": True, "mamba_radix_cache_strategy": "extra_buffer"}),
        ("no radix cache", {"uses_mamba_radix_cache": False, "attention_backend": "dsv4_slot"}),
    ],
)
def test_sglang_resolves_accepted_combinations(sglang, case, expected):
    outcome = sglang["cases"][case]
    assert "resolved" in outcome, outcome
    assert {name: outcome["resolved"][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("page 64", "--page-size 64"),
        ("no_buffer", "--mamba-radix-cache-strategy no_buffer"),
        ("lazy", "--mamba-radix-cache-strategy extra_buffer_lazy"),
        ("chunk", "--chunked-prefill-size 1000"),
        ("unified memory", "--enable-unified-memory"),
        ("hicache", "--enable-hierarchical-cache"),
        ("hisparse", "--enable-hisparse"),
        ("lora", "--enable-lora"),
        ("dp attention", "--enable-dp-attention"),
        ("prefill server", "--disaggregation-mode prefill"),
        ("drafts", "--speculative-algorithm EAGLE"),
        ("prefill graphs", "--cuda-graph-backend-prefill full"),
        ("tokenizer workers", "--tokenizer-worker-num 2"),
        ("language model only", "--language-model-only"),
        ("two batches", "--enable-two-batch-overlap"),
        ("kv dtype", "--kv-cache-dtype bf16"),
        ("tensor parallel", "--tp-size 2"),
        ("window", "sliding_window is 64"),
        ("v41", "kv_source_layer_ids"),
        ("quantised", "fp8"),
        ("in-tree layout", "SGLANG_DSV4_KV_LAYOUT=v41"),
        ("rows", "SGLANG_DSV4_ROWS=int8"),
    ],
)
def test_a_refusal_reaches_the_launcher_ahead_of_sglangs_own_checks(sglang, case, says):
    outcome = sglang["cases"][case]
    assert outcome.get("error") == "Refused" and says in outcome["text"], outcome


def test_sglang_itself_refuses_beam_search_over_pages_and_over_state(sglang):
    over_pages, over_state = sglang["beam"]
    assert "--page-size 1" in over_pages and "mamba" in over_state


def test_packed_experts_are_marked_with_the_key_that_sglang_reads_for_any_model(sglang):
    assert sglang["experts"] == {
        "packed": "mxfp4",
        "fp8": None,
        "unreadable": "mxfp4",
        "not quantised": None,
        "declared": "nvfp4",
        "told otherwise": None,
    }


def test_servers_of_other_models_are_left_alone(sglang):
    assert sglang["cases"]["another parser"]["resolved"]["page_size"] == 64


def test_the_launchers_last_line_is_the_refusal(tmp_path):
    command = "-m sglang.launch_server --device cpu --model-config-parser dsv4_slot --enable-lora --model-path"
    done = subprocess.run(
        [sys.executable, *command.split(), checkpoint(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("sglang-dsv4: --enable-lora is not supported: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ("{", "[1]", '"x"'))
def test_config_overrides_that_are_no_json_object_are_refused(text):
    assert "no JSON object" in refusal(decide, json_model_override_args=text)


@pytest.mark.parametrize("count", (0, -1))
def test_a_server_that_could_run_no_request_is_refused(count):
    assert f"--max-running-requests {count}" in refusal(decide, max_running_requests=count)
