"""Why tokens were missed: what is remembered of pages that are gone, and how a replay reads it from a server."""

from __future__ import annotations

import pytest
import replay
from measure import HIDDEN

from sglang_dsv4.cache.causes import NEW, NO_SNAPSHOT, PAGE, SNAPSHOT, Seen, SeenPages

TOKENS = 128


def test_what_was_seen_ends_where_a_text_goes_on_differently_and_short_of_its_last_token():
    seen = SeenPages()
    seen.passed([1, 2, 3, 4])
    seen.snapshot(2)
    assert seen.walk([1, 2, 3, 9], TOKENS, 511) == Seen(3 * TOKENS, 2 * TOKENS)
    assert seen.walk([1, 2, 3, 4], TOKENS, 511) == Seen(3 * TOKENS, 2 * TOKENS)
    assert seen.walk([1, 2, 3, 4], TOKENS, 512) == Seen(4 * TOKENS, 2 * TOKENS)
    assert seen.walk([8, 2], TOKENS, 511) == Seen(0, 0)


def test_the_ends_of_what_was_not_passed_for_longest_are_forgotten_first():
    seen = SeenPages(room=5)
    seen.passed([1, 2, 3])
    seen.passed([1, 7, 8])
    assert len(seen) == 5
    seen.passed([1, 9])
    assert [seen.walk([*text], TOKENS, 1000).tokens for text in ([1, 2, 3], [1, 7, 8], [1, 9])] == [256, 384, 256]


METRICS = """# HELP sglang_dsv4:missed_tokens_total Tokens
sglang_dsv4:missed_tokens_total{cause="page evicted",model_name="m",tp_rank="0"} 256.0
sglang_dsv4:missed_tokens_total{cause="page evicted",model_name="m",tp_rank="1"} 256.0
sglang_dsv4:missed_tokens_total{model_name="m",cause="not seen before"} 1.5e+06
sglang_dsv4:hit_tokens_total{at="inner",model_name="m"} 128.0
"""


def test_a_replay_reads_the_causes_of_one_rank(monkeypatch):
    monkeypatch.setattr(replay, "_metrics", lambda url: METRICS)
    assert replay.missed_by_cause("") == {PAGE: 256, NEW: 1_500_000}


@pytest.mark.parametrize("counted, expected", [(300, {HIDDEN: 384}), (256, {PAGE: 256, NO_SNAPSHOT: 128})])
def test_hidden_causes_are_told_apart_only_by_counts_that_add_up(counted, expected):
    by_server = {PAGE: counted, SNAPSHOT: 0, NO_SNAPSHOT: 128, NEW: 5000}
    assert replay.told_apart({"never cached": 900, HIDDEN: 384}, by_server) == {"never cached": 900, **expected}
