"""Replay and report, against a stand-in for a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import replay as replayed
import report
from answers import Recording
from fake_server import FakeServer
from measure import percentiles
from replay import ServerTokens, replay, tokens_of
from workloads import USER, Piece, Request, Workload, build

from sglang_dsv4.serving import Client, ServerError

BENCH = Path(__file__).parent.parent / "bench"
SOURCE = ServerTokens(low=0, high=60, user=7, assistant=8, ids=tuple(range(300, 360)))


def run(workload, server, **options):
    settings = {"users": 1, "speed": None, "source": SOURCE, "system": "fake", **options}
    return replay(Client(server.url), workload, **settings)


@pytest.fixture
def workload():
    return build("branching", scale=0.1, limit=24)


def test_a_replay_counts_what_the_server_found_against_what_it_could_have_found(workload):
    with FakeServer() as server:
        result = run(workload, server)
    assert result["requests"] == 24 and result["prompt_tokens"] == sum(workload.lengths())
    assert 0 < result["cached_tokens"] <= result["ideal_tokens"] < result["prompt_tokens"]
    assert sum(result["missed_tokens"].values()) == result["prompt_tokens"] - result["cached_tokens"]
    assert result["recomputed_over_ideal"] >= 1.0
    assert set(result["ttft_s"]) == {"p50", "p90", "p95", "p99"} and result["answer_tokens_per_s"] > 0


def test_several_users_send_every_request_once_and_no_session_overtakes_itself(workload):
    with FakeServer() as server:
        result = run(workload, server, users=6)
        alone = run(workload, server)
    assert result["requests"] == 24 and result["prompt_tokens"] == alone["prompt_tokens"]


def test_recorded_arrivals_are_kept_and_scaled():
    requests = tuple(Request(f"s{i}", 0, i * 10.0, 0, (Piece(f"t{i}", 20),), 2) for i in range(4))
    with FakeServer() as server:
        assert run(Workload("timed", requests), server, speed=60.0)["seconds"] >= 0.5
        assert run(Workload("timed", requests), server)["seconds"] < 0.5


def test_a_server_without_reuse_is_told_from_one_that_forgets(workload):
    with FakeServer("answers leave nothing") as server:
        result = run(workload, server)
    assert result["missed_tokens"]["evicted or no snapshot"] > 0


def test_a_failing_server_ends_the_replay_with_its_error(workload):
    with FakeServer("no cache report") as server, pytest.raises(ServerError, match="cached tokens"):
        run(workload, server, users=3)


def test_answers_are_compared_one_by_one_with_those_of_another_server(workload, tmp_path):
    kept = Recording(workload.name)
    with FakeServer("nothing is cached") as server:
        run(workload, server, keep=kept)
    kept.save(tmp_path / "cold.json")
    cold = Recording.load(tmp_path / "cold.json")
    assert cold.answers.keys() == {(r.session, r.turn) for r in workload.requests} and cold.prompts == kept.prompts
    with FakeServer() as server:
        result = run(workload, server, against=cold, users=4)
    assert result["compared"] == 24 and result["different"] == [] and result["cached_tokens"] > 0


@pytest.mark.parametrize("what", ["tokens", "logprobs"])
def test_every_answer_that_differs_is_named_and_no_other(workload, what):
    """Conversations go on with the recorded answers: one other answer does not make all that follow differ."""
    cold, warm = Recording(workload.name), Recording(workload.name)
    with FakeServer("nothing is cached") as server:
        run(workload, server, keep=cold)
    with FakeServer(f"other {what} after a hit") as server:
        result = run(workload, server, against=cold, keep=warm)
    hit = [f"{s}, turn {t}" for (s, t), answer in warm.answers.items() if answer.cached_tokens]
    assert 0 < len(hit) < 24 and [line.split(" (")[0] for line in result["different"]] == hit


def test_answers_of_another_workload_are_refused_before_anything_is_sent(workload):
    with FakeServer() as server, pytest.raises(ValueError, match="replay the same workload"):
        run(workload, server, against=Recording("short-chats"))
    assert server.flushes == 0


def test_the_command_fails_where_an_answer_differs(tmp_path):
    def command(server, *more):
        sent = [sys.executable, BENCH / "replay.py", "branching", "--scale", "0.1", "--limit", "12"]
        return subprocess.run([*sent, "--url", server.url, *more], capture_output=True, text=True)

    cold = tmp_path / "cold.json"
    with FakeServer("nothing is cached") as server:
        assert command(server, "--ids", cold).returncode == 0
    with FakeServer() as server:
        assert command(server, "--against", cold).returncode == 0
    with FakeServer("other tokens after a hit") as server:
        done = command(server, "--against", cold)
    assert done.returncode == 1 and "answers differ" in done.stderr
    bad = command(server, "--against", BENCH / "traces" / "README.md")
    assert bad.returncode == 1 and "is not a file of answers" in bad.stderr


def test_prompts_that_the_server_cannot_take_are_refused_before_anything_is_sent():
    with FakeServer(max_prompt=100) as server, pytest.raises(ServerError, match="use --scale"):
        run(build("no-reuse", scale=0.1, limit=2), server)


def test_tokens_come_from_the_servers_tokenizer_and_role_tokens_only_if_it_has_them():
    with FakeServer() as server:
        source = tokens_of(Client(server.url), None)
    drawn = source.draw("text", 50).tolist()
    assert all(300 <= token < 360 for token in drawn)
    assert source.draw(USER, 1).tolist() == [source.user] and 300 <= source.user < 360


def test_percentiles_are_of_the_values_themselves():
    assert percentiles([]) == {}
    assert percentiles(range(1, 101)) == {"p50": 51, "p90": 91, "p95": 96, "p99": 100}


def test_a_report_has_a_row_a_run_and_names_its_plots(workload, tmp_path):
    with FakeServer() as server:
        runs = [run(workload, server), {**run(workload, server), "system": "other"}]
    text = report.markdown(runs, ["first_token.png"])
    assert text.count("| branching | fake |") == 3 and "![first token](first_token.png)" in text


def test_a_report_without_matplotlib_says_what_to_install(tmp_path):
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"runs": []}))
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    command = [sys.executable, str(BENCH / "report.py"), str(result), "--out", str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "report: plots need matplotlib: pip install 'sglang-dsv4[bench]'\n"


def test_a_file_that_is_no_result_is_named(tmp_path):
    bad = tmp_path / "bad.json"
    other = b'{"runs": [{"workload": "short-chats", "system": "x"}]}'
    for text in (b"[]", b"\xff\xfe", b'{"runs": 7}', b'{"runs": [7]}', other):
        bad.write_bytes(text)
        with pytest.raises(ValueError, match=r"bad\.json is not a result"):
            report.load([bad])
        with pytest.raises(ValueError, match=r"bad\.json is not a file of answers"):
            Recording.load(bad)
    whole = {"workload": "x", "system": "y", "missed_tokens": {}, "recomputed_over_ideal": 1, "hit_rate": 1}
    for times in ({"ttft_s": [1, 2]}, {"ttft_s": {"p50": 1}}, {"missed_tokens": {"a": "b"}}):
        bad.write_text(json.dumps({"runs": [whole | times]}))
        with pytest.raises(ValueError, match=r"bad\.json is not a result"):
            report.load([bad])
    bad.write_text(json.dumps({"runs": [whole]}))
    assert report.load([bad]) == [whole]


def test_a_report_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "result.json").write_text('{"runs": []}')
    (tmp_path / "README.md").mkdir()
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "result.json"), "--out", str(tmp_path), "--no-plots"])
    with pytest.raises(SystemExit, match=r"^report: .*README\.md"):
        report.main()


def test_names_in_a_report_stay_in_their_cells():
    assert report._table(["a"], [["x|y\nz"]]).splitlines()[-1] == "| x\\|y z |"


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--users", "0", "not a whole number above 0"),
        ("--limit", "-3", "not a whole number above 0"),
        ("--speed", "nan", "not a number above 0"),
        ("--token-ids", "9:5", "not LOW:HIGH with at least 16 ids between"),
        ("--tolerance", "-1", "not a number from 0 on"),
        ("--out", "/dev/null/x.json", "cannot be written"),
        ("--ids", "/dev/null/x.json", "cannot be written"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named_before_anything_is_sent(option, value, says, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["replay.py", "branching", "--url", "http://127.0.0.1:9", f"{option}={value}"])
    with pytest.raises(SystemExit) as ended:
        replayed.main()
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and option in told and says in told
