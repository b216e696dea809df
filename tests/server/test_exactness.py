"""Warm equals cold, through real servers: every configuration gives the cold answers of the plain one."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file, save_file
from workload import (
    BRANCHES,
    CROWD,
    DEEP,
    EDGES,
    LONG,
    PAGE,
    SHARED,
    Cold,
    ask,
    cold_answers,
    differences,
    same,
    serve,
    words,
)

from sglang_dsv4.serving import ServerError
from sglang_dsv4.tiny import write_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    with serve(model, tmp_path_factory.mktemp("log") / "plain.log") as server:
        yield server


@pytest.fixture(scope="module")
def cold(plain) -> Cold:
    return cold_answers(plain.client)


@pytest.fixture
def client(plain, cold):
    plain.client.flush()
    return plain.client


def test_repeats_around_page_boundaries_hit_all_pages_but_the_last_tokens(client, cold):
    for request in EDGES:
        client.flush()
        assert same(ask(client, request), cold.answers[request.name])
        again = ask(client, request)
        assert same(again, cold.answers[request.name])
        assert again.cached_tokens == PAGE * ((len(request.ids) - 1) // PAGE)


def test_a_conversation_finds_everything_up_to_its_last_answer(client, cold):
    previous = None
    for request in cold.turns:
        answer = ask(client, request)
        assert same(answer, cold.answers[request.name])
        if previous is not None:
            said = len(previous.ids) + previous.answer
            assert answer.cached_tokens >= PAGE * ((said - 1) // PAGE)
        previous = request


def test_a_page_aligned_prompt_serves_its_repeat_and_its_next_turn(client):
    prompt = words("aligned", 3 * PAGE)
    first = client.generate(prompt, 5)
    assert client.generate(prompt, 5).cached_tokens == 2 * PAGE
    turn = prompt + list(first.output_ids) + words("more", 9)
    assert client.generate(turn, 3).cached_tokens == 3 * PAGE


def test_a_branching_chat_keeps_both_its_branch_point_and_its_own_prompt(client):
    shared = words("system", 2 * PAGE + 10)
    client.generate(shared + words("first user", 3 * PAGE), 2)
    second = shared + words("second user", 3 * PAGE)
    answer = client.generate(second, 2)
    turn = client.generate(second + list(answer.output_ids) + words("and", 5), 2)
    assert turn.cached_tokens == PAGE * ((len(second) + 1) // PAGE)
    third = client.generate(shared + words("third user", 40), 2)
    assert third.cached_tokens == 2 * PAGE


def test_branches_at_every_offset_round_a_page_and_a_block_are_exact(client, cold):
    client.generate(SHARED, 2)
    assert differences(client, cold, BRANCHES) == []
    again = [ask(client, r) for r in BRANCHES]
    assert all(same(a, cold.answers[r.name]) for r, a in zip(BRANCHES, again, strict=True))
    assert all(
        a.cached_tokens == PAGE * ((len(r.ids) - 1) // PAGE) for r, a in zip(BRANCHES, again, strict=True)
    )


def test_chunked_prompts_and_their_resumes_are_exact(client, cold):
    assert differences(client, cold, [LONG, LONG]) == []
    assert ask(client, LONG).cached_tokens == PAGE * ((len(LONG.ids) - 1) // PAGE)


def test_sixteen_concurrent_requests_are_exact_twice(client, cold):
    assert differences(client, cold, CROWD, together=True) == []
    assert differences(client, cold, CROWD, together=True) == []


def test_a_prompt_that_is_prepared_while_the_step_that_completes_its_prefix_is_in_flight_finds_it(client, cold):
    """The first of three takes a step and a half, which lets no other in beside it; the others come right after."""
    queue = [words("keeps the server busy", 15 * 256), *(request.ids for request in DEEP)]
    found = []
    with ThreadPoolExecutor(len(queue)) as pool:
        for ids, limit in zip(queue, (1, *(request.answer for request in DEEP)), strict=True):
            found.append(pool.submit(client.generate, ids, limit))
            time.sleep(0.2)
    _, *answers = (one.result() for one in found)
    assert [answer.cached_tokens for answer in answers] == [0, 3 * PAGE, 3 * PAGE]
    assert all(same(answer, cold.answers[r.name]) for answer, r in zip(answers, DEEP, strict=True))


def test_flushing_empties_the_cache(client, cold):
    ask(client, LONG)
    client.flush()
    answer = ask(client, LONG)
    assert answer.cached_tokens == 0
    assert same(answer, cold.answers[LONG.name])


def test_an_abort_in_mid_prompt_leaves_nothing_behind(client, cold, plain):
    def doomed() -> None:
        try:
            client.generate(words("doomed", 3000), 50)
        except ServerError:
            pass

    threads = [threading.Thread(target=doomed) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    client.abort_all()
    for thread in threads:
        thread.join()
    assert differences(client, cold, [*DEEP, LONG]) == []
    client.flush()
    assert plain.process.poll() is None


HOSTILE = {
    "empty text": {"text": ""},
    "an empty list in a batch": {"input_ids": [words("beside", 40), []]},
    "embeddings of another width": {"input_embeds": [[0.1] * 64] * 5},
    "a token past the vocabulary": {"input_ids": [5, 10**6]},
    "more logprobs than tokens": {"input_ids": words("greedy", 9), "return_logprob": True, "top_logprobs_num": 5000},
    "logprobs from before the prompt, over several chunks": {
        "input_ids": words("greedy", 1500),
        "return_logprob": True,
        "logprob_start_len": -2,
    },
    "fewer logprobs than none": {
        "input_ids": words("greedy", 9),
        "return_logprob": True,
        "logprob_start_len": 3,
        "top_logprobs_num": -1,
    },
    "embeddings for single tokens": {"input_ids": words("greedy", 9), "positional_embed_overrides": [1]},
    "a stop token past the vocabulary": {
        "input_ids": words("greedy", 9),
        "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 2, "stop_token_ids": [99999]},
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_request_is_refused_and_the_server_lives(case, client, cold, plain):
    try:
        told = json.dumps(client.post("/generate", {"sampling_params": {"max_new_tokens": 3}, **HOSTILE[case]}))
    except ServerError as error:
        told = str(error)
    says = "empty|not supported|vocabulary|input_embeds|disable-radix-cache|radix cache|send an integer"
    assert re.search(says, told), told
    assert plain.process.poll() is None
    assert differences(client, cold, EDGES[:1]) == []


def test_new_weights_that_do_not_fit_are_refused_and_the_ones_before_serve_on(client, cold, plain, model, tmp_path):
    shutil.copytree(model, tmp_path / "less")
    (file,) = (tmp_path / "less").glob("*.safetensors")
    tensors = load_file(file)
    for name in ("norm.weight", "head.weight"):
        tensors[name] = tensors[name] * 2
    shutil.copytree(tmp_path / "less", tmp_path / "routed")
    table = next(name for name in tensors if name.endswith("tid2eid"))
    routed = tensors | {table: tensors[table] + 1000}
    save_file(routed, tmp_path / "routed" / file.name, metadata={"format": "pt"})
    del tensors["layers.0.attn.attn_sink"]
    save_file(tensors, file, metadata={"format": "pt"})
    for folder, says in (("less", "1 missing: layers.0"), ("nowhere", "nowhere"), ("routed", "1 of other experts")):
        with pytest.raises(ServerError, match=says):
            client.post("/update_weights_from_disk", {"model_path": str(tmp_path / folder)})
        assert differences(client, cold, EDGES[:2]) == []
    assert client.post("/update_weights_from_disk", {"model_path": str(model)})["success"]
    assert differences(client, cold, EDGES[:2]) == []
    assert plain.process.poll() is None


def test_the_startup_line_adds_up_to_the_bytes_of_the_tensors(plain):
    line = next(x for x in plain.log.read_text().splitlines() if "DeepSeek-V4 slot cache" in x)
    pages, slots, tails, total = (int(n) for n in re.findall(r"(\d+) bytes(?! each)", line))
    assert pages + slots + tails == total
    assert "128 pages of 128 tokens" in line and "160 slots" in line


def test_the_memory_metric_counts_the_pools(plain):
    with urllib.request.urlopen(f"{plain.url}/server_info", timeout=30) as response:
        info = json.loads(response.read())
    usage = info["internal_states"][0]["memory_usage"]
    assert usage["kvcache"] > 0


# A server takes a minute to start: what does not weaken each other shares one.
CONFIGURATIONS = {
    "few pages and few slots, forced retraction": (
        (),
        {"SGLANG_TEST_RETRACT": "1"},
        {"max_total_tokens": 2048, "max_mamba_cache_size": 40, "max_running_requests": 8},
    ),
    "overlap scheduling off, page of 256 tokens": (("--disable-overlap-schedule", "--page-size", "256"), {}, {}),
    "radix cache off": (("--disable-radix-cache",), {}, {}),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_gives_the_cold_answers(name, model, cold, tmp_path):
    args, env, limits = CONFIGURATIONS[name]
    with serve(model, tmp_path / "server.log", *args, env=env, **limits) as server:
        client = server.client
        assert differences(client, cold, [*DEEP, *BRANCHES[::3], *EDGES, LONG, *cold.turns]) == []
        assert differences(client, cold, [*CROWD, *DEEP], together=True) == []
        if name != "radix cache off":  # where nothing is kept a third pass is the second again
            assert differences(client, cold, [LONG, *CROWD, *cold.turns], together=True) == []
        again = [ask(client, LONG) for _ in range(2)][1]
        assert same(again, cold.answers[LONG.name])
        assert (again.cached_tokens == 0) == (name == "radix cache off")
        client.flush()
