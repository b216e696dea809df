"""The same checkpoint with SGLang's own attention and with ours: how far do the answers part?

    python bench/swap.py CHECKPOINT [--lengths 100 2047 ...] [--steps 512] [--out FILE]

Four servers at once on one GPU, or with --tp 2 on two: in-tree, in-tree with another prefill chunk, ours with FP8
indexer keys (the in-tree format), ours with FP4 keys. For every prompt:

* logprobs of one fixed text (the first server's own answer) at 64 prompt positions and all answer positions, prefilled;
* greedy decoding, guided back to the first server's answer after every token that differs: agreement in percent.

The second server shows what a change that means nothing does to the same numbers: with random weights the best two
tokens, and the last chosen expert and the first left out, are often a rounding apart. So agreement is also given over
the decided steps alone: those where the first server's best two logprobs lie further apart than that change moves any
two of them.

A checkpoint in the released formats needs --moe auto, which lets SGLang choose by the weights, or a named kernel for
MXFP4 experts; the servers must then agree on it, and the result records it. Rows are saved as they come.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import writable, write
from rivals import GpuLaunch, Pools, card, config_of, same_kernels, text, together, vocabulary_of

from sglang_dsv4.console import positive, run_program
from sglang_dsv4.serving import Client, Server, ServerError, exit_on_signals
from sglang_dsv4.workers import Workers

TAIL = 64  # prompt positions whose logprobs are compared
SEGMENT = 32  # answer tokens that one request is guided through; segments run side by side
REFERENCE, NOISY = "in-tree", "in-tree, chunks of 512"


@dataclass(frozen=True)
class KeyedLaunch(GpuLaunch):
    """Ours with an indexer key format."""

    keys: str = "fp4"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"SGLANG_DSV4_INDEXER": self.keys}


def greedy(client: Client, ids: list[int], steps: int) -> list[int]:
    return list(client.generate(ids, steps, logprobs=False).output_ids)


def scored(client: Client, ids: list[int], first: int) -> tuple[list[float], list[float]]:
    """Logprobs of ids[first:] under one prefill, and by how much the best token leads the second at each of them."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": first - 1,
        "top_logprobs_num": 2,
    }
    said, count = client.post("/generate", body), len(ids) - first
    try:
        chosen = [float(row[0]) for row in said["meta_info"]["input_token_logprobs"][-count:]]
        leads = [float(a[0]) - float(b[0]) for a, b in said["meta_info"]["input_top_logprobs"][-count:]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"{client.url} sent logprobs that cannot be read ({error!r})") from None
    if len(chosen) != count or len(leads) != count or not all(map(math.isfinite, chosen + leads)):
        raise ServerError(f"{client.url} lacks some of {count} logprobs, or they are no numbers")
    return chosen, leads


def guided(client: Client, ids: list[int], expected: list[int]) -> list[int]:
    """Steps at which the server's greedy token is not `expected`'s, each after exactly the expected tokens."""
    wrong, at = [], 0
    while at < len(expected):
        said = greedy(client, ids + expected[:at], len(expected) - at)
        same = next((i for i, (a, b) in enumerate(zip(said, expected[at:], strict=True)) if a != b), None)
        if same is None:
            break
        wrong.append(at + same)
        at += same + 1
    return wrong


def disagreements(client: Client, ids: list[int], expected: list[int]) -> list[int]:
    client.generate(ids, 1, logprobs=False)  # the segments share the prompt
    starts = range(0, len(expected), SEGMENT)
    with Workers(len(starts)) as pool:
        found = pool.gather(lambda i: guided(client, ids + expected[:i], expected[i : i + SEGMENT]), starts)
        return [start + step for start, steps in zip(starts, found, strict=True) for step in steps]


def measure(server: Server, length: int, answer: list[int], vocabulary: int) -> dict[str, Any]:
    """One server's numbers for one prompt."""
    ids, tail = text(f"swap {length}", length, vocabulary), max(1, length - TAIL)
    wrong = disagreements(server.client, ids, answer)
    server.client.flush()
    logprobs, leads = scored(server.client, ids + answer, tail)
    server.client.flush()
    return {"wrong": wrong, "logprobs": logprobs, "leads": leads[-len(answer) :]}


