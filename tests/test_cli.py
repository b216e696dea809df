"""The command line: what it prints, what it returns, and one clear line for bad input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer, free_port

from sglang_dsv4 import check, cli, serving
from sglang_dsv4.console import Progress, table
from sglang_dsv4.ops import jit
from sglang_dsv4.serving import Launch, Server, ServerError

ROOT = Path(cli.__file__).parent.parent


def run_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python where the modules cannot be found."""
    code = f"""
import importlib.metadata, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules!r}: raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
find, version = importlib.util.find_spec, importlib.metadata.version
importlib.util.find_spec = lambda name, *a: None if name in {modules!r} else find(name, *a)
def hidden(name):
    if name in {modules!r}: raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
from sglang_dsv4.cli import main
sys.exit(main({list(arguments)!r}))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_package_can_be_run_as_the_command():
    done = subprocess.run([sys.executable, "-m", "sglang_dsv4", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.split()[0] == "sglang-dsv4"


def test_check_without_sglang_names_the_remedy():
    result = run_without(("sglang", "sgl_kernel"), "check")
    assert result.returncode == 1
    assert "problem: SGLang is not installed; pip install sglang==0.5.23" in result.stdout
    assert "hooks" in result.stdout and "not checked" in result.stdout
    assert "Traceback" not in result.stderr


def test_check_without_torch_names_the_remedy():
    result = run_without(("sglang", "sgl_kernel", "torch"), "check")
    assert result.returncode == 1
    assert "problem: torch is not installed" in result.stdout
    assert "Traceback" not in result.stderr


def test_check_without_the_stand_in_does_not_try_the_hooks():
    result = run_without(("sgl_kernel",), "check")
    assert result.returncode == 1
    assert "problem: SGLang cannot be imported without a GPU" in result.stdout
    assert "tools/cpu_shim" in result.stdout


def test_verify_needs_neither_torch_nor_sglang():
    with FakeServer() as server:
        result = run_without(("sglang", "torch", "requests", "numpy"), "verify", "--url", server.url)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("failed=0")


def test_check_of_this_installation_finds_no_problem():
    report = check.inspect_installation()
    assert report.problems == []
    found = dict(report.found)
    assert found["sglang"] == "0.5.23 (tested: 0.5.23)"
    assert re.fullmatch(r"(\d+) of \1 targets have the expected signature", found["hooks"])
    assert found["sparse_attention"].startswith("sglang_dsv4.ops.")


def test_check_reports_a_hook_whose_target_moved(monkeypatch):
    from dataclasses import replace

    from sglang_dsv4 import hooks

    first, second, *rest = hooks.HOOKS
    broken = (replace(first, target=first.target + "_gone"), replace(second, expected=("self", "x")), *rest)
    monkeypatch.setattr(hooks, "HOOKS", broken)
    problems = check.inspect_installation().problems
    assert len(problems) == 2
    assert "_gone is missing" in problems[0]
    assert "takes (" in problems[1] and "instead of (self, x)" in problems[1]


def test_check_reports_another_sglang_and_a_plugin_left_out(monkeypatch):
    real = check._version
    monkeypatch.setattr(check, "_version", lambda name: "0.5.99" if name == "sglang" else real(name))
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    problems = check.inspect_installation().problems
    assert any(line.startswith("SGLang 0.5.99 is installed") for line in problems)
    assert any(line.startswith("SGLANG_PLUGINS leaves the plugin out") for line in problems)


def test_verify_returns_its_result():
    with FakeServer() as server:
        assert cli.main(["verify", "--url", server.url]) == 0
    with FakeServer("other tokens after a hit") as server:
        assert cli.main(["verify", "--url", server.url]) == cli.FAILED


def test_verify_of_nothing_is_one_line(capsys):
    assert cli.main(["verify", "--url", f"http://127.0.0.1:{free_port()}"]) == cli.UNUSABLE
    error = capsys.readouterr().err
    assert error.startswith("sglang-dsv4: no server at") and error.count("\n") == 1


@pytest.mark.parametrize("ids", ("5", "5:", "a:b", "9:12", "50:40", "²:99"))
def test_ids_that_are_no_range_are_refused(ids, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["verify", "--url", "http://x:1", "--token-ids", ids])
    assert error.value.code == 2
    assert "LOW:HIGH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--copies", "0"), ("--copies", "-3"), ("--tolerance", "nan"), ("--tolerance", "-1"), ("--tolerance", "inf")],
)
def test_numbers_that_check_nothing_are_refused_before_anything_is_sent(option, value, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["verify", "--url", "http://x:1", f"{option}={value}"])
    assert error.value.code == 2
    assert option in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "url", ("http://[::1", "http://x:abc", "http://x y:1", "http://x:0", "http://x:99999", "ftp://x")
)
def test_an_address_that_is_none_is_one_line(url, capsys):
    assert cli.main(["verify", "--url", url]) == cli.UNUSABLE
    error = capsys.readouterr().err
    assert "is not a server's address: expected http://HOST:PORT" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ("demo", "serve"))
@pytest.mark.parametrize("port", ("0", "-1", "99999"))
def test_a_port_that_is_none_is_refused_before_anything_is_written(command, port, capsys):
    assert cli.main([command, "--port", port]) == cli.UNUSABLE
    assert capsys.readouterr().err == f"sglang-dsv4: {port} is not a port: use 1 to 65535\n"


@pytest.mark.parametrize("command", ("demo", "serve"))
def test_a_port_in_use_is_refused_and_whoever_uses_it_is_left_alone(command, capsys):
    with FakeServer() as other:
        port = other.url.rsplit(":", 1)[1]
        assert cli.main([command, "--port", port]) == cli.UNUSABLE
        assert other.flushes == 0
    assert f"port {port} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ("--sessions", "--turns"))
def test_a_demo_of_nothing_is_refused(flag, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["demo", flag, "0"])
    assert error.value.code == 2 and "a whole number above 0" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for log in (tmp_path, tmp_path / "file" / "server.log"):
        with pytest.raises(ServerError, match="cannot write the server's log"):
            Server(Script(tmp_path, extra_args=("pass",)), log)


def test_check_names_what_the_kernels_cannot_be_compiled_for(monkeypatch):
    def missing():
        raise jit.KernelBuildError("the CUDA kernels need apache-tvm-ffi: `pip install apache-tvm-ffi`")

    monkeypatch.setattr(jit, "require_tools", missing)
    report = check.Report(device="cuda")
    check._operations(report)
    assert report.problems == ["the CUDA kernels need apache-tvm-ffi: `pip install apache-tvm-ffi`"]


def demo(server: FakeServer, *arguments: str) -> int:
    return cli.main(["demo", "--url", server.url, *arguments])


def test_the_demo_replays_the_sessions_and_ends_with_its_figures(capsys):
    with FakeServer() as server:
        assert demo(server) == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    figures = re.fullmatch(
        r"demo: sessions=8 turns=32 prompt_tokens=(\d+) cached_tokens=(\d+) hit_rate=(0\.\d{3}) mismatches=0", last
    )
    assert figures
    assert float(figures[3]) == round(int(figures[2]) / int(figures[1]), 3) > 0.4
    assert sum(line.endswith(" same") for line in out.splitlines()) == 32
    assert server.flushes == 1 + 32


def test_the_demo_fails_on_a_mismatch(capsys):
    with FakeServer("other tokens after a hit") as server:
        assert demo(server) == cli.FAILED
    out = capsys.readouterr().out
    assert "DIFFER" in out and "mismatches=0" not in out


def test_the_demo_fails_where_hits_are_missing(capsys):
    with FakeServer("nothing is cached") as server:
        assert demo(server) == cli.FAILED
    assert "mismatches=0" in capsys.readouterr().out


def test_the_demo_refuses_too_few_sessions_and_too_long_prompts(capsys):
    with FakeServer(max_prompt=600) as server:
        assert demo(server, "--sessions", "9") == cli.UNUSABLE
        assert demo(server, "--scale", "2") == cli.UNUSABLE
    errors = capsys.readouterr().err.splitlines()
    assert any("holds 8 sessions of 4 turns, not 9" in line for line in errors)
    assert any("use a smaller --scale" in line for line in errors)


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


class Script(Launch):
    """A launch that runs a Python program instead of SGLang."""

    def command(self, port: int, group_port: int) -> list[str]:
        return [sys.executable, "-c", self.extra_args[0], str(port)]

    def check(self) -> None:
        pass


LISTEN = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_ends_with_everything_it_started(tmp_path):
    with Server(Script(tmp_path, extra_args=(LISTEN,)), tmp_path / "log" / "server.log") as server:
        child = int(server.log.read_text().split()[1])
        assert Path(f"/proc/{child}").exists()
    assert server.process.poll() is not None
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"
    server.stop()


SERVE = """
import sys
from pathlib import Path
from sglang_dsv4 import cli, serving
class Script(serving.Launch):
    def command(self, port, group_port): return [sys.executable, "-c", LISTEN, str(port)]
    def check(self): pass
