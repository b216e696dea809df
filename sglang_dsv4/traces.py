"""Recorded coding-agent sessions, scaled down to something a small machine can replay.

A trace holds no text: for every request it has the prompt's chain of hash ids, one per 64-token block, where
equal leading ids mean an equal prefix. Here a block becomes `tokens_per_block` tokens drawn from its hash id, so
prompts that shared a prefix still do, and lengths shrink by one factor. A fraction leaves blocks out evenly.

Two things replace what the ids cannot tell. The first blocks of every session are its system prompt and tool
list; they are drawn from a name that all sessions share. And a server gives its own answers: where the
recorded prompt contains the previous one whole, the replayed prompt is the previous prompt, the answer that
came, and new text from the blocks beyond; where it does not (the agent dropped or rewrote part of its
history), the replayed conversation is cut at the same place and goes on from there.

A file is either as published (`hash_ids`, a list) or packed by `pack` (`hash_runs`, [first, count] pairs).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from sglang_dsv4.serving import Words

MIN_NEW_TOKENS = 4  # a turn says something even where its blocks all went to the previous answer
MIN_ANSWER, MAX_ANSWER = 16, 24
_KEPT_FIELDS = ("t", "type", "in", "out")


@dataclass(frozen=True)
class Request:
    """One recorded request: lengths in recorded tokens, hash ids of the prompt's 64-token blocks, seconds since the
    session began."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    time: float = 0.0


@dataclass(frozen=True)
class Trace:
    name: str
    block_size: int
    system_tokens: int
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Turn:
    """How a turn's prompt follows from what was said before.

    keep: tokens of the previous prompt and answer that stay; None keeps all of both. blocks: (hash id, tokens
    to draw from it) pairs of the text added after them; answer: tokens to generate.
    """

    keep: int | None
    blocks: tuple[tuple[int, int], ...]
    answer: int


@dataclass(frozen=True)
class Session:
    name: str
    system_tokens: int
    turns: tuple[Turn, ...]

    def prompt(self, index: int, said: Sequence[int], words: Words) -> list[int]:
        """Token ids of turn `index`; `said` is the previous turn's prompt and answer ([] for the first)."""
        turn = self.turns[index]
        kept = list(said) if turn.keep is None else list(said[: turn.keep])
        if index == 0:
            kept = words.draw("system prompt", self.system_tokens)
        for block, count in turn.blocks:
            kept += words.draw(f"{self.name}/{block}", count)
        return kept


def load(path: Path) -> Trace:
    """Raises ValueError, naming the file, where it is not such a trace."""
    try:
        raw = json.loads(path.read_text())
        return Trace(
            name=str(raw["id"]),
            block_size=int(raw["block_size"]),
            system_tokens=int(raw["tool_tokens"]) + int(raw["system_tokens"]),
            requests=tuple(
                Request(int(r["in"]), int(r["out"]), tuple(_blocks(r)), float(r.get("t", 0))) for r in raw["requests"]
            ),
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a coding-agent trace: {error!r}") from None


def load_folder(folder: Path) -> list[Trace]:
    """The folder's traces in the order of their names."""
    paths = sorted(folder.glob("trace_*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no trace_*.json")
    return [load(path) for path in paths]


def _blocks(request: dict[str, Any]) -> Iterable[int]:
    if "hash_runs" in request:
        for first, count in request["hash_runs"]:
            yield from range(first, first + count)
    else:
        yield from request["hash_ids"]


def shared_blocks(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def sessions(traces: Sequence[Trace], *, turns: int, tokens_per_block: Fraction = Fraction(1)) -> list[Session]:
    """The first `turns` requests of every trace that has as many, scaled.

    All sessions share a system prompt as long as the shortest of theirs.
    """
    usable = [t for t in traces if len(t.requests) >= turns]
    if not usable:
        return []
    system_blocks = min(t.system_tokens // t.block_size for t in usable)
    return [_session(t, turns, system_blocks, tokens_per_block) for t in usable]


def _session(trace: Trace, turns: int, system_blocks: int, scale: Fraction) -> Session:
    def tokens_before(block: int) -> int:
        # The system prompt keeps one token per block: scaled further it would be shorter than a page.
        return min(block, system_blocks) + int(max(0, block - system_blocks) * scale)

    def draw(blocks: Sequence[int], start: int) -> list[tuple[int, int]]:
        """Scaled token counts of the blocks that stand at position `start` onwards."""
        sized = [(b, tokens_before(i + 1) - tokens_before(i)) for i, b in enumerate(blocks, start)]
        return [(block, count) for block, count in sized if count]

    plan: list[Turn] = []
    previous: Request | None = None
    for request in trace.requests[:turns]:
        answer = max(MIN_ANSWER, min(MAX_ANSWER, int(request.output_tokens * scale / trace.block_size)))
        if previous is None:
            plan.append(Turn(0, tuple(draw(request.blocks[system_blocks:], system_blocks)), answer))
        else:
            common = shared_blocks(previous.blocks, request.blocks)
            new = draw(request.blocks[common:], common)
            # The last block of a recorded prompt is often partial and hashes differently once it is full.
            grows = common >= previous.input_tokens // trace.block_size - 1
            if grows:
                new = shorten(new, plan[-1].answer)
            if not new:
                new = [(request.blocks[-1], MIN_NEW_TOKENS)]
            plan.append(Turn(None if grows else tokens_before(common), tuple(new), answer))
        previous = request
    return Session(trace.name, tokens_before(system_blocks), tuple(plan))


def shorten(new: list[tuple[int, int]], answer: int) -> list[tuple[int, int]]:
    """Drop the previous answer's tokens from the front, which in the recording held it; keep a few."""
    total = sum(count for _, count in new)
    drop = max(0, min(answer, total - MIN_NEW_TOKENS))
    kept = []
    for block, count in new:
        cut = min(drop, count)
        drop -= cut
        if count > cut:
            kept.append((block, count - cut))
    return kept


def pack(source: Path, target: Path, requests: int) -> None:
    """Write the first `requests` requests of a published trace with their hash ids as [first, count] runs."""
    raw = json.loads(source.read_text())
    packed = []
    for request in raw["requests"][:requests]:
        runs: list[list[int]] = []
        for block in _blocks(request):
            if runs and block == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([block, 1])
        packed.append({k: request[k] for k in _KEPT_FIELDS} | {"hash_runs": runs})
    head = {k: raw[k] for k in ("id", "models", "block_size", "hash_id_scope", "tool_tokens", "system_tokens")}
    lines = ",\n  ".join(json.dumps(r) for r in packed)
    target.write_text(json.dumps(head)[:-1] + f', "requests": [\n  {lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack published coding-agent traces for the replay.")
    parser.add_argument("source", type=Path, help="folder of trace_*.json files")
    parser.add_argument("target", type=Path, help="folder to write to")
    parser.add_argument("--requests", type=int, default=8, help="requests to keep of each trace")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.source.glob("trace_*.json")):
        pack(path, args.target / path.name, args.requests)


if __name__ == "__main__":
    main()
