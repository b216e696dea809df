"""How the GPU benchmarks start the two servers, as far as it shows without a GPU."""

from __future__ import annotations

import argparse
import os
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
from rivals import GpuLaunch, Pools, positive, same_kernels, together
from sglang.srt.server_args import ServerArgs

from sglang_dsv4.serving import Launch, ServerError
from sglang_dsv4.switches import CHECK_RANKS


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
