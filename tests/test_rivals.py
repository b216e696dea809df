"""How the GPU benchmarks start the two servers, as far as it shows without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import compare
import pytest
import soak
import swap
import workloads
from rivals import GpuLaunch, Pools, same_kernels
from sglang.srt.server_args import ServerArgs

from sglang_dsv4.serving import ServerError
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
