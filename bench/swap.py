"""The same checkpoint with SGLang's own attention and with ours: how far do the answers part?

    python bench/swap.py CHECKPOINT [--lengths 100 2047 ...] [--steps 512] [--out FILE]

Three servers one after another on one GPU: in-tree, in-tree with another prefill chunk, ours. For every prompt:

* logprobs of one fixed text (the first server's own answer) at 64 prompt positions and all answer positions, prefilled;
* greedy decoding, guided back to the first server's answer after every token that differs: agreement in percent.

The second server shows what a change that means nothing does to the same numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rivals import START_TIMEOUT_S, GpuLaunch, card, text

from sglang_dsv4.serving import Client, Server

TAIL = 64  # prompt positions whose logprobs are compared
MAX_RESTARTS = 64


def prompt(length: int, vocabulary: int) -> list[int]:
    return text(f"swap {length}", length, vocabulary)


def greedy(client: Client, ids: list[int], steps: int) -> list[int]:
    return list(client.generate(ids, steps, logprobs=False).output_ids)


def scored(client: Client, ids: list[int], first: int) -> list[float]:
    """Logprobs of ids[first:] under one prefill."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": first - 1,
    }
    rows = client.post("/generate", body)["meta_info"]["input_token_logprobs"]
    return [float(row[0]) for row in rows[-(len(ids) - first) :]]


def disagreements(client: Client, ids: list[int], expected: list[int]) -> list[int]:
    """Steps at which the server's greedy token is not `expected`'s, each after exactly the expected tokens."""
    wrong: list[int] = []
    at = 0
    while at < len(expected) and len(wrong) <= MAX_RESTARTS:
        said = greedy(client, ids + expected[:at], len(expected) - at)
        same = next((i for i, (a, b) in enumerate(zip(said, expected[at:], strict=True)) if a != b), None)
        if same is None:
            break
        wrong.append(at + same)
        at += same + 1
    return wrong


def measure(
    launch: GpuLaunch, lengths: list[int], steps: int, texts: dict[int, list[int]], log: Path
) -> dict[str, Any]:
    """One server's numbers; `texts` is filled by the first server that is measured."""
    vocabulary = json.loads((launch.model / "config.json").read_text())["vocab_size"]
    started = time.monotonic()
    rows: dict[str, Any] = {}
    with Server(launch, log, timeout=START_TIMEOUT_S) as server:
        ready = time.monotonic() - started
        for length in lengths:
            ids = prompt(length, vocabulary)
            first = length not in texts
            if first:
                texts[length] = greedy(server.client, ids, steps)
            wrong = [] if first else disagreements(server.client, ids, texts[length])
            server.client.flush()
            tail = max(1, length - TAIL)
            rows[str(length)] = {"wrong": wrong, "logprobs": scored(server.client, ids + texts[length], tail)}
            server.client.flush()
            print(f"  {length}: {len(wrong)} of {steps} greedy tokens differ", flush=True)
    return {"start_s": round(ready, 1), "rows": rows}


def compare(reference: dict[str, Any], other: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    out = []
    for length, row in other["rows"].items():
        pairs = zip(row["logprobs"], reference["rows"][length]["logprobs"], strict=True)
        apart = [abs(a - b) for a, b in pairs]
        out.append(
            {
                "length": int(length),
                "greedy_agreement": 1 - len(row["wrong"]) / steps,
                "logprob_mean": statistics.mean(apart),
                "logprob_p99": sorted(apart)[int(len(apart) * 0.99)],
                "logprob_max": max(apart),
            }
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 2047, 2049, 10000, 40000])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours = GpuLaunch(options.model, max_total_tokens=200_000, max_running_requests=16, max_mamba_cache_size=200)
    in_tree = replace(ours, plugin=False)
    arms = {
        "in_tree": in_tree,
        "in_tree, chunk 2048": replace(in_tree, chunked_prefill_size=2048),
        "ours": ours,
    }
    texts: dict[int, list[int]] = {}
    measured = {}
    for name, launch in arms.items():
        print(name, flush=True)
        log = options.logs / f"swap_{len(measured)}.log"
        measured[name] = measure(launch, options.lengths, options.steps, texts, log)
    reference = measured.pop("in_tree")
    rows = {name: compare(reference, arm, options.steps) for name, arm in measured.items()}
    result = {
        "card": card(),
        "commit": options.commit,
        "command": " ".join(sys.argv),
        "model": json.loads((options.model / "config.json").read_text()) | {"architectures": None},
        "start_s": {name: arm["start_s"] for name, arm in (("in_tree", reference), *measured.items())},
        "rows": rows,
    }
    print(json.dumps({"start_s": result["start_s"], "rows": rows}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
