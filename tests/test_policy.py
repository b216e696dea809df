"""Where snapshots stand, and that every published one can be matched."""

from __future__ import annotations

import pytest

from sglang_dsv4.cache.policy import SnapshotPolicy, footholds, is_lone


def positions(prefix, end, prompt, branch=None, page=128, system=None, ladder=8192):
    wanted = SnapshotPolicy(page, ladder).positions(
        prefix_len=prefix, extend_end=end, prompt_len=prompt, branch=branch, system_end=system
    )
    assert not set(wanted.needed) & set(wanted.rungs)
    return list(wanted.needed), list(wanted.rungs)


@pytest.mark.parametrize(
    "prefix, end, prompt, branch, needed, rungs",
    [
        (0, 100, 100, None, [], []),
        (0, 127, 127, None, [], []),
        (0, 128, 128, None, [128], []),
        (0, 129, 129, None, [128], []),
        (0, 255, 255, None, [128], []),
        (0, 256, 256, None, [128, 256], []),
        (0, 257, 257, None, [256], []),
        (128, 256, 256, None, [256], []),
        (256, 300, 300, None, [], []),
        (0, 1024, 3000, None, [], [1024]),
        (1024, 2048, 3000, None, [], [2048]),
        (2048, 3000, 3000, None, [2944], []),
        (0, 1340, 1340, 640, [640, 1280], []),
        (0, 1280, 1280, 640, [640, 1152, 1280], []),
        (0, 1340, 1340, 1280, [1280], []),
        (640, 1340, 1340, 640, [1280], []),
        (0, 512, 1340, 640, [], [512]),
        (0, 700, 1340, 650, [640], []),
    ],
)
def test_an_extend_step_keeps_its_end_its_repeat_point_and_its_branch(prefix, end, prompt, branch, needed, rungs):
    assert positions(prefix, end, prompt, branch) == (needed, rungs)


def test_the_end_of_a_prompt_is_kept_by_the_step_that_computes_it_even_if_the_prompt_goes_on_for_a_few_tokens():
    """The last step is too short for a snapshot then; the step before must not treat its end as one of many."""
    assert positions(0, 8192, 8192 + 50)[0] == [8192]
    assert positions(8192, 8192 + 50, 8192 + 50) == ([], [])


def test_the_system_prompts_end_is_kept_by_the_first_request_that_has_it():
    assert positions(0, 3000, 3000, system=1000)[0] == [896, 2944]
    assert positions(1024, 3000, 3000, system=1000)[0] == [2944]


def test_a_long_step_leaves_a_ladder_at_the_same_places_whatever_it_began_with():
    assert positions(0, 40000, 40000, ladder=8192)[1] == [8192, 16384, 24576, 32768, 39936][:4]
    assert positions(9088, 40000, 40000, ladder=8192)[1] == [16384, 24576, 32768]
    assert positions(0, 40000, 40000, ladder=0)[1] == []


def test_a_long_prompt_has_footholds_as_far_as_its_middle_and_a_short_one_none():
    assert footholds(100_000, 200_000, 128, lone=False) == (2048, 4096, 8192, 16384, 32768)
    assert footholds(150_000, 8 * 150_000, 128, lone=False) == (2048, 4096, 8192, 16384, 32768, 65536)
    assert footholds(65_535, 140_000, 128, lone=False) == ()
    assert footholds(150_000, 8 * 150_000 + 8, 128, lone=False) == ()  # many such prompts fit
    rungs = SnapshotPolicy(128).positions(prefix_len=0, extend_end=70_000, prompt_len=70_000).rungs
    assert set(footholds(70_000, 140_000, 128, lone=False)) <= set(rungs)


def test_a_lone_text_has_footholds_where_the_room_beside_another_as_long_ends_and_halfway():
    assert is_lone(100_000, 199_999) and not is_lone(100_000, 200_000)
    assert not is_lone(60_000, 100_000) and not is_lone(100_000, 99_999)
    assert footholds(100_000, 130_000, 128, lone=True) == (11_776, 23_680)  # 130,000 - 106,250 = 23,750
    assert footholds(160_000, 199_999, 256, lone=True) == (14_848, 29_952)
    assert footholds(100_000, 100_000, 128, lone=True) == (2048,)
    assert footholds(100_000, 109_000, 128, lone=True) == (2048, 2688)
    step = SnapshotPolicy(128).positions(
        prefix_len=8192, extend_end=16384, prompt_len=100_000, footholds=(11_776, 23_680)
    )
    assert step.needed == (11_776,) and 11_776 not in step.rungs


@pytest.mark.parametrize("page", [128, 256])
@pytest.mark.parametrize("length", range(1, 900, 7))
def test_an_exact_repeat_always_resumes_at_its_last_whole_page(page, length):
    """A match is capped one token short of the prompt; the deepest position within the cap must be needed."""
    needed, _ = positions(0, length, length, page=page)
    assert max((p for p in needed if p <= length - 1), default=0) == page * ((length - 1) // page)


@pytest.mark.parametrize("page", [128, 256])
def test_every_position_is_a_page_boundary_with_a_whole_window_in_the_step(page):
    for prefix in range(0, 3 * page, page):
        for end in range(prefix + 1, prefix + 4 * page, 13):
            for branch in (None, prefix + page, end):
                for found in positions(prefix, end, end + 40, branch, page):
                    assert all(p % page == 0 and prefix + 128 <= p <= end for p in found)


def test_a_step_needs_at_most_four_snapshots_however_long_the_prompt():
    assert all(len(positions(0, n, n, n // 2, system=n // 3)[0]) <= 4 for n in range(1, 5000, 31))
