"""What is written to the SSD: by how often it was seen, and by what the writes of a day may be."""

from __future__ import annotations

import hashlib

import pytest

from vllm_pd.kv_offload.admission import DAY_S, Admission, Allowance, Sightings

BLOCK = 4096


def keys(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(str(n).encode()).digest() + b"\0\0\0\0" for n in range(first, first + count)]


def admission(writes_per_day: float, blocks: int = 100, stored: int = 0) -> Admission:
    return Admission(BLOCK, blocks * BLOCK, writes_per_day, now=0.0, stored_bytes=stored * BLOCK)


def test_counts_are_never_too_low_and_rarely_too_high() -> None:
    sightings = Sightings(1 << 14)
    for _ in range(3):
        sightings.add(keys(0, 1000))
    sightings.add(keys(1000, 1000))
    assert (sightings.count(keys(0, 1000)) >= 3).all()
    assert (sightings.count(keys(1000, 1000)) >= 1).all()
    assert (sightings.count(keys(0, 1000)) > 3).sum() <= 10
    assert (sightings.count(keys(5000, 1000)) > 0).sum() <= 10


def test_old_sightings_are_forgotten_and_memory_stays_the_same() -> None:
    sightings = Sightings(1)
    size = sightings._table.nbytes
    sightings.add(keys(0, 1))
    for round_ in range(3):
        sightings.add(keys(10_000 * (round_ + 1), 5000))
    assert sightings.count(keys(0, 1))[0] == 0
    assert sightings._table.nbytes == size == 4 << 12


def test_a_count_ends_at_what_a_byte_holds() -> None:
    sightings = Sightings(1)
    for _ in range(300):
        sightings.add(keys(0, 1))
    assert sightings.count(keys(0, 1))[0] == 255


def test_no_keys_are_no_trouble() -> None:
    chooser = admission(1.0)
    assert chooser.choose([], True, 0.0).tolist() == []
    assert chooser.seen([]).tolist() == []


def test_without_an_allowance_only_what_was_seen_before_is_written() -> None:
    chooser = admission(0.0)
    assert not chooser.choose(keys(0, 4), True, 0.0).any()
    assert not chooser.seen(keys(0, 4)).any()
    assert chooser.choose(keys(0, 6), True, 1e9).tolist() == [True] * 4 + [False] * 2
    assert chooser.seen(keys(0, 6)).tolist() == [True] * 4 + [False] * 2


def test_the_tier_is_filled_at_once_and_then_so_many_times_a_day() -> None:
    chooser = admission(2.0, blocks=100)
    assert chooser.choose(keys(0, 100), True, 0.0).all()
    # Half a day earns the whole tier once more, and no more than that is saved up.
    chooser.written(100, 0.0)
    assert not chooser.choose(keys(200, 1), True, DAY_S / 4).any()
    assert chooser.choose(keys(200, 100), True, 10 * DAY_S).all()
    assert not chooser.choose(keys(300, 1), True, 10 * DAY_S).any()


def test_what_was_seen_before_is_written_whatever_the_allowance_and_counts_against_it() -> None:
    chooser = admission(1.0, blocks=10)
    chooser.seen(keys(0, 10))
    assert chooser.choose(keys(0, 10), True, 0.0).all()
    assert chooser.choose(keys(0, 10), True, 0.0).all()
    assert not chooser.choose(keys(50, 1), True, DAY_S).any()


def test_what_the_tier_holds_at_start_is_not_filled_again() -> None:
    chooser = admission(1.0, blocks=10, stored=10)
    assert not chooser.choose(keys(0, 1), True, 0.0).any()


def test_a_request_that_lost_blocks_writes_no_further_new_ones() -> None:
    chooser = admission(1.0)
    chooser.seen(keys(0, 1))
    assert chooser.choose(keys(0, 2), False, 0.0).tolist() == [True, False]


def test_without_a_limit_everything_is_written() -> None:
    chooser = admission(float("inf"), blocks=1)
    assert all(chooser.choose(keys(n, 1), True, 0.0).all() for n in range(10))


@pytest.mark.parametrize(("now", "left"), [(0.0, 5.0), (1.0, 7.0), (10.0, 10.0), (-1.0, 5.0)])
def test_an_allowance_grows_with_time_up_to_its_size(now: float, left: float) -> None:
    assert Allowance(size=10.0, rate=2.0, left=5.0, at=0.0).at_time(now) == left
