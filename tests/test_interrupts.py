"""What ends a program early: nothing is waited for that could be dropped, one line says why, and no figure is lost."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import threading
import urllib.error
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
import soak
import swap
from fake_server import FakeServer
from measure import save_text
from replay import ServerTokens, replay
from rivals import GpuLaunch
from workloads import Piece, Request, Workload

from sglang_dsv4.console import INTERRUPTED, run_program
from sglang_dsv4.serving import Client, ServerError
from sglang_dsv4.workers import Workers

ROOT = Path(__file__).parent.parent
SOURCE = ServerTokens(low=0, high=60, user=7, assistant=8, ids=tuple(range(300, 360)))
MANY = Workload("many", tuple(Request(f"s{i}", 0, 0.0, 0, (Piece(f"t{i}", 20),), 2) for i in range(400)))
TOGETHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from sglang_dsv4.console import run_program
from sglang_dsv4.serving import Client
run_program("together", lambda: len(Client(sys.argv[1]).generate_together([[1, 2]] * 3, [2] * 3)))
"""


@pytest.fixture(autouse=True)
def ctrl_c():
    """As in a program on a terminal: a shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def load_kernels():
    """bench/kernels.py, whose name is also that of the folder of sources."""
    spec = importlib.util.spec_from_file_location("bench_kernels", ROOT / "bench" / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interrupts(Client):
    """Its third request comes with a Ctrl-C for the program, or fails with `error`."""

    def __init__(self, url: str, error: Exception | None = None) -> None:
        super().__init__(url)
        self.sent, self.error = 0, error
        self.lock, self.ends = threading.Lock(), threading.Event()

    def generate(self, *request, **options):
        with self.lock:
            if self.ends.is_set():
                raise ServerError("stopped")
            self.sent += 1
            if self.sent == 3:
                if self.error:
                    raise self.error
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return super().generate(*request, **options)

    def is_quiet(self, users: int) -> None:
        """Asserts that nobody goes on, but with what is under way."""
        sent = self.sent
        threading.Event().wait(0.5)
        assert self.sent <= sent + users


def test_tasks_under_way_do_not_keep_a_body_that_is_ended():
    begun, goes_on, later = threading.Event(), threading.Event(), []
    with pytest.raises(KeyboardInterrupt), Workers(1) as pool:
        busy = pool.submit(lambda: (begun.set(), goes_on.wait(20))[1])
        dropped = pool.submit(later.append, 1)
        begun.wait()
        raise KeyboardInterrupt
    assert not busy.done() and dropped.cancelled()
    goes_on.set()
    assert busy.result() and later == []


def test_a_body_that_comes_to_its_end_waits_for_all_tasks():
    done = []
    with Workers(2) as pool:
        for i in range(8):
            pool.submit(lambda i=i: (threading.Event().wait(0.01), done.append(i)))
    assert sorted(done) == list(range(8))


def test_results_come_in_the_order_of_their_tasks():
    with Workers(3) as pool:
        late = pool.gather(lambda a, b: (threading.Event().wait(0.01 * (3 - a)), a + b)[1], range(3), (5, 6, 7))
        assert late == [5, 7, 9]
        assert pool.gather(abs, []) == []


def test_a_task_that_fails_is_told_while_others_are_under_way():
    goes_on, slow = threading.Event(), []

    def task(i):
        if i == 0:
            slow.append(goes_on.wait(20))
        raise ValueError(i)

    with pytest.raises(ValueError, match="1"), Workers(2) as pool:
        pool.gather(task, range(2))
    assert slow == []
    goes_on.set()


def test_a_server_that_never_answers_does_not_keep_a_program_from_ending():
    with FakeServer("never answers") as server:
        program = subprocess.Popen([sys.executable, "-c", TOGETHER, server.url], stderr=subprocess.PIPE, text=True)
        try:
            assert server.asked.wait(60)
            program.send_signal(signal.SIGINT)
            said = program.communicate(timeout=60)[1]
        finally:
            program.kill()
    assert program.returncode == INTERRUPTED and said == "together: stopped\n"


@pytest.mark.parametrize(("returned", "status"), [(0, 0), (None, 0), (3, 3)])
def test_a_program_ends_with_what_it_returns(returned, status):
    with pytest.raises(SystemExit) as ended:
        run_program("one", lambda: returned)
    assert ended.value.code == status


def test_servers_are_stopped_at_once_while_chats_go_on_in_threads(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text((ROOT / "configs" / "v4_flash.json").read_text())
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


def test_a_soak_that_is_ended_says_so_in_its_file(monkeypatch, tmp_path):
    def ends(*a, **k):
        raise KeyboardInterrupt

    (tmp_path / "config.json").write_text((ROOT / "configs" / "v4_flash.json").read_text())
    monkeypatch.setattr(soak, "Server", ends)
    monkeypatch.setattr(soak, "card", lambda: "none")
    monkeypatch.setattr("sys.argv", ["soak.py", str(tmp_path), "--out", str(tmp_path / "soak.json")])
    with pytest.raises(KeyboardInterrupt):
        soak.main()
    assert json.loads((tmp_path / "soak.json").read_text())["stopped"] == "KeyboardInterrupt()"


def test_no_request_is_replayed_behind_a_ctrl_c():
    watchers = [t for t in threading.enumerate() if "_watch" in t.name]
    with FakeServer() as server:
        client = Interrupts(server.url)
        with pytest.raises(KeyboardInterrupt):
            replay(client, MANY, users=2, speed=None, source=SOURCE, system="interrupted")
        client.is_quiet(users=2)
        for thread in threading.enumerate():
            if "_watch" in thread.name and thread not in watchers:
                thread.join(20)
                assert not thread.is_alive()
    assert client.sent < 40


@pytest.mark.parametrize("error", [ServerError("gone"), OverflowError("odd")])
def test_whatever_ends_a_request_ends_the_replay(error):
    raised = []

    def run(client):
        try:
            replay(client, MANY, users=2, speed=None, source=SOURCE, system="broken")
        except Exception as got:
            raised.append(got)

    with FakeServer() as server:
        client = Interrupts(server.url, error)
        replaying = threading.Thread(target=run, args=(client,), daemon=True)
        replaying.start()
        replaying.join(60)
        client.is_quiet(users=2)
    assert raised == [error] and client.sent < 40


def test_an_error_whose_text_breaks_off_is_told_as_the_server_s(monkeypatch):
    class Broken:
        def read(self, *count):
            raise ConnectionResetError("reset")

        def close(self):
            pass

    client = Client("http://127.0.0.1:1")
    error = urllib.error.HTTPError("http://127.0.0.1:1/generate", 500, "bad", None, Broken())
    monkeypatch.setattr(client, "_open", lambda *a: (_ for _ in ()).throw(error))
    with pytest.raises(ServerError, match="answered 500: and broke the connection"):
        client.generate([1], 1)


def test_an_endless_count_is_told_as_an_answer_that_cannot_be_read():
    with FakeServer("an endless prompt") as server, pytest.raises(ServerError, match="cannot be read"):
        Client(server.url).generate([1], 1)


def test_a_case_has_its_row_as_soon_as_it_is_measured(tmp_path):
    kernels, out, rows = load_kernels(), tmp_path / "new" / "rows.json", []
    for shape, us in (("a", 1), ("b", 2), ("a", 3)):
        kernels.keep(out, rows, {"op": "gather", "shape": shape, "us": us})
        assert json.loads(out.read_text()) == rows
    assert [(r["shape"], r["us"]) for r in rows] == [("b", 2), ("a", 3)]


@pytest.mark.parametrize("held", ["{}", "[1]", "not JSON", "[" * 100_000])
def test_a_file_of_something_else_is_told_before_anything_is_measured(held, tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.json"
    out.write_text(held)
    monkeypatch.setattr("sys.argv", ["kernels.py", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        load_kernels().main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "name another --out" in said
    assert out.read_text() == held


def test_a_full_disk_leaves_the_results_of_before(tmp_path, monkeypatch):
    out, whole = tmp_path / "rows.json", Path.write_text
    save_text(out, "before")

    def half(path, text):
        whole(path, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space"):
        save_text(out, "afterwards")
    monkeypatch.undo()
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]


def test_results_go_where_a_link_leads_and_into_what_is_no_file(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    save_text(tmp_path / "link.json", "text")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "there.json").read_text() == "text"
    save_text(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


def says(chosen, best):
    meta = {"input_token_logprobs": chosen, "input_top_logprobs": best}
    return SimpleNamespace(url="there", post=lambda path, body: {"meta_info": meta})


def test_scored_text_has_a_logprob_and_a_lead_for_each_token():
    chosen = [[None, 1, None], [-1.0, 2, None], [-2.0, 3, None]]
    best = [None, [[-1.0, 2], [-1.5, 9]], [[-0.5, 8], [-2.0, 3]]]
    assert swap.scored(says(chosen, best), [1, 2, 3], 1) == ([-1.0, -2.0], [0.5, 1.5])


@pytest.mark.parametrize(
    ("chosen", "best"),
    [
        ([[None]], [[[-1.0], [-2.0]]]),
        ([[-1.0]], [None]),
        ([[-1.0]], [[[-1.0]]]),
        ([], []),
        ([[math.nan]], [[[-1.0], [-2.0]]]),
        ([[-1.0]], [[[-1.0], [-math.inf]]]),
    ],
)
def test_logprobs_that_are_none_are_told_in_one_line(chosen, best):
    with pytest.raises(ServerError, match=r"^there .*logprobs"):
        swap.scored(says(chosen, best), [1, 2], 1)
