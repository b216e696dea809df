"""SGLang's own server kits against our server, with its pool checks and our poison and audit on.

Sizes are cut to what a tiny model decodes on two cores. What a kit would fetch from a network (prompts, a chat data
set) is put where it looks first; where it expects knowledge that random weights do not have, the expectation is
what the same server answers alone. README.md says what could not run.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.test import kl_test_utils
from sglang.test.kits import (
    abort_timeout_kit,
    basic_scheduler_stress_kit,
    cache_hit_kit,
    kl_divergence_kit,
    prefix_cache_branching_kit,
    radix_cache_server_kit,
)
from sglang.test.test_utils import CustomTestCase
from workload import CHECKED, PAGE, words

from sglang_dsv4.serving import Launch, Server
from sglang_dsv4.tiny import training_text, write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def no_second_try():
    """The kits' base class may repeat a failed test; ours must pass the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_MAX_RETRY", "0")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def serve(model: Path, log: Path, env: dict[str, str] | None = None, **options: Any) -> Server:
    """A chunk is longer than the branching kit's common prefix: a chunk's end would be a place to resume at."""
    limits = {"max_total_tokens": 16384, "max_mamba_cache_size": 160, "chunked_prefill_size": 1024}
    return Server(Launch(model, **{**limits, **options}), log, env={**CHECKED, **(env or {})})


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serve(model, tmp_path_factory.mktemp("log") / "kits.log") as running:
        yield running
        running.client.flush()  # raises where requests or pages leaked
        assert running.process.poll() is None


def attach(cls: Any, running: Server) -> None:
    """What the kits expect of their test class."""
    cls.base_url, cls.process, cls.model = running.url, running.process, str(running.launch.model)
    cls.flush_cache = running.client.flush


class Kit(CustomTestCase):
    @pytest.fixture(scope="class", autouse=True)
    def shared_server(self, request, server):
        attach(request.cls, server)


class TestPrefixCacheBranching(prefix_cache_branching_kit.PrefixCacheBranchingMixin, Kit):
    cache_chunk_size = PAGE


class TestKLDivergence(kl_divergence_kit.KLDivergenceMixin, Kit):
    """Answers after a hit against one cold prefill of the same tokens: no difference at all is expected."""

    kl_div_thres = 1e-12
    kl_div_max_samples = 3
    kl_div_prefill_max_new_tokens = 24
    kl_div_decode_max_new_tokens = PAGE + 8  # every answer crosses a page boundary

    @pytest.fixture(scope="class", autouse=True)
    def prompts(self, shared_server, request):
        """In the kit's own memory, where it would keep LongBench prompts."""
        key = f"{request.cls.model}_{kl_test_utils.DEFAULT_PROMPT_TOKENS}_{kl_test_utils.DEFAULT_NUM_SAMPLES}"
        kl_test_utils._cached_input_ids[key] = [words(f"kl {n}", n) for n in (257, 384, 700)]
        yield
        del kl_test_utils._cached_input_ids[key]


class TestRadixCacheServer(Kit):
    def test_radix_attention(self):
        """The kit's tree of prompts, smaller, with ids that the tiny vocabulary has."""
        small = functools.partial(radix_cache_server_kit.gen_radix_tree, num_nodes=24, chunk_len=90)

        def nodes() -> list[dict[str, Any]]:
            radix_cache_server_kit.random.seed(7)
            return [{**node, "input_ids": [300 + i % 900 for i in node["input_ids"]]} for node in small()]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(radix_cache_server_kit, "gen_radix_tree", nodes)
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


class TestCacheHit(Kit):
    def test_multi_turn_hits(self):
        """Every round must find the previous prompt and answer up to the last page boundary."""
        lines = training_text(400)
        talk = [{"conversations": [{"value": " ".join(lines[i : i + 40])}, {"value": "yes"}]} for i in range(60)]
        path = Path(self.model) / "chats.json"
        path.write_text(json.dumps(talk))
        result = cache_hit_kit.run_multiturn_cache_hit_test(
            self.base_url,
            self.model,
            num_clients=3,
            num_rounds=3,
            request_length=200,
            output_length=24,
            dataset_path=str(path),
        )
        assert result["overall"]["cache_hit_rate"] > 0.4


class TestSchedulerStress(basic_scheduler_stress_kit.BasicSchedulerStressMixin, Kit):
    sanity_max_new_tokens_short = 24
    longest = 4000  # characters: the kit's whole prompt is 20,000 tokens to this tokenizer

    def _stress_generate(self, prompt: str, max_new_tokens: int) -> str:
        return super()._stress_generate(prompt[: self.longest], max_new_tokens)

    def test_concurrent_requests(self):
        """The kit knows capitals; the tiny model does not, so the answers it gives alone are the expected ones."""
        alone = []
        for question, _ in basic_scheduler_stress_kit._CONCURRENT_QA:
            self.flush_cache()
            prompt = basic_scheduler_stress_kit._CONCURRENT_PREFIX + question
            alone.append((question, self._stress_generate(prompt, self.sanity_max_new_tokens_short).lower()))
        assert len({answer for _, answer in alone}) > 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(basic_scheduler_stress_kit, "_CONCURRENT_QA", alone)
            super().test_concurrent_requests()

    def test_streaming_response(self):
        """The kit's framing checks; its expected word is replaced by the unstreamed answer to the same prompt."""
        prompt = "Q: What is the capital of France?\nA:"
        expected = self._stress_generate(prompt, self.sanity_max_new_tokens_short).lower()
        assert expected.strip()

        def same(word: str, text: str) -> None:
            assert word == "paris" and text == expected

        self.assertIn = same
        super().test_streaming_response()


class TestAbortAll(abort_timeout_kit.AbortAllMixin, Kit):
    abort_all_num_requests = 16
    abort_all_max_new_tokens = 900


class TestWaitingTimeout(abort_timeout_kit.WaitingTimeoutMixin, CustomTestCase):
    waiting_timeout_max_new_tokens = 96

    @pytest.fixture(scope="class", autouse=True)
    def own_server(self, request, model, tmp_path_factory):
        limits = {"max_running_requests": 1, "max_mamba_cache_size": 40}
        log = tmp_path_factory.mktemp("log") / "waiting.log"
        with serve(model, log, {"SGLANG_REQ_WAITING_TIMEOUT": "1"}, **limits) as running:
            attach(request.cls, running)
            yield
            running.client.flush()


class TestRunningTimeout(abort_timeout_kit.RunningTimeoutTwoWaveMixin, CustomTestCase):
    running_timeout_num_wave1 = 4
    running_timeout_num_wave2 = 4
    running_timeout_sleep = 2
    running_timeout_max_new_tokens = 800

    @pytest.fixture(scope="class", autouse=True)
    def own_server(self, request, model, tmp_path_factory):
        log = tmp_path_factory.mktemp("log") / "running.log"
        # The timeout counts for SGLang's own warm-up request, too.
        options = {"extra_args": ("--skip-server-warmup",)}
        with serve(model, log, {"SGLANG_REQ_RUNNING_TIMEOUT": "8"}, **options) as running:
            attach(request.cls, running)
            yield
            running.client.flush()
