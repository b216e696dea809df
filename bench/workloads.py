"""Named streams of requests for the simulator and the replay: deterministic, lengths scaled by one factor.

A request names its text by keys; equal keys are equal tokens, on every machine. What a prompt keeps of the
conversation so far is a number of tokens, so that the same stream serves a simulator, whose answers are drawn, and a
server, whose answers are its own. `build("short-chats", scale=0.1)` makes a stream; `PRESETS` lists them.

Streams from recordings hold no text. Their hash ids become keys; where a recorded prompt contains the previous
answer, the replayed one contains the answer that came (see `sglang_dsv4/traces.py`).
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dsv4 import traces

Ids = NDArray[np.int64]

BUNDLED_TRACES = Path(__file__).parent / "traces"
MOONCAKE_BLOCK = 512
LONGEST = 10_000_000  # tokens of a recorded prompt or answer: ten times what any model takes
LATEST = 1e15  # milliseconds, which are 30,000 years
RECORDED = ("coding-agent", "mooncake")  # presets that a recording can be named for
USER, ASSISTANT = "<user>", "<assistant>"  # keys of the chat template's role tokens
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Piece:
    """`count` tokens of the text `key`, from its beginning."""

    key: str
    count: int


@dataclass(frozen=True)
class Request:
    """One request of a stream.

    arrival  seconds since the stream began
    keep     tokens of the session's previous prompt and answer that the prompt begins with; None is all of them
    pieces   what follows
    answer   tokens to generate
    """

    session: str
    turn: int
    arrival: float
    keep: int | None
    pieces: tuple[Piece, ...]
    answer: int

    @property
    def new_tokens(self) -> int:
        return sum(piece.count for piece in self.pieces)


@dataclass(frozen=True)
class Workload:
    """A stream in the order of arrival. A session's requests wait for each other."""

    name: str
    requests: tuple[Request, ...]

    def lengths(self) -> list[int]:
        """Prompt tokens of every request."""
        said: dict[str, int] = {}
        lengths = []
        for request in self.requests:
            before = said.get(request.session, 0)
            kept = before if request.keep is None else min(request.keep, before)
            lengths.append(kept + request.new_tokens)
            said[request.session] = lengths[-1] + request.answer
        return lengths


@dataclass(frozen=True)
class TokenSource:
    """Token ids in [low, high) by key, and the ids of the two role tokens."""

    low: int = 1000
    high: int = 100_000
    user: int = 1
    assistant: int = 2

    def draw(self, key: str, count: int) -> Ids:
        """int64 [count]. Equal keys give equal ids; a longer draw begins with the shorter one."""
        if key == USER:
            return np.full(count, self.user, dtype=np.int64)
        if key == ASSISTANT:
            return np.full(count, self.assistant, dtype=np.int64)
        seed = zlib.crc32(key.encode()) | zlib.crc32(key.encode()[::-1]) << 32
        with np.errstate(over="ignore"):
            x = (np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) ^ np.uint64(seed)
            x = (x ^ (x >> np.uint64(30))) * _MIX_1
            x = (x ^ (x >> np.uint64(27))) * _MIX_2
            x ^= x >> np.uint64(31)
        return (self.low + (x % np.uint64(self.high - self.low))).astype(np.int64)


class Conversations:
    """What every session has said so far; turns requests into token ids."""

    def __init__(self, source: TokenSource) -> None:
        self.source = source
        self._said: dict[str, Ids] = {}

    def prompt(self, request: Request) -> Ids:
        """int64 [prompt tokens]. The session's previous request must have been answered."""
        said = self._said.get(request.session, np.empty(0, dtype=np.int64))
        kept = said if request.keep is None else said[: request.keep]
        return np.concatenate([kept, *(self.source.draw(piece.key, piece.count) for piece in request.pieces)])

    def drawn_answer(self, request: Request) -> Ids:
        """int64 [answer]: an answer for where no model gives one."""
        return self.source.draw(f"answer/{request.session}/{request.turn}", request.answer)

    def answered(self, request: Request, prompt: Ids, answer: Sequence[int] | Ids) -> None:
        self._said[request.session] = np.concatenate([prompt, np.asarray(answer, dtype=np.int64)])


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _message(key: str, tokens: int) -> tuple[Piece, ...]:
    return Piece(USER, 1), Piece(key, tokens), Piece(ASSISTANT, 1)


def _in_order(name: str, requests: Sequence[Request]) -> Workload:
    return Workload(name, tuple(sorted(requests, key=lambda r: (r.arrival, r.session, r.turn))))


# Recorded streams


