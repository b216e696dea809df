"""Where snapshots stand, and that every published one can be matched."""

from __future__ import annotations

import pytest

from sglang_dsv4.cache.policy import SnapshotPolicy


def positions(prefix, end, prompt, branch=None, page=128):
    return SnapshotPolicy(page).positions(prefix_len=prefix, extend_end=end, prompt_len=prompt, branch=branch)


@pytest.mark.parametrize(
    "prefix, end, prompt, branch, expected",
    [
        (0, 100, 100, None, []),
        (0, 127, 127, None, []),
        (0, 128, 128, None, [128]),
        (0, 129, 129, None, [128]),
        (0, 255, 255, None, [128]),
        (0, 256, 256, None, [128, 256]),
        (0, 257, 257, None, [256]),
        (128, 256, 256, None, [256]),
        (256, 300, 300, None, []),
        (0, 1024, 3000, None, [1024]),
        (1024, 2048, 3000, None, [2048]),
        (2048, 3000, 3000, None, [2944]),
        (0, 1340, 1340, 640, [640, 1280]),
        (0, 1280, 1280, 640, [640, 1152, 1280]),
        (0, 1340, 1340, 1280, [1280]),
        (640, 1340, 1340, 640, [1280]),
        (0, 512, 1340, 640, [512]),
        (0, 700, 1340, 650, [640]),
    ],
)
def test_an_extend_step_keeps_its_end_its_repeat_point_and_its_branch(prefix, end, prompt, branch, expected):
    assert positions(prefix, end, prompt, branch) == expected


@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("length", range(1, 900, 7))
def test_an_exact_repeat_always_resumes_at_its_last_whole_page(page, length):
    """A match is capped one token short of the prompt; the deepest position within the cap must be kept."""
    kept = positions(0, length, length, page=page)
    reachable = [p for p in kept if p <= length - 1]
    assert max(reachable, default=0) == page * ((length - 1) // page)


@pytest.mark.parametrize("page", [128, 256])
def test_every_position_is_a_page_boundary_with_a_whole_window_in_the_step(page):
    for prefix in range(0, 3 * page, page):
        for end in range(prefix + 1, prefix + 4 * page, 13):
            for branch in (None, prefix + page, end):
                for p in positions(prefix, end, end, branch, page):
                    assert p % page == 0 and prefix + 128 <= p <= end


def test_publishing_stays_below_three_snapshots_a_step_however_long_the_prompt():
    assert all(len(positions(0, n, n, n // 2)) <= 3 for n in range(1, 5000, 31))