def moved(reference: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """How far each logprob lies from the reference's, sorted."""
    return sorted(abs(a - b) for a, b in zip(other["logprobs"], reference["logprobs"], strict=True))


def distance(reference: dict[str, Any], noisy: dict[str, Any], other: dict[str, Any], length: int) -> dict[str, Any]:
    """`other` beside `reference`; `noisy` is the reference after a change that means nothing."""
    apart, leads, wrong = moved(reference, other), reference["leads"], set(other["wrong"])
    # Of two logprobs that each move by less than this neither overtakes the other.
    decisive = 2 * moved(reference, noisy)[-1]
    decided = [step for step, lead in enumerate(leads) if lead > decisive]
    return {
        "length": length,
        "greedy_agreement": round(1 - len(wrong) / len(leads), 4),
        "decided_steps": len(decided),
        "decided_agreement": round(1 - len(wrong.intersection(decided)) / len(decided), 4) if decided else None,
        "logprob_mean": round(statistics.mean(apart), 5),
        "logprob_p99": round(apart[int(len(apart) * 0.99)], 4),
        "logprob_max": round(apart[-1], 4),
    }


def swap(
    servers: dict[str, Server], lengths: list[int], steps: int, vocabulary: int, rows: dict[str, list[Any]]
) -> Iterator[None]:
    """Appends distances of every server to the first one to `rows`, a prompt length at a time. The first is compared
    with itself too."""
    for length in lengths:
        answer = greedy(servers[REFERENCE].client, text(f"swap {length}", length, vocabulary), steps)
        with Workers(len(servers)) as pool:
            alike = ([one] * len(servers) for one in (length, answer, vocabulary))
            found = pool.gather(measure, servers.values(), *alike)
        measured = dict(zip(servers, found, strict=True))
        for name in servers:
            row = distance(measured[REFERENCE], measured[NOISY], measured[name], length)
            rows.setdefault(name, []).append(row)
            print(f"  {name}: {row}", flush=True)
        yield


def arms(model: Path, moe: str, fp8_gemm: str, tp: int) -> dict[str, GpuLaunch]:
    gemm = ("--fp8-gemm-backend", fp8_gemm)
    # Every server but the first finds the others' weights on the card already: the share only has to leave room.
    ours = KeyedLaunch(model, moe=moe, tp=tp, mem_share=0.9, extra_args=gemm).over(Pools(200_000, 200, 0), 16)
    in_tree = replace(ours, plugin=False)
    return {
        REFERENCE: in_tree,
        NOISY: replace(in_tree, chunked_prefill_size=512),
        "ours, FP8 keys": replace(ours, keys="fp8"),
        "ours, FP4 keys": ours,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=positive, nargs="+", default=[100, 2047, 2049, 10000, 40000])
    parser.add_argument("--steps", type=positive, default=512)
    parser.add_argument("--tp", type=positive, default=1, help="tensor parallel ranks of every server")
    parser.add_argument("--moe", default="triton", help="--moe-runner-backend; auto lets SGLang choose by the weights")
    parser.add_argument("--fp8-gemm", default="auto", help="--fp8-gemm-backend, for weights in FP8")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "swap")
    parser.add_argument("--out", type=writable)
    options = parser.parse_args()
    exit_on_signals()
    result: dict[str, Any] = {
        "card": card(),
        "commit": options.commit,
        "command": " ".join(sys.argv),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("SGLANG_")},
        "start_s": {},
        "rows": {},
    }

    def save() -> None:
        if options.out:
            write(options.out, result)

    launches = arms(options.model, options.moe, options.fp8_gemm, options.tp)
    try:
        result["model"] = config_of(options.model) | {"architectures": None}
        with together(launches, options.logs, result["start_s"]) as servers:
            result["kernels"] = same_kernels(servers)
            print(f"kernels of all servers: {result['kernels']}", flush=True)
            vocabulary = vocabulary_of(options.model)
            for _ in swap(servers, options.lengths, options.steps, vocabulary, result["rows"]):
                save()
    except (ServerError, OSError) as error:
        parser.exit(1, f"swap: {error}\n")
    return 0


if __name__ == "__main__":
    run_program("swap", main)
