"""Requests that are refused, as they would end the scheduler, and every other request with it, or get a wrong answer.

Two looks at a request, as SGLang has two: at what was sent, before it reaches the scheduler, and at what became of it
there. Reads requests only; `hooks.py` puts both in place.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any


def input_fault(req: Any) -> str | None:
    """Of a request in the scheduler (SGLang's Req): one line, or None."""
    ids, vocabulary, sampling = req.origin_input_ids, req.vocab_size, req.sampling_params
    if not len(ids):
        return "the prompt is empty: send at least one token"
    if req.input_embeds is not None:
        return "input_embeds are not supported: layers that route by token id need the ids; send input_ids"
    if not (min(ids) >= 0 and max(ids) < vocabulary):
        return f"input_ids contain a token outside the vocabulary of {vocabulary}: send ids from 0 on below that"
    if req.logprob.top_logprobs_num > vocabulary:
        return f"top_logprobs_num is {req.logprob.top_logprobs_num}: the vocabulary has {vocabulary} tokens"
    if sampling.min_new_tokens and not all(0 <= token < vocabulary for token in sampling.stop_token_ids or ()):
        return f"stop_token_ids contain a token outside the vocabulary of {vocabulary}: send ids below that"
    return None


def request_fault(obj: Any) -> str | None:
    """Of a request as it was sent, what `input_fault` does not see any more: one line, or None."""
    if obj.positional_embed_overrides is not None:
        return "positional_embed_overrides are not supported: layers that route by token id would not know them"
    # SGLang's bookkeeping of logprobs would not add up.
    for name, least, meaning in (
        ("logprob_start_len", -1, "the first prompt token whose logprob is wanted, or -1 for none of them"),
        ("top_logprobs_num", 0, "how many of the likeliest tokens are wanted at each place"),
    ):
        value = getattr(obj, name)
        if value is not None and not (isinstance(value, Integral) and int(value) >= least):
            return f"{name} is {value!r}: send an integer from {least} on, {meaning}"
    return None