def coding_agent(scale: float = 1.0, path: Path | None = None) -> Workload:
    """Recorded coding-agent sessions, all begun at once. `path` is a folder of trace_*.json, packed or published."""
    recorded = traces.load_folder(path or BUNDLED_TRACES)
    system_blocks = min(trace.system_tokens // trace.block_size for trace in recorded)
    requests = [r for trace in recorded for r in _agent_session(trace, system_blocks, scale)]
    return _in_order("coding-agent", requests)


def _agent_session(trace: traces.Trace, system_blocks: int, scale: float) -> Iterator[Request]:
    def tokens_before(block: int) -> int:
        return int(block * trace.block_size * scale)

    previous: traces.Request | None = None
    answer = 0
    for turn, request in enumerate(trace.requests):
        common = 0 if previous is None else traces.shared_blocks(previous.blocks, request.blocks)
        sized = [
            (block, tokens_before(i + 1) - tokens_before(i)) for i, block in enumerate(request.blocks[common:], common)
        ]
        # The last block of a recorded prompt is often partial and hashes differently once it is full.
        grows = previous is not None and common >= previous.input_tokens // trace.block_size - 1
        if grows:
            sized = traces.shorten(sized, answer)
        pieces = [
            Piece(f"system/{i}" if previous is None and i < system_blocks else f"{trace.name}/{block}", count)
            for i, (block, count) in enumerate(sized)
            if count
        ] or [Piece(f"{trace.name}/{request.blocks[-1]}", traces.MIN_NEW_TOKENS)]
        if previous is None:
            pieces.insert(system_blocks if system_blocks <= len(pieces) else 0, Piece(USER, 1))
        else:
            pieces.insert(0, Piece(USER, 1))
        answer = _scaled(request.output_tokens, scale)
        keep = None if grows else tokens_before(common) + (1 if common > system_blocks else 0)
        yield Request(trace.name, turn, request.time, keep, (*pieces, Piece(ASSISTANT, 1)), answer)
        previous = request


def mooncake(scale: float = 1.0, path: Path | None = None) -> Workload:
    """Mooncake's trace format, one JSON object a line. Sessions are not recorded: every request stands alone."""
    if path is None:
        raise ValueError("mooncake needs the path of a JSONL trace")
    try:
        lines = path.read_text().split("\n")
    except ValueError as error:  # no UTF-8
        raise ValueError(f"{path} is not a Mooncake trace: {error}") from None
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_mooncake_request(json.loads(line), f"request {len(requests)}", scale))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a Mooncake trace: line {number}: {error!r}") from None
    if not requests:
        raise ValueError(f"{path} holds no request")
    return Workload("mooncake", tuple(requests))


def _mooncake_request(raw: Any, name: str, scale: float) -> Request:
    """Raises ValueError, KeyError or TypeError where `raw` is no request of such a trace."""
    for key in ("input_length", "output_length"):
        if type(raw[key]) is not int or not 0 < raw[key] <= LONGEST:
            raise ValueError(f"{key} is {raw[key]!r}, not a whole number from 1 to {LONGEST}")
    if type(raw["timestamp"]) not in (int, float) or not 0 <= raw["timestamp"] <= LATEST:
        raise ValueError(f"timestamp is {raw['timestamp']!r}, not a number of milliseconds")
    blocks = raw["hash_ids"]
    if not isinstance(blocks, list) or len(blocks) * MOONCAKE_BLOCK < raw["input_length"]:
        raise ValueError(f"hash_ids are not those of {raw['input_length']} tokens in blocks of {MOONCAKE_BLOCK}")
    block_tokens, left = _scaled(MOONCAKE_BLOCK, scale), _scaled(raw["input_length"], scale)
    pieces = []
    for block in blocks:
        pieces.append(Piece(f"mooncake/{block}", min(block_tokens, left)))
        left -= pieces[-1].count
        if not left:
            break
    return Request(name, 0, raw["timestamp"] / 1e3, 0, tuple(pieces), _scaled(raw["output_length"], scale))


# Made streams


def shared_system_prompt(scale: float = 1.0, path: Path | None = None) -> Workload:
    """8 groups of 24 users; a group shares a system prompt of 8,192 tokens. One question each."""
    rng = random.Random("shared system prompt")
    requests = []
    for group in range(8):
        for user in range(24):
            name = f"group {group} user {user}"
            question = _message(f"question of {name}", _scaled(rng.randrange(100, 600), scale))
            pieces = (Piece(f"system of group {group}", _scaled(8192, scale)), *question)
            requests.append(Request(name, 0, rng.uniform(0, 600), 0, pieces, _scaled(128, scale)))
    return _in_order("shared-system-prompt", requests)


def alternating_long(scale: float = 1.0, path: Path | None = None) -> Workload:
    """Two sessions over 100,000 tokens each, 8 turns, strictly in turn."""
    requests = []
    for turn in range(8):
        for number in range(2):
            name = f"reader {number}"
            text = Piece(f"book of {name}", _scaled(100_000, scale))
            pieces = (*((text,) if turn == 0 else ()), *_message(f"{name}/{turn}", _scaled(700, scale)))
            arrival = turn * 60.0 + number * 30.0
            requests.append(Request(name, turn, arrival, None, pieces, _scaled(400, scale)))
    return _in_order("alternating-long", requests)


