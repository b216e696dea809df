"""Black-box check of a running server: its answers with a warm cache against those with a cold one.

Every case sends a prompt to an emptied cache, brings the cache into some state, sends the prompt again and
compares token ids and logprobs. It also holds the cached tokens that the server reports against what
snapshots at the last page boundary of every prompt and answer, and at every branch point, must give.

On a server whose arithmetic does not depend on the batch (ours on a CPU) the tolerance is 0: ids and logprobs
are equal to the bit. Elsewhere kernels change with the batch's shape, so logprobs may differ by `tolerance`,
and ids may part where the cold run's best two tokens lie no further apart than that; nothing is compared
behind such a place. The cache is flushed many times: never point this at a server that others use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sglang_dsv4.console import Progress, table
from sglang_dsv4.serving import Answer, Client, ServerError, Words

CPU_TOLERANCE = 0.0
DEVICE_TOLERANCE = 0.1  # bfloat16 logits of two batch shapes; not measured here, set --tolerance from two cold runs
ANSWER = 12
TURN_ANSWER = 40
TURNS = 3
BLOCK = 4  # tokens of the smaller compression block
NOTHING_CACHED, TOO_LITTLE_CACHED = "nothing cached", "cached too little"  # faults of a cache whose answers are right


@dataclass(frozen=True)
class Row:
    """One comparison. `promised` is the least number of tokens that the cache must have found."""

    case: str
    prompt_tokens: int
    cached: int
    promised: int
    difference: float
    fault: str

    @property
    def ok(self) -> bool:
        return not self.fault


@dataclass
class Verifier:
    """Runs the cases against one server. `any_hit` demands only that something was cached."""

    client: Client
    words: Words
    page: int
    tolerance: float
    copies: int = 8
    any_hit: bool = False
    _cold: dict[tuple[tuple[int, ...], int], Answer] = field(default_factory=dict)

    def text(self, name: str, count: int) -> list[int]:
        return self.words.draw(f"verify {name}", count)

    def cold(self, prompt: Sequence[int], limit: int = ANSWER) -> Answer:
        """The prompt's answer from an emptied cache; asked once, remembered."""
        key = (tuple(prompt), limit)
        if key not in self._cold:
            self.client.flush()
            self._cold[key] = self.client.generate(prompt, limit)
        return self._cold[key]

    def send(self, prompt: Sequence[int], limit: int = ANSWER) -> Answer:
        return self.client.generate(prompt, limit)

    def row(self, case: str, warm: Answer, cold: Answer, promised: int) -> Row:
        difference, fault = compare(warm, cold, self.tolerance)
        least = min(1, promised) if self.any_hit else promised
        if not fault and warm.cached_tokens < least:
            fault = NOTHING_CACHED if warm.cached_tokens == 0 else TOO_LITTLE_CACHED
        return Row(case, warm.prompt_tokens, warm.cached_tokens, promised, difference, fault)

    def last_boundary(self, tokens: int) -> int:
        """Where a request of so many stored tokens leaves its last snapshot."""
        return (tokens - 1) // self.page * self.page

    # The cases. Each yields rows; prompts span a few pages, so every one takes a second or two on two cores.

    def case_cold(self) -> Iterator[Row]:
        """An emptied cache holds nothing, and the same prompt gives the same answer."""
        prompt = self.text("cold", self.page + 37)
        first = self.cold(prompt)
        for _ in range(2):
            self.client.flush()
            yield self._after_flush("cold", self.send(prompt), first)

    def case_repeat(self) -> Iterator[Row]:
        """The same prompt again, at lengths just around a page boundary."""
        for extra in (-1, 0, 1, 37):
            prompt = self.text(f"repeat {extra}", 2 * self.page + extra)
            cold = self.cold(prompt)
            self.client.flush()
            self.send(prompt)
            promised = self.last_boundary(len(prompt))
            yield self.row(f"exact repeat, 2 pages {extra:+d}", self.send(prompt), cold, promised)

    def _branch(self, case: str, at: int) -> Iterator[Row]:
        """Prompts that part at token `at`: the second makes the snapshot that the third resumes from."""
        trunk = self.text(case, at)
        others = [trunk + self.text(f"{case} {at} branch {i}", self.page + 21) for i in range(3)]
        colds = [self.cold(prompt) for prompt in others]
        self.client.flush()
        self.send(others[0])
        yield self.row(f"{case}, second", self.send(others[1]), colds[1], 0)
        yield self.row(f"{case}, third", self.send(others[2]), colds[2], at // self.page * self.page)
        again = self.last_boundary(len(others[0]))
        yield self.row(f"{case}, first again", self.send(others[0]), colds[0], again)

    def case_branch_in_page(self) -> Iterator[Row]:
        """Prompts that part between compression blocks of 4, inside a page."""
        for offset in (BLOCK, self.page // 2):
            yield from self._branch(f"branch {offset} into a page", self.page + offset)

    def case_branch_in_block(self) -> Iterator[Row]:
        """Prompts that part inside a compression block: of 4 and, away from its ends, of 128 tokens."""
        for offset in (1, 2 * BLOCK + 2, self.page - 1):
            yield from self._branch(f"branch {offset} into a page (in a block)", self.page + offset)

    def case_turns(self) -> Iterator[Row]:
        """A chat whose answers cross page boundaries: each turn resumes at the last one of the one before."""
        prompt = self.text("turns", 2 * self.page - TURN_ANSWER // 2)
        plan: list[tuple[list[int], int]] = []
        warm: list[Answer] = []
        promised = 0
        self.client.flush()
        for turn in range(TURNS):
            plan.append((prompt, promised))
            warm.append(self.send(prompt, TURN_ANSWER))
            said = prompt + list(warm[-1].output_ids)
            promised = self.last_boundary(len(said))
            # The next prompt ends half an answer before a boundary, too.
            more = (-len(said) - TURN_ANSWER // 2) % self.page or self.page
            prompt = said + self.text(f"turns {turn}", more)
        for turn, ((prompt, promised), answer) in enumerate(zip(plan, warm, strict=True)):
            yield self.row(f"turn {turn + 1}", answer, self.cold(prompt, TURN_ANSWER), promised)

    def case_copies(self) -> Iterator[Row]:
        """Copies of one prompt at the same time, on an empty and on a filled cache."""
        prompt = self.text("copies", 2 * self.page + 53)
        cold = self.cold(prompt)
        self.client.flush()
        for name, promised in (("empty", 0), ("filled", self.last_boundary(len(prompt)))):
            together = self.client.generate_together([prompt] * self.copies, [ANSWER] * self.copies)
            rows = [self.row(f"{self.copies} copies, {name} cache", a, cold, promised) for a in together]
            yield next((row for row in rows if not row.ok), min(rows, key=lambda row: row.cached))

    def case_flush(self) -> Iterator[Row]:
        """A flushed cache forgets, and fills again."""
        prompt = self.text("flush", 2 * self.page + 5)
        cold = self.cold(prompt)
        self.client.flush()
        self.send(prompt)
        self.client.flush()
        yield self._after_flush("after a flush", self.send(prompt), cold)
        yield self.row("filled again", self.send(prompt), cold, self.last_boundary(len(prompt)))

    def _after_flush(self, case: str, answer: Answer, cold: Answer) -> Row:
        difference, fault = compare(answer, cold, self.tolerance)
        if not fault and answer.cached_tokens:
            fault = "cached after a flush"
        return Row(case, answer.prompt_tokens, answer.cached_tokens, 0, difference, fault)

    def cases(self) -> list[Callable[[], Iterator[Row]]]:
        return [
            self.case_cold,
            self.case_repeat,
            self.case_branch_in_page,
            self.case_branch_in_block,
            self.case_turns,
            self.case_copies,
            self.case_flush,
        ]


def compare(warm: Answer, cold: Answer, tolerance: float) -> tuple[float, str]:
    """(largest logprob difference, fault). Tolerance 0 admits no difference at all."""
    if len(warm.logprobs) != len(warm.output_ids) or len(cold.logprobs) != len(cold.output_ids):
        return float("nan"), "logprobs missing"
    worst = 0.0
    for i, (ours, theirs) in enumerate(zip(warm.output_ids, cold.output_ids, strict=True)):
        if ours != theirs:
            near = i < len(cold.runner_up) and cold.logprobs[i] - cold.runner_up[i] <= tolerance
            return worst, "" if tolerance > 0 and near else f"other token at {i}"
        difference = abs(warm.logprobs[i] - cold.logprobs[i])
        if not difference <= tolerance:  # a NaN is a difference
            return max(worst, difference), f"other logprob at {i}"
        worst = max(worst, difference)
    return worst, ""


def verify(
    client: Client,
    *,
    words: Words,
    tolerance: float | None = None,
    copies: int = 8,
    any_hit: bool = False,
    say: Callable[[str], None] = print,
) -> bool:
    """Run every case, print the table, return whether all passed. Raises ServerError where it cannot run."""
    info = client.info()
    if not info.radix_cache:
        raise ServerError(f"{client.url} runs with --disable-radix-cache: there is no cache to check")
    if 5 * info.page_size > info.max_prompt:
        raise ServerError(
            f"{client.url} takes {info.max_prompt} tokens but five pages are {5 * info.page_size}; "
            "start it with a longer --context-length"
        )
    if tolerance is None:
        tolerance = CPU_TOLERANCE if info.device == "cpu" else DEVICE_TOLERANCE
    verifier = Verifier(client, words, info.page_size, tolerance, copies, any_hit)
    rows: list[Row] = []
    progress = Progress(len(verifier.cases()), "verify")
    for case in verifier.cases():
        rows += case()
        progress.step((case.__doc__ or "").split(".")[0].split(",")[0])
    failed = [row for row in rows if not row.ok]
    head = ("case", "prompt", "cached", "promised", "logprob diff", "result")
    cells = [(r.case, r.prompt_tokens, r.cached, r.promised, f"{r.difference:.2g}", r.fault or "ok") for r in rows]
    say(f"{client.url}: SGLang {info.version}, {info.device}, page {info.page_size}, tolerance {tolerance:g}")
    say(table(head, cells))
    say(f"verify: checks={len(rows)} failed={len(failed)}")
    if failed and all(row.fault in (NOTHING_CACHED, TOO_LITTLE_CACHED) for row in failed):
        say("all answers are right, the cache found too little: did anybody else use or flush this server meanwhile?")
    return not failed
