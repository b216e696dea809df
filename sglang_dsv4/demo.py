"""Replays recorded chats against a server and shows what its cache gave.

Pass one sends every session's turns in waves of two concurrent requests, going round the sessions, so that
each returns to a conversation that others have interrupted. Pass two sends the same prompts one by one, each
to an emptied cache, and compares the answers token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from sglang_dsv4 import traces
from sglang_dsv4.console import Progress, table
from sglang_dsv4.serving import Answer, Client, ServerError, Words
from sglang_dsv4.traces import Session

CONCURRENT = 2
REQUIRED_SHARE = 0.95  # of the tokens that an ideal cache of the same page size would have found


@dataclass(frozen=True)
class Sent:
    """A request of pass one. Requests of one wave were in flight together."""

    session: str
    turn: int
    wave: int
    prompt: tuple[int, ...]
    answer: Answer


@dataclass(frozen=True)
class Outcome:
    sent: tuple[Sent, ...]
    cold: tuple[Answer, ...]
    ideal: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(s.answer.prompt_tokens for s in self.sent)

    @property
    def cached_tokens(self) -> int:
        return sum(s.answer.cached_tokens for s in self.sent)

    @property
    def mismatches(self) -> int:
        return sum(s.answer.output_ids != c.output_ids for s, c in zip(self.sent, self.cold, strict=True))

    @property
    def share_of_ideal(self) -> float:
        return self.cached_tokens / max(1, sum(self.ideal))

    @property
    def ok(self) -> bool:
        return self.mismatches == 0 and self.share_of_ideal >= REQUIRED_SHARE

    def last_line(self) -> str:
        sessions = len({s.session for s in self.sent})
        return (
            f"demo: sessions={sessions} turns={len(self.sent)} prompt_tokens={self.prompt_tokens} "
            f"cached_tokens={self.cached_tokens} hit_rate={self.cached_tokens / self.prompt_tokens:.3f} "
            f"mismatches={self.mismatches}"
        )


def load_sessions(folder: Path, *, turns: int, count: int, tokens_per_block: Fraction) -> list[Session]:
    """Raises ServerError where the folder has too few sessions of that many turns."""
    try:
        found = traces.sessions(traces.load_folder(folder), turns=turns, tokens_per_block=tokens_per_block)
    except (OSError, ValueError) as error:
        raise ServerError(str(error)) from None
    if len(found) < count:
        raise ServerError(f"{folder} holds {len(found)} sessions of {turns} turns, not {count}")
    return found[:count]


def shared_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ideal_hits(sent: Sequence[Sent], page: int) -> list[int]:
    """Tokens that each request could find if nothing were ever evicted.

    A finished request leaves a place to resume at the last page boundary inside its prompt, at the last one
    inside its prompt and answer (whose last token is never stored), and where it branched off what was
    already cached. A request can resume at the deepest such place on its own prompt, short of the prompt's
    last token. Only requests of earlier waves count: what ran at the same time may or may not have been
    finished.
    """
    hits: list[int] = []
    places: list[tuple[int, ...]] = []
    stored: list[tuple[int, ...]] = []
    for request in sent:
        usable = len(request.prompt) - 1
        best = branch = 0
        for earlier, ends, tokens in zip(sent, places, stored, strict=False):
            if earlier.wave >= request.wave:
                continue
            common = min(shared_tokens(request.prompt, tokens), usable)
            best = max([best, *(end for end in ends if end <= common)])
            branch = max(branch, _floor(min(common, max(ends)), page))
        whole = request.prompt + request.answer.output_ids
        hits.append(best)
        places.append((_floor(usable, page), _floor(len(whole) - 1, page), branch))
        stored.append(whole)
    return hits


def _floor(length: int, page: int) -> int:
    return length // page * page


def waves(sessions: Sequence[Session]) -> Iterator[list[tuple[Session, int]]]:
    """(session, turn) pairs that are sent together: turn by turn round all sessions."""
    for turn in itertools.count():
        talking = [s for s in sessions if turn < len(s.turns)]
        if not talking:
            return
        for start in range(0, len(talking), CONCURRENT):
            yield [(session, turn) for session in talking[start : start + CONCURRENT]]


def run(client: Client, sessions: Sequence[Session], words: Words, say: Callable[[str], None] = print) -> Outcome:
    """Both passes. Raises ServerError where the server cannot take them."""
    page = client.info().page_size
    total = sum(len(s.turns) for s in sessions)
    longest = max(_longest(s, words) for s in sessions)
    limit = client.info().max_prompt
    if longest > limit:
        raise ServerError(f"a turn has {longest} tokens but {client.url} takes {limit}; use a smaller --scale")
    progress = Progress(total, "warm")
    said: dict[str, list[int]] = {}
    sent: list[Sent] = []
    client.flush()
    for number, wave in enumerate(waves(sessions)):
        prompts = [s.prompt(turn, said.get(s.name, []), words) for s, turn in wave]
        limits = [s.turns[turn].answer for s, turn in wave]
        for (session, turn), prompt, answer in zip(
            wave, prompts, client.generate_together(prompts, limits, logprobs=False), strict=True
        ):
            said[session.name] = prompt + list(answer.output_ids)
            sent.append(Sent(session.name, turn, number, tuple(prompt), answer))
            progress.step(f"{session.name} turn {turn + 1}")
    progress = Progress(total, "cold")
    cold: list[Answer] = []
    for request in sent:
        client.flush()
        cold.append(client.generate(request.prompt, len(request.answer.output_ids), logprobs=False))
        progress.step(f"{request.session} turn {request.turn + 1}")
    outcome = Outcome(tuple(sent), tuple(cold), tuple(ideal_hits(sent, page)))
    say(_table(outcome))
    return outcome


def _longest(session: Session, words: Words) -> int:
    said: list[int] = []
    length = 0
    for turn, plan in enumerate(session.turns):
        prompt = session.prompt(turn, said, words)
        length = max(length, len(prompt) + plan.answer)
        said = prompt + [words.ids[0]] * plan.answer
    return length


def _table(outcome: Outcome) -> str:
    rows = []
    order = sorted(range(len(outcome.sent)), key=lambda i: (outcome.sent[i].session, outcome.sent[i].turn))
    for i in order:
        sent, cold = outcome.sent[i], outcome.cold[i]
        same = "same" if sent.answer.output_ids == cold.output_ids else "DIFFER"
        rows.append(
            (
                sent.session,
                sent.turn + 1,
                sent.answer.prompt_tokens,
                sent.answer.cached_tokens,
                outcome.ideal[i],
                f"{sent.answer.first_token_s * 1e3:.0f} ms",
                f"{cold.first_token_s * 1e3:.0f} ms",
                same,
            )
        )
    head = ("session", "turn", "prompt", "cached", "ideal", "first token warm", "cold", "answers")
    warm, cold_s = (sum(a.first_token_s for a in answers) for answers in zip(*_pairs(outcome), strict=True))
    return "\n".join(
        [
            table(head, rows),
            f"time to first token, sum: {warm:.1f} s warm (two at a time), {cold_s:.1f} s cold (one)",
            f"cached tokens: {outcome.share_of_ideal:.3f} of what page-aligned prompt and answer ends allow",
        ]
    )


def _pairs(outcome: Outcome) -> Iterator[tuple[Answer, Answer]]:
    return ((s.answer, c) for s, c in zip(outcome.sent, outcome.cold, strict=True))
