"""Ports of servers that start at the same time, and what happens when one is taken meanwhile. No SGLang here."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_server import free_port

from sglang_dsv4 import ports, serving
from sglang_dsv4.ports import HIGH, LOW, PortTaken, Reservation, reserve
from sglang_dsv4.serving import Launch, Server, ServerError

RESERVE = (
    "import sys; from sglang_dsv4.ports import reserve; r = reserve(); print(r.port, flush=True); sys.stdin.read()"
)

# A server as SGLang is one: it binds late, tells what went wrong, and stays.
TAKEN = """
import http.server, socket, sys, time
port, group_port, thief = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
kept = []
if thief != "-":  # somebody takes the port of the first start, as many starts as `thief` has marks
    marks = open(thief).read()
    if marks:
        open(thief, "w").write(marks[1:])
        kept.append(socket.socket())
        kept[0].bind(("127.0.0.1", port))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer.allow_reuse_address = True
try:
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
except OSError as error:
    print(f"ERROR:    [Errno 98] error while attempting to bind on address {port}: address already in use", flush=True)
    time.sleep(600)
print(port, group_port, flush=True)
server.serve_forever()
"""


class Late(Launch):
    """A launch of that program; the number of lost starts stands in the file."""

    def command(self, port: int, group_port: int) -> list[str]:
        return [sys.executable, "-c", TAKEN, str(port), str(group_port), *self.extra_args]

    def check(self) -> None:
        pass


def losing(tmp_path, starts: int) -> Late:
    marks = tmp_path / "marks"
    marks.write_text("x" * starts)
    return Late(tmp_path, extra_args=(str(marks),))


def test_threads_that_reserve_at_the_same_time_get_different_ports(monkeypatch):
    order = list(range(LOW, LOW + 64))
    monkeypatch.setattr(ports, "_candidates", lambda: iter(order))  # all try the same ones first
    with ThreadPoolExecutor(16) as pool:
        held = list(pool.map(lambda _: reserve(), range(16)))
    try:
        assert len({reservation.port for reservation in held}) == 16
    finally:
        for reservation in held:
            reservation.close()


def test_another_process_s_reservation_holds_until_it_ends():
    with subprocess.Popen(
        [sys.executable, "-c", RESERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        port = int(other.stdout.readline())
        with pytest.raises(PortTaken):
            Reservation(port)
        other.stdin.close()
    Reservation(port).close()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_not_reserved_and_its_name_is_given_back(address):
    port = free_port()
    with socket.create_server((address, port)), pytest.raises(PortTaken):
        Reservation(port)
    Reservation(port).close()


@pytest.mark.parametrize(
    "kernel, expected",
    [("32768 60999", range(LOW, HIGH + 1)), ("15000 60999", range(LOW, 15000)), ("1024 65535", range(LOW, HIGH + 1))],
)
def test_ports_lie_outside_what_the_kernel_gives_away_where_it_leaves_any(kernel, expected, tmp_path, monkeypatch):
    file = tmp_path / "range"
    file.write_text(kernel)
    monkeypatch.setattr(ports, "_EPHEMERAL", file)
    assert sorted(ports._candidates()) == list(expected)


def test_nothing_free_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "_candidates", lambda: iter(()))
    with pytest.raises(ServerError, match="no free port from 10000 to 21999: end other servers"):
        Server(Late(tmp_path, extra_args=("-",)), tmp_path / "log")


def test_a_server_holds_two_ports_until_it_is_stopped(tmp_path):
    with Server(Late(tmp_path, extra_args=("-",)), tmp_path / "log") as server:
        both = [int(word) for word in server.log.read_text().split()]
        assert len(set(both)) == 2 and both[0] == server.port
        for port in both:
            with pytest.raises(PortTaken):
                Reservation(port)
    for port in both:
        Reservation(port).close()


def test_a_server_whose_port_was_taken_starts_again_on_another(tmp_path):
    commands = []
    with Server(losing(tmp_path, 2), tmp_path / "log", starting=commands.append) as server:
        tried = [int(command[3]) for command in commands]
        assert len(set(tried)) == 3 and tried[-1] == server.port


def test_a_server_that_loses_every_port_is_one_line_at_once(tmp_path):
    with pytest.raises(ServerError) as error:
        Server(losing(tmp_path, 9), tmp_path / "log")
    told = str(error.value)
    assert "took a port while the server started, 3 times in a row" in told and "\n" not in told
    assert "[Errno 98]" in told
    assert (tmp_path / "marks").read_text() == "x" * (9 - serving.STARTS)


def test_a_port_that_the_user_named_is_not_replaced(tmp_path):
    commands = []
    with pytest.raises(ServerError, match=r"took a port while the server started .*name another with --port"):
        Server(losing(tmp_path, 1), tmp_path / "log", port=free_port(), starting=commands.append)
    assert len(commands) == 1


def test_a_stranger_s_answer_is_not_taken_for_the_server_s(tmp_path):
    """The thief answers as a server does; the log says that it is not ours."""
    program = TAKEN.replace(
        """kept.append(socket.socket())
        kept[0].bind(("127.0.0.1", port))""",
        """
        import threading
        class Stranger(http.server.BaseHTTPRequestHandler):
            def do_GET(self): self.send_response(200); self.end_headers()
            def log_message(self, *_): pass
        stranger = http.server.ThreadingHTTPServer(("127.0.0.1", port), Stranger)
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        """,
    )
    assert program != TAKEN

    class Robbed(Late):
        def command(self, port: int, group_port: int) -> list[str]:
            return [sys.executable, "-c", program, str(port), str(group_port), *self.extra_args]

    marks = losing(tmp_path, 1).extra_args
    commands = []
    with Server(Robbed(tmp_path, extra_args=marks), tmp_path / "log", starting=commands.append) as server:
        assert re.fullmatch(rf"{server.port} \d+\n", server.log.read_text())
    assert len(commands) == 2


@pytest.mark.parametrize(
    "line",
    [
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
        "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 1, code: -98, EADDRINUSE",
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')",
    ],
)
def test_the_lines_that_tell_of_a_taken_port(line):
    assert serving._TAKEN.search(line)
