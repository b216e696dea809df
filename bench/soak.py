"""Thousands of requests of random lengths against our server on a GPU, with pools too small for them.

    python bench/soak.py CHECKPOINT [--requests 2000] [--out FILE]

The server checks SGLang's accounting at every step (SGLANG_DEBUG_MEMORY_POOL), pools and freed slots are full of NaN,
and every few steps running requests are taken back and computed again (SGLANG_TEST_RETRACT). A request fails if its
answer is short or has a logprob that is no number. Afterwards `verify` compares warm answers with cold ones. With
--tp 2 two GPUs serve, without CUDA graphs, and the ranks compare page tables, slots and chosen entries in every step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import writable, write
from replay import gauges
from rivals import START_TIMEOUT_S, GpuLaunch, card, text, vocabulary_of

from sglang_dsv4.cache.metrics import PREFIX
from sglang_dsv4.console import Progress, positive, run_program, tolerance
from sglang_dsv4.serving import Client, Server, ServerError, Words, exit_on_signals
from sglang_dsv4.switches import CHECK_RANKS
from sglang_dsv4.verify import verify
from sglang_dsv4.workers import Workers

CHECKED = {
    "SGLANG_DEBUG_MEMORY_POOL": "1",
    "SGLANG_DSV4_POISON": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "40",
}
MOVES = ("lots_to_pages", "lots_to_slots", "snapshots_moved", "pages_moved")  # counters of moves and of what was copied
BOOKS, BOOK_TOKENS, ANSWER = 40, 3000, 64  # prompts are beginnings of so many texts, followed by words of their own


def prompts(count: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """(ids, answer tokens) of each request, always the same."""
    rng = random.Random("soak")
    books = [text(f"book {i}", BOOK_TOKENS, vocabulary) for i in range(BOOKS)]
    made = []
    for i in range(count):
        shared = books[rng.randrange(BOOKS)][: rng.randrange(BOOK_TOKENS)]
        made.append(([*shared, *text(f"own {i}", rng.randrange(1, 300), vocabulary)], rng.randrange(1, ANSWER + 1)))
    return made


def faults(client: Client, requests: list[tuple[list[int], int]], users: int) -> tuple[list[str], int]:
    """One line for every request that failed, and the cached tokens of all."""
    progress = Progress(len(requests), "soak")

    def one(request: tuple[list[int], int]) -> tuple[str | None, int]:
        ids, limit = request
        try:
            answer = client.generate(ids, limit)
        except ServerError as error:
            return str(error), 0
        finally:
            progress.step()
        bad = not all(math.isfinite(p) for p in answer.logprobs)
        return f"a logprob of a prompt of {len(ids)} tokens is no number" if bad else None, answer.cached_tokens

    with Workers(users) as pool:
        seen = pool.gather(one, requests)
    return [fault for fault, _ in seen if fault], sum(cached for _, cached in seen)


def moved(url: str) -> dict[str, int]:
    """How often memory moved between slots and pages since the server began, and what was copied for it; empty where
    the server has no metrics."""
    found = gauges(url)
    return {name: int(found[key]) for name in MOVES if (key := f"{PREFIX}{name}_total") in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=positive, default=2000)
    parser.add_argument("--users", type=positive, default=64)
    parser.add_argument(
        "--tolerance", type=tolerance, default=0.5, help="random weights: bench/swap.py shows what is usual"
    )
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallel ranks; several are compared every step")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "soak.log")
    parser.add_argument("--out", type=writable)
    options = parser.parse_args()
    exit_on_signals()
    launch = GpuLaunch(
        options.model,
        max_total_tokens=60_000,
        max_running_requests=32,
        max_mamba_cache_size=200,
        mem_share=0.9,
        tp=options.tp,
        graphs=options.tp == 1,
    )
    env = CHECKED | ({CHECK_RANKS: "1"} if options.tp > 1 else {})
    result: dict[str, Any] = {"card": card(), "commit": options.commit, "command": " ".join(sys.argv)}
    try:
        vocabulary = vocabulary_of(options.model)
        with Server(launch, options.log, timeout=START_TIMEOUT_S, env=env) as server:
            started = time.monotonic()
            requests = prompts(options.requests, vocabulary)
            failed, cached = faults(server.client, requests, options.users)
            total = sum(len(ids) for ids, _ in requests)
            result |= {"requests": len(requests), "failed": failed, "prompt_tokens": total, "cached_tokens": cached}
            result["memory"] = moved(server.client.url)
            log = server.log.read_text(errors="replace")
            result["retractions"] = log.count("#retracted_reqs")
            if options.tp > 1:
                result["ranks"] = re.findall(r"ranks agreed in \d+ steps|ranks differ.*", log)[-1:]
            result["seconds"] = round(time.monotonic() - started, 1)
            print(json.dumps({**result, "failed": failed[:5]}), flush=True)
            said: list[str] = []
            words = Words(tuple(range(1000, vocabulary)))
            result["verified"] = verify(server.client, words=words, tolerance=options.tolerance, say=said.append)
            result["verify"] = "\n".join(said).splitlines()
    except ServerError as error:
        result["stopped"] = str(error)
    except BaseException as error:
        result["stopped"] = repr(error)
        raise
    finally:
        print("\n".join(result.get("verify", [])), result.get("stopped", ""), flush=True)
        if options.out:
            write(options.out, result)
    return 0 if result.get("verified") and not result.get("failed") else 1


if __name__ == "__main__":
    run_program("soak", main)