def short_chats(scale: float = 1.0, path: Path | None = None, *, chats: int = 120) -> Workload:
    """Chats of 2,048 tokens with three more turns; users answer after a random time."""
    rng = random.Random("short chats")
    requests = []
    for number in range(chats):
        name, now = f"chat {number}", rng.uniform(0, 600)
        for turn in range(4):
            tokens = 2048 if turn == 0 else rng.randrange(80, 400)
            pieces = _message(f"{name}/{turn}", _scaled(tokens, scale))
            requests.append(Request(name, turn, now, None, pieces, _scaled(rng.randrange(60, 400), scale)))
            now += 5 + rng.expovariate(1 / 55)
    return _in_order("short-chats", requests)


def branching(scale: float = 1.0, path: Path | None = None) -> Workload:
    """Conversations of 6,000 tokens whose users regenerate answers and edit earlier messages."""
    rng = random.Random("branching")
    requests = []
    for number in range(24):
        name, now, length = f"editor {number}", rng.uniform(0, 300), 0
        standing: list[tuple[int, tuple[Piece, ...]]] = []  # where each message begins, and its text
        for turn in range(8):
            kind = rng.choice(("go on", "regenerate", "edit")) if len(standing) > 1 else "go on"
            text = _message(f"{name}/{turn}", _scaled(rng.randrange(200, 900), scale))
            keep: int | None = None
            if kind != "go on":
                again = standing[-1 if kind == "regenerate" else rng.randrange(1, len(standing)) :]
                del standing[-len(again) :]
                keep = length = again[0][0]
                text = again[0][1] if kind == "regenerate" else text
            if turn == 0:
                text = (Piece(f"document of {name}", _scaled(6000, scale)), *text)
            standing.append((length, text))
            answer = _scaled(rng.randrange(200, 600), scale)
            requests.append(Request(name, turn, now, keep, text, answer))
            length += sum(piece.count for piece in text) + answer
            now += 5 + rng.expovariate(1 / 40)
    return _in_order("branching", requests)


def dropped_reasoning(scale: float = 1.0, path: Path | None = None) -> Workload:
    """Chats whose encoding drops each answer's reasoning from the next prompt: the answer's end is no prefix of it."""
    rng = random.Random("dropped reasoning")
    requests = []
    for number in range(24):
        name, now, prompt = f"thinker {number}", rng.uniform(0, 300), 0
        for turn in range(8):
            tokens = 3000 if turn == 0 else rng.randrange(200, 1200)
            pieces = _message(f"{name}/{turn}", _scaled(tokens, scale))
            keep: int | None = None
            if turn:
                # The visible answer stands right after the prompt, without the reasoning that was generated before it.
                keep = prompt
                pieces = (Piece(f"{name}/{turn}/visible answer", _scaled(250, scale)), *pieces)
            reasoning = _scaled(rng.randrange(300, 2000), scale)
            requests.append(Request(name, turn, now, keep, pieces, reasoning + _scaled(250, scale)))
            prompt += sum(p.count for p in pieces)
            now += 10 + rng.expovariate(1 / 60)
    return _in_order("dropped-reasoning", requests)


def no_reuse(scale: float = 1.0, path: Path | None = None) -> Workload:
    """150 prompts that share nothing: what the cache costs where it cannot help."""
    rng = random.Random("no reuse")
    requests = []
    for number in range(150):
        pieces = _message(f"stranger {number}", _scaled(rng.randrange(500, 8000), scale))
        requests.append(
            Request(f"stranger {number}", 0, rng.uniform(0, 600), 0, pieces, _scaled(rng.randrange(50, 300), scale))
        )
    return _in_order("no-reuse", requests)


PRESETS: dict[str, Callable[..., Workload]] = {
    "coding-agent": coding_agent,
    "mooncake": mooncake,
    "shared-system-prompt": shared_system_prompt,
    "alternating-long": alternating_long,
    "short-chats": short_chats,
    "branching": branching,
    "dropped-reasoning": dropped_reasoning,
    "no-reuse": no_reuse,
}
REUSE = tuple(name for name in PRESETS if name != "no-reuse")


def build(
    name: str, *, scale: float = 1.0, path: Path | None = None, chats: int | None = None, limit: int | None = None
) -> Workload:
    """The preset `name`, or the recording at the path `name`. Raises ValueError, one line.

    limit  requests to keep from the beginning
    """
    if scale <= 0:
        raise ValueError(f"scale {scale} is not above 0")
    if name not in PRESETS:
        path = Path(name)
        if not path.exists():
            raise ValueError(f"{name!r} is neither a file or folder nor one of {', '.join(PRESETS)}")
        name = "coding-agent" if path.is_dir() else "mooncake"
    if name == "short-chats" and chats is not None:
        workload = short_chats(scale, chats=chats)
    else:
        workload = PRESETS[name](scale, path)
    return replace(workload, requests=workload.requests[:limit]) if limit is not None else workload


def distinct_tokens(workload: Workload, page: int = 128) -> int:
    """Tokens of all prompts and answers of the stream, shared prefixes counted once, in whole pages."""
    from prefixes import PrefixIndex

    index, talk = PrefixIndex(page), Conversations(TokenSource())
    for request in workload.requests:
        prompt = talk.prompt(request)
        answer = talk.drawn_answer(request)
        talk.answered(request, prompt, answer)
        index.add(np.concatenate([prompt, answer]))
    return index.pages * page
