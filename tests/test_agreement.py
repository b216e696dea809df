"""Ranks that compare what they read and choose: two backends as two ranks, in threads and, once, in processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from layers import RATIOS, inputs, part
from test_backend import Served, decode_batch, tokens

from sglang_dsv4.attention import agreement
from sglang_dsv4.attention.agreement import RankAgreement, RankError, checksum
from sglang_dsv4.refusals import Refused, check_cuda

CSA_LAYER = RATIOS.index(4)
X = [inputs(r, 400) for r in RATIOS]


class ThreadGroup:
    """SGLang's group, as far as it is used, between threads."""

    world_size = 2

    def __init__(self, barrier, shelf, rank):
        self.barrier, self.shelf, self.rank_in_group = barrier, shelf, rank

    def all_gather(self, values, dim):
        assert dim == 0 and values.dtype == torch.int64
        self.shelf[self.rank_in_group] = values
        self.barrier.wait(30)
        gathered = torch.cat(self.shelf, dim)
        self.barrier.wait(30)
        return gathered


def two_ranks():
    """Two backends over pools with the same bytes."""
    barrier, shelf = threading.Barrier(2), [None, None]
    ranks = [Served(), Served()]
    for rank, served in enumerate(ranks):
        served.backend._agreement = RankAgreement(ThreadGroup(barrier, shelf, rank), [CSA_LAYER])
    return ranks


def prefill(served):
    served.extend([1, 2], [(0, 300), (0, 61)])
    served.layers([part(i, (0, 300), (0, 61)) for i in X])


def decode(served):
    served.backend.init_forward_metadata(decode_batch([1, 2], [301, 62], [6, 0]))
    served.layers(tokens(X, 300, 61))


def on_both(work, ranks):
    """What each rank's work raises, None for nothing."""
    with ThreadPoolExecutor(2) as pool:
        return [future.exception(60) for future in [pool.submit(work, rank) for rank in ranks]]


def told(work, ranks):
    """The line with which both ranks end."""
    errors = on_both(work, ranks)
    assert [type(error) for error in errors] == [RankError, RankError]
    line = str(errors[0])
    assert str(errors[1]) == line and "\n" not in line
    return line


def test_equal_ranks_are_silent_in_prefill_and_decode():
    ranks = two_ranks()
    assert on_both(prefill, ranks) == [None, None]
    assert on_both(decode, ranks) == [None, None]
    assert [served.backend._agreement.steps for served in ranks] == [2, 2]


@pytest.mark.parametrize("work", [prefill, decode])
def test_another_page_on_one_rank_is_told_before_the_layers(work):
    ranks = two_ranks()
    ranks[1].pool.req_to_token[1, 128:256] += 128
    line = told(work, ranks)
    assert line.startswith("ranks differ in step 1: page table: rank 0 ")
    sums = [word for word in line.replace(",", "").split() if len(word) == 16]
    assert len(set(sums)) == 2


@pytest.mark.parametrize("work", [prefill, decode])
def test_another_slot_on_one_rank_is_told(work):
    ranks = two_ranks()
    ranks[1].pool.req_index_to_mamba_index_mapping[2] = 4
    assert "window slots" in told(work, ranks)


def test_another_snapshot_on_one_rank_is_told():
    ranks = two_ranks()
    on_both(prefill, ranks)

    def step(served):
        served.backend.init_forward_metadata(decode_batch([1, 2], [301, 62], [6 if served is ranks[0] else 7, 0]))

    assert "snapshot destinations (1)" in told(step, ranks)


def test_other_entries_on_one_rank_are_told_with_their_layer():
    ranks = two_ranks()
    on_both(prefill, ranks)
    keys = ranks[1].backend.pages.store.keys
    keys.copy_(keys.flip(-1))
    assert f"chosen entries of layer {CSA_LAYER}: rank 0 " in told(decode, ranks)


def test_pages_behind_a_request_s_last_one_may_differ():
    ranks = two_ranks()
    ranks[1].pool.req_to_token[2, 256:] = 77
    assert on_both(prefill, ranks) == [None, None]


@pytest.mark.parametrize(
    "other",
    [[[1, 2, 3, 4]], [[2, 1], [3, 4]], [[1, 2], [3, 5]], [[1, 2], [4, 3]], [[1, 2, 0], [3, 4, 0]], [[1, 3], [2, 4]]],
)
def test_checksums_tell_values_places_and_shapes_apart(other):
    assert checksum(torch.tensor([[1, 2], [3, 4]])) != checksum(torch.tensor(other))
    assert checksum(torch.tensor([[1, 2], [3, 4]])) == checksum(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))


def test_one_rank_or_no_switch_compares_nothing(monkeypatch):
    from sglang.srt.distributed import parallel_state

    class Alone:
        world_size = 1

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: Alone)
    assert RankAgreement.of_server([1]) is None
    monkeypatch.setenv(agreement.CHECK_RANKS, "1")
    assert RankAgreement.of_server([1]) is None
    Alone.world_size = 2
    assert RankAgreement.of_server([1]).layers == (1,)
    monkeypatch.setenv(agreement.CHECK_RANKS, "0")
    assert RankAgreement.of_server([1]) is None


def test_comparing_ranks_is_refused_inside_cuda_graphs():
    class Args:
        disable_cuda_graph = False
        cuda_graph_backend_decode = None
        kv_cache_dtype = "auto"

    with pytest.raises(Refused, match=r"SGLANG_DSV4_CHECK_RANKS=1 with CUDA graphs: .*add --disable-cuda-graph"):
        check_cuda(Args(), {agreement.CHECK_RANKS: "1"})
    Args.disable_cuda_graph = True
    check_cuda(Args(), {agreement.CHECK_RANKS: "1"})


def _process(rank, file, results):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)

    class Gloo:
        world_size, rank_in_group = 2, rank

        def all_gather(self, values, dim):
            parts = [torch.empty_like(values) for _ in range(2)]
            dist.all_gather(parts, values)
            return torch.cat(parts, dim)

    ranks = RankAgreement(Gloo(), [3, 7])
    for differs in (False, True):
        ranks._chosen.clear()
        ranks._none = torch.zeros((), dtype=torch.int64)
        ranks.chose(3, torch.arange(5))
        ranks.chose(7, torch.arange(5) + (rank if differs else 0))
        try:
            ranks.finish()
            results.put((rank, differs, None))
        except RankError as error:
            results.put((rank, differs, str(error).split(": ")[1]))
    dist.destroy_process_group()


def test_ranks_in_processes_find_the_layer_in_which_they_differ(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    workers = [context.Process(target=_process, args=(rank, tmp_path / "store", results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    said = sorted([results.get() for _ in range(4)], key=str)
    layer = "chosen entries of layer 7"
    assert said == [(0, False, None), (0, True, layer), (1, False, None), (1, True, layer)]
