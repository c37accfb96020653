"""Which segment is given up, and what is kept of it."""

from __future__ import annotations

import pytest

from vllm_pd.kv_offload.segments.reclaim import Candidate, Limits, is_ours_to_free, keep, missing, victim

LIMITS = Limits(budget_bytes=1000, floor_bytes=100)


@pytest.mark.parametrize(
    ("used", "free", "expected"),
    [(0, 10_000, 0), (800, 10_000, 0), (900, 10_000, 100), (0, 300, 0), (0, 250, 50), (950, 120, 180)],
)
def test_room_is_missing_beyond_the_budget_or_below_the_floor(used: int, free: int, expected: int) -> None:
    assert missing(LIMITS, used, free, 200) == expected


def test_the_oldest_goes_first_when_nothing_was_used() -> None:
    candidates = [Candidate(i, 10, 10, 0, i) for i in (5, 3, 9)]
    assert victim(candidates, 10, 8) == candidates[1]
    assert victim([], 10, 8) is None


def test_a_segment_without_blocks_costs_nothing_and_goes_before_all() -> None:
    empty = Candidate(9, 10, 0, 0, 9)
    assert victim([Candidate(1, 10, 10, 0, 1), empty], 10, 8) == empty


def test_a_used_segment_stays_longer_than_an_unused_one_but_not_for_ever() -> None:
    used, unused = Candidate(1, 10, 10, 8, 2), Candidate(2, 10, 10, 0, 2)
    assert victim([used, unused], 3, 8) == unused
    much_later = Candidate(38, 10, 10, 0, 38)
    assert victim([used, much_later], 40, 8) == used


def test_one_block_in_use_does_not_save_a_segment() -> None:
    assert victim([Candidate(1, 100, 100, 1, 9), Candidate(4, 100, 100, 0, 4)], 10, 8) == Candidate(1, 100, 100, 1, 9)


def test_used_blocks_are_kept_the_most_used_first_and_no_more_than_allowed() -> None:
    heat = bytearray([0, 1, 5, 0, 1, 9, 1])
    assert keep(heat, range(7), 10) == [1, 2, 4, 5, 6]
    assert keep(heat, range(7), 3) == [1, 2, 5]
    assert keep(heat, [1, 3, 4], 10) == [1, 4]
    assert keep(heat, range(7), 0) == []


def test_who_takes_more_than_a_fair_share_makes_room() -> None:
    def ours(own: int, others: int, free: int = 10_000) -> bool:
        return is_ours_to_free(LIMITS, 1000, free, 100, own, others)

    assert ours(1000, 0) and ours(100, 0)
    assert ours(600, 1) and not ours(300, 1)
    assert ours(300, 1, free=150), "the disk is short of space: everybody helps"
