"""How the GPU benchmarks start the two servers, as far as it shows without a GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import compare
import pytest
import soak
import swap
import workloads
from measure import positive
from rivals import GpuLaunch, Pools, same_kernels, together
from sglang.srt.server_args import ServerArgs

from sglang_dsv4.serving import Launch, ServerError
from sglang_dsv4.switches import CHECK_RANKS

CONFIGS = Path(__file__).parents[1] / "configs"


def parsed(launch):
    """SGLang's own reading of the command."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(launch.command(12345, 23456)[3:])


@pytest.mark.parametrize("plugin", [True, False])
def test_two_ranks_reduce_the_same_way_in_both_servers(plugin):
    ours = GpuLaunch(Path("m"), tp=2)
    launch = ours.over(Pools(4096, 8, 0), 4) if plugin else ours.in_tree(4096, 0.2, 4)
    args = parsed(launch)
    assert args.tp_size == 2 and args.port == 12345 and args.nccl_port == 23456
    assert args.disable_custom_all_reduce and args.enforce_disable_flashinfer_allreduce_fusion


def test_one_rank_leaves_reductions_alone():
    args = parsed(GpuLaunch(Path("m")))
    assert args.tp_size == 1 and not args.disable_custom_all_reduce


def test_all_servers_of_the_swap_run_the_same_kernels_outside_attention():
    for name, launch in swap.arms(Path("m"), "marlin", "triton", 2).items():
        args = parsed(launch)
        assert (args.moe_runner_backend, args.fp8_gemm_runner_backend, args.tp_size) == ("marlin", "triton", 2), name
        assert (args.model_config_parser == "dsv4_slot") is name.startswith("ours")


def measured(logprobs, wrong=(), leads=None):
    return {"logprobs": logprobs, "wrong": list(wrong), "leads": leads}


def test_steps_that_no_rounding_decides_are_counted_apart():
    reference = measured([0.0, -1.0, -2.0], leads=[0.05, 0.3, 2.0, 0.5])
    noisy = measured([0.0, -1.1, -2.2])  # moves a logprob by 0.2 at most: two of them by 0.4
    row = swap.distance(reference, noisy, measured([0.0, -1.0, -2.1], wrong=[0, 1, 3]), 100)
    assert row["greedy_agreement"] == 0.25 and row["logprob_max"] == 0.1
    assert row["decided_steps"] == 2 and row["decided_agreement"] == 0.5
    far = measured([0.0, -1.0, -3.5])
    assert swap.distance(reference, far, reference, 100)["decided_agreement"] is None


class Guided:
    """Answers with `says`, whatever comes before."""

    def __init__(self, says):
        self.says = says

    def generate(self, ids, count, **options):
        at = len(ids) - 1
        return SimpleNamespace(output_ids=self.says[at : at + count])


def test_guided_decoding_says_which_steps_differ():
    assert swap.guided(Guided([5, 6, 9, 8, 9]), [0], [5, 6, 7, 8, 7]) == [2, 4]
    assert swap.guided(Guided([5, 6]), [0], [5, 6]) == []


def reporting(**settings):
    return SimpleNamespace(client=SimpleNamespace(settings=lambda: settings))


def test_servers_that_chose_other_kernels_are_not_compared():
    same = {
        "a": reporting(moe_runner_backend="triton", tp_size=2),
        "b": reporting(moe_runner_backend="triton", tp_size=2),
    }
    assert same_kernels(same) == {"moe_runner_backend": "triton", "fp8_gemm_runner_backend": None, "tp_size": 2}
    with pytest.raises(ServerError, match=r"servers differ in moe_runner_backend: .*'b': 'marlin'"):
        same_kernels(same | {"b": reporting(moe_runner_backend="marlin", tp_size=2)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_soak_of_several_ranks_compares_them_in_eager_steps(ranks, monkeypatch, tmp_path):
    started = {}

    def server(launch, log, *, timeout, env):
        started.update(launch=launch, env=env)
        raise ServerError("enough seen")

    monkeypatch.setattr(soak, "Server", server)
    (tmp_path / "config.json").write_text('{"vocab_size": 4000}')
    monkeypatch.setattr("sys.argv", ["soak.py", str(tmp_path), "--tp", str(ranks)])
    assert soak.main() == 1
    assert started["launch"].tp == ranks
    assert started["launch"].graphs is (ranks == 1)
    assert (started["env"].get(CHECK_RANKS) == "1") is (ranks > 1)


def test_a_preset_may_have_a_factor_a_number_of_requests_and_bounded_answers():
    whole = workloads.build("coding-agent")
    made = compare.workload("coding-agent@0.25:7", None, 9, None)
    assert made.name == "coding-agent@0.25:7" and len(made.requests) == 7
    assert max(request.answer for request in made.requests) == 9
    longest = max(request.new_tokens for request in whole.requests[:7])
    assert abs(max(request.new_tokens for request in made.requests) / longest - 0.25) < 0.01
    assert compare.workload("coding-agent", None, None, None) == whole


@pytest.mark.parametrize("preset", ["nonsense", "no-reuse@", "no-reuse:x", "no-reuse@1:2:3", "no-reuse@1.2.3"])
def test_a_preset_that_is_none_is_one_line(preset):
    with pytest.raises(ValueError) as error:
        compare.workload(preset, None, None, None)
    assert "\n" not in str(error.value)


class Program(Launch):
    """A launch of a Python program; the folder gets the process id of each start."""

    def command(self, port: int, group_port: int) -> list[str]:
        return [sys.executable, "-c", *self.extra_args]

    def check(self) -> None:
        pass


def asleep(folder: Path) -> Program:
    """A server that never answers."""
    mark = folder / "started"
    program = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(900)"
    return Program(folder, extra_args=(program,))


def pid_of(folder: Path) -> int:
    mark = folder / "started"
    while not (mark.exists() and mark.read_text()):
        time.sleep(0.05)
    return int(mark.read_text())


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_start_that_fails_ends_the_others_and_is_the_one_that_is_told(tmp_path):
    failing = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'started')!r}).exists(): time.sleep(0.05)"
    failing += "\nprint('Error: no such weights')\nraise SystemExit(1)"
    launches = {"asleep": asleep(tmp_path), "failing": Program(tmp_path, extra_args=(failing,))}
    with pytest.raises(ServerError, match="did not start: Error: no such weights"), together(launches, tmp_path, {}):
        pass
    assert gone(pid_of(tmp_path))


