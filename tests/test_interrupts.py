"""What ends a bench program early: nothing is waited for that could be dropped, and no figure is lost."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
from fake_server import FakeServer
from replay import ServerTokens, replay
from rivals import GpuLaunch
from workloads import Piece, Request, Workload

from sglang_dsv4.serving import Client, ServerError
from sglang_dsv4.workers import workers

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SOURCE = ServerTokens(low=0, high=60, user=7, assistant=8, ids=tuple(range(300, 360)))


def load_kernels():
    """bench/kernels.py, whose name is also that of the folder of sources."""
    path = ROOT / "bench" / "kernels.py"
    spec = importlib.util.spec_from_file_location("bench_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interrupts(Client):
    """Its third request comes with a Ctrl-C for the program."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sent = 0
        self.lock, self.ends = threading.Lock(), threading.Event()

    def generate(self, *request, **options):
        with self.lock:
            if self.ends.is_set():
                raise ServerError("stopped")
            self.sent += 1
            if self.sent == 3:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return super().generate(*request, **options)


def test_tasks_under_way_do_not_keep_a_program_that_ends():
    goes_on, later = threading.Event(), []
    with pytest.raises(KeyboardInterrupt), workers(1) as pool:
        busy = pool.submit(goes_on.wait, 20)
        dropped = pool.submit(later.append, 1)
        raise KeyboardInterrupt
    assert not busy.done() and dropped.cancelled()
    goes_on.set()
    assert busy.result() and later == []


def test_a_body_that_comes_to_its_end_waits_for_all_tasks():
    done = []
    with workers(2) as pool:
        for i in range(8):
            pool.submit(lambda i=i: (threading.Event().wait(0.01), done.append(i)))
    assert sorted(done) == list(range(8))


def test_servers_are_stopped_at_once_while_chats_go_on_in_threads(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "v4_flash.json").read_text())
    with FakeServer() as server:
        client, sent = Interrupts(server.url), []

        @contextmanager
        def together(launches, logs, starts):
            try:
                yield {name: SimpleNamespace(client=client) for name in launches}
            finally:
                sent.append(client.sent)

        monkeypatch.setattr(serving, "together", together)
        bench = serving.Bench(GpuLaunch(tmp_path), tmp_path, tmp_path, 1, lambda: None)
        with pytest.raises(KeyboardInterrupt):
            bench.chats([40], [0.1], 1)
        client.ends.set()
    assert sent[0] < 40


def test_no_request_is_replayed_behind_a_ctrl_c():
    requests = tuple(Request(f"s{i}", 0, 0.0, 0, (Piece(f"t{i}", 20),), 2) for i in range(400))
    with FakeServer() as server:
        client = Interrupts(server.url)
        with pytest.raises(KeyboardInterrupt):
            replay(client, Workload("many", requests), users=2, speed=None, source=SOURCE, system="interrupted")
    assert client.sent < 40


def test_a_case_has_its_row_as_soon_as_it_is_measured(tmp_path):
    kernels, out = load_kernels(), tmp_path / "rows.json"
    kernels.keep(out, {"op": "gather", "shape": "a", "us": 1})
    kernels.keep(out, {"op": "gather", "shape": "b", "us": 2})
    kernels.keep(out, {"op": "gather", "shape": "a", "us": 3})
    rows = json.loads(out.read_text())
    assert [(r["shape"], r["us"]) for r in rows] == [("b", 2), ("a", 3)]


@pytest.mark.parametrize("held", ["{}", "[1]", "not JSON"])
def test_a_file_of_something_else_is_told_before_anything_is_measured(held, tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.json"
    out.write_text(held)
    monkeypatch.setattr("sys.argv", ["kernels.py", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        load_kernels().main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "name another --out" in said
    assert out.read_text() == held
