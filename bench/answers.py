"""What a server answered, request by request, kept in a file, and whether another server answers alike."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measure import save_text
from numpy.typing import NDArray

from sglang_dsv4.serving import Answer
from sglang_dsv4.verify import compare

Key = tuple[str, int]  # session and turn


@dataclass
class Recording:
    """Answers by request. `prompts` holds a checksum of each prompt, so that only like is compared with like."""

    workload: str
    answers: dict[Key, Answer] = field(default_factory=dict)
    prompts: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, prompt: NDArray[np.int64], answer: Answer) -> None:
        self.answers[key], self.prompts[key] = answer, checksum(prompt)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        answers = [
            {
                "session": key[0],
                "turn": key[1],
                "prompt_tokens": answer.prompt_tokens,
                "prompt_crc32": self.prompts[key],
                "cached_tokens": answer.cached_tokens,
                "ids": answer.output_ids,
                "logprobs": answer.logprobs,
                "runner_up": answer.runner_up,
            }
            for key, answer in self.answers.items()
        ]
        save_text(path, json.dumps({"workload": self.workload, "answers": answers}) + "\n")

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises ValueError, naming the file that holds no answers."""
        try:
            raw = json.loads(path.read_text())
            recording = Recording(raw["workload"])
            for one in raw["answers"]:
                key = one["session"], one["turn"]
                recording.answers[key] = _answer(one)
                recording.prompts[key] = one["prompt_crc32"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a file of answers written with --ids ({error!r})") from None
        return recording


def _answer(one: dict[str, Any]) -> Answer:
    return Answer(
        prompt_tokens=one["prompt_tokens"],
        cached_tokens=one["cached_tokens"],
        output_ids=tuple(one["ids"]),
        logprobs=tuple(one["logprobs"]),
        runner_up=tuple(one["runner_up"]),
        first_token_s=0.0,
        total_s=0.0,
    )


def checksum(prompt: NDArray[np.int64]) -> int:
    return zlib.crc32(prompt.astype("<i8").tobytes())


def covers(recording: Recording, name: str, keys: Sequence[Key]) -> None:
    """Raises ValueError where the recording is of another workload or of fewer requests."""
    if recording.workload != name or not recording.answers.keys() >= set(keys):
        raise ValueError(
            f"the answers to compare with are {len(recording.answers)} of {recording.workload}, not those of the "
            f"{len(keys)} requests of {name}: replay the same workload with the same options"
        )


def differences(got: Recording, expected: Recording, tolerance: float) -> tuple[list[str], float]:
    """One line for each answer of `got` that differs, and the largest difference of two logprobs.

    tolerance  0 admits none; else logprobs may differ by so much, and ids may part where the two best of the expected
               answer lie no further apart (`sglang_dsv4.verify`)
    """
    lines, worst = [], 0.0
    for key, answer in got.answers.items():
        if got.prompts[key] != expected.prompts[key]:
            fault = "another prompt"
        else:
            difference, fault = compare(answer, expected.answers[key], tolerance)
            worst = max(worst, difference)
        if fault:
            lines.append(f"{key[0]}, turn {key[1]} ({answer.cached_tokens} of {answer.prompt_tokens} cached): {fault}")
    return lines, worst
