"""Many short conversations in a fixed amount of memory: how many tokens of the later turns are found. Clients only."""

from __future__ import annotations

from dataclasses import dataclass

from rivals import DEFAULT_RATIO, text

from sglang_dsv4.serving import Client
from sglang_dsv4.workers import Workers

CHAT_TOKENS, LATER_TOKENS, ANSWER_TOKENS, TURNS = 2048, 64, 32, 3
RUNNING = 16
WINDOW_RATIOS = (DEFAULT_RATIO, 0.05, 0.12, 0.15, 0.2, 0.3)  # in-tree's default first


@dataclass(frozen=True)
class Chats:
    """What a chat run saw in turns 2 and 3."""

    cached: int
    prompt: int


def chat_turns(
    client: Client, chats: int, vocabulary: int, *, tokens: int = CHAT_TOKENS, users: int = RUNNING
) -> Chats:
    """`chats` conversations, every turn of all before the next turn of any; `users` requests at a time."""
    history = [text(f"chat {i}", tokens, vocabulary) for i in range(chats)]
    cached = prompt = 0
    for turn in range(TURNS):
        with Workers(users) as pool:
            answers = pool.gather(lambda ids: client.generate(ids, ANSWER_TOKENS, logprobs=False), history)
        for i, answer in enumerate(answers):
            if turn:
                cached += answer.cached_tokens
                prompt += answer.prompt_tokens
            more = text(f"chat {i} turn {turn}", LATER_TOKENS, vocabulary)
            history[i] = [*history[i], *answer.output_ids, *more]
    return Chats(cached, prompt)


def curve(client: Client, name: str, counts: list[int], vocabulary: int) -> dict[int, Chats]:
    seen = {}
    for count in counts:
        client.flush()
        seen[count] = chat_turns(client, count, vocabulary)
        print(f"  {name}, {count} chats: {seen[count]}", flush=True)
    return seen