cli.Launch = Script
LISTEN = sys.argv[3]
sys.exit(cli.main(["serve", "--model", sys.argv[1], "--log", sys.argv[2], "--port", sys.argv[4]]))
"""


@pytest.mark.parametrize("ending", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_that_ends_the_command_ends_the_server_too(ending, tmp_path):
    arguments = [str(tmp_path), str(tmp_path / "server.log"), LISTEN, str(free_port())]
    command = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], stdout=subprocess.PIPE, text=True)
    for line in command.stdout:
        if line.startswith("stop with Ctrl-C"):
            break
    child = int((tmp_path / "server.log").read_text().split()[1])
    command.send_signal(ending)
    assert command.wait(30) == 128 + ending
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_server_that_dies_is_told_by_its_last_words(tmp_path):
    script = Script(tmp_path, extra_args=("print('starting'); raise SystemExit('page 100: why; what to do')",))
    with pytest.raises(ServerError, match=r"did not start: page 100: why; what to do \(log: "):
        Server(script, tmp_path / "server.log")


@pytest.mark.parametrize("line", ["ValueError: no memory", "[12:00] Scheduler hit an exception: nvcc failed on a.cu"])
def test_an_error_is_told_rather_than_what_came_after_it(tmp_path, line):
    program = f"print('{line}'); raise SystemExit('kill_process_tree called')"
    with pytest.raises(ServerError, match=re.escape(f"did not start: {line} (log: ")):
        Server(Script(tmp_path, extra_args=(program,)), tmp_path / "server.log")


def test_a_server_that_hangs_is_given_up(tmp_path):
    script = Script(tmp_path, extra_args=("import time; time.sleep(600)",))
    with pytest.raises(ServerError, match="was not ready after"):
        Server(script, tmp_path / "server.log", timeout=0.1)


def test_a_launch_is_refused_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ServerError, match="holds no checkpoint"):
        Launch(tmp_path).check()
    real = serving.importlib.util.find_spec
    for name, said in (("sglang", "SGLang is not installed"), ("sgl_kernel", "tools/cpu_shim")):
        monkeypatch.setattr(
            serving.importlib.util, "find_spec", lambda n, hidden=name: None if n == hidden else real(n)
        )
        with pytest.raises(ServerError, match=said):
            Launch(checkpoint(tmp_path / name)).check()


def test_a_launch_always_bounds_the_pools():
    command = Launch(Path("m")).command(1, 2)
    assert {"--max-total-tokens", "--max-running-requests", "--max-mamba-cache-size"} <= set(command)
    assert command[command.index("--model-config-parser") + 1] == "dsv4_slot"


def test_the_chat_command_is_valid_json():
    command = cli.chat_command("http://host:1")
    body = json.loads(command.split("-d '")[1].rstrip("'"))
    assert body["messages"][0]["role"] == "user"


def test_tables_align():
    lines = table(("a", "bb"), [("x", 10), ("long", 5)]).splitlines()
    assert lines == ["a     bb", "----  --", "x     10", "long   5"]


def test_progress_outside_a_terminal_is_lines(capsys):
    progress = Progress(20, "work")
    for _ in range(20):
        progress.step("now")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "work 20/20 now" and len(lines) == 11