def test_a_signal_during_the_start_ends_the_servers(tmp_path):
    program = f"""
from pathlib import Path
from rivals import together
from sglang_dsv4.serving import exit_on_signals
from test_rivals import asleep
exit_on_signals()
folder = Path({str(tmp_path)!r})
with together({{"asleep": asleep(folder)}}, folder, {{}}):
    pass
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    bench = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths})
    pid = pid_of(tmp_path)
    bench.terminate()
    assert bench.wait() == 128 + signal.SIGTERM
    assert gone(pid)


def test_a_machine_without_a_gpu_is_told_before_any_start(monkeypatch):
    monkeypatch.setattr("rivals.card", lambda: "no GPU")
    with pytest.raises(ServerError, match="no CUDA device"):
        GpuLaunch(Path("m")).check()


@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "", "many"])
def test_counts_are_whole_numbers_above_zero(wrong):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number above 0"):
        positive(wrong)


@pytest.mark.parametrize("wrong", ["short-chats@0", "short-chats@1000000", "short-chats:0", "short-chats@1.2.3"])
def test_a_preset_s_factor_and_number_are_told_with_its_name(wrong):
    with pytest.raises(ValueError, match=f"'{wrong}'"):
        compare.workload(wrong, None, None, None)


def resumed(tmp_path, text):
    """A comparison that goes on with a result file of that text."""
    out = tmp_path / "compare.json"
    out.write_text(text)
    shutil.copy(CONFIGS / "v4_flash.json", tmp_path / "config.json")
    setting = {name: value for name, value in SETTING.items() if name != "passes"}
    return compare.Bench(argparse.Namespace(model=tmp_path, resume=True, out=out, **setting))


ROW = {"workload": "short-chats", "system": "ours", "commit": "abc"}
SETTING = {"users": 16, "tokens": 200_000, "chats": 120, "answers": 32, "passes": compare.PASSES}


def test_a_comparison_goes_on_with_rows_of_its_own_setting(tmp_path):
    stopped = ROW | {"system": "in-tree", "stopped": "too long"}
    kept = {"setting": SETTING, "runs": [ROW, stopped], "start_s": {"ours": 1.0}, "kernels": {}}
    bench = resumed(tmp_path, json.dumps(kept))
    assert bench.rows == [ROW] and bench.starts == {"ours": 1.0}
    assert bench.has("short-chats", "ours") and not bench.has("short-chats", "in-tree")


@pytest.mark.parametrize(
    "text,told",
    [
        ("[]", "is not a result"),
        ("{", "is not a result"),
        (json.dumps({"setting": SETTING, "runs": 7}), "is not a result"),
        ("{}", "was measured with None"),
        (json.dumps({"setting": SETTING | {"passes": 1}, "runs": [ROW]}), "was measured with"),
        (json.dumps({"setting": SETTING, "runs": [{"x": 1}]}), "rows without"),
    ],
)
def test_a_comparison_refuses_what_does_not_belong_beside_its_rows(tmp_path, text, told):
    with pytest.raises(ValueError, match=told) as error:
        resumed(tmp_path, text)
    assert "\n" not in str(error.value)


WRONG_OPTIONS = [
    ("moving", ["--lot", "x"]),
    ("moving", ["--lot", "0"]),
    ("moving", ["--floor", "7"]),
    ("moving", ["--floor", "nan"]),
    ("moving", ["--limit", "-3"]),
    ("moving", ["--memory", "foo"]),
    ("moving", ["--memory", ","]),
    ("simulate", ["--chats", "0"]),
    ("simulate", ["--share", "2"]),
    ("simulate", ["--memory", "-1"]),
    ("simulate", ["--memory", "1e30"]),
    ("simulate", ["--scale", "nan"]),
    ("simulate", ["--scale", "0"]),
    ("replay", ["--scale", "inf"]),
    ("standing", ["--limit", "0"]),
]


@pytest.mark.parametrize("name,option", WRONG_OPTIONS, ids=[f"{n} {' '.join(o)}" for n, o in WRONG_OPTIONS])
def test_an_option_that_cannot_be_meant_is_named(name, option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "short-chats", *option])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and f"argument {option[0]}" in told
