"""When a transfer is looked at."""

from __future__ import annotations

from itertools import islice

from vllm_pd.kv_offload.block_io.pace import FASTEST, FIRST_LOOK, LONGEST_NAP_S, PATIENT_PAUSE_S, TELLING_BYTES, Pace

SIZE = 4 * TELLING_BYTES


def first_look(pace: Pace, size: int = SIZE) -> float:
    return next(pace.pauses(size))


def looks(pace: Pace, seconds: float, size: int = SIZE) -> tuple[int, float]:
    """Looks at a transfer that takes so long, and when the last of them is."""
    at = count = 0
    for pause in pace.pauses(size):
        at += pause
        count += 1
        if at >= seconds:
            break
    return count, at


def test_of_a_disk_that_nothing_is_known_of_only_the_impossible_is_waited_for() -> None:
    assert first_look(Pace()) == SIZE / FASTEST


def test_after_a_few_transfers_few_looks_are_made_and_none_comes_late() -> None:
    pace = Pace()
    seconds = SIZE / 2.5e9
    before, _ = looks(pace, seconds)
    for _ in range(3):
        pace.took(SIZE, seconds)
    count, at = looks(pace, seconds)
    assert count < before / 3
    assert seconds <= at <= 1.05 * seconds


def test_a_disk_that_becomes_faster_is_believed_at_once_and_a_slower_one_by_and_by() -> None:
    pace = Pace()
    pace.took(SIZE, 0.01)
    pace.took(SIZE, 0.008)
    assert first_look(pace) == FIRST_LOOK * 0.008
    pace.took(SIZE, 0.1)
    assert first_look(pace) < FIRST_LOOK * 0.009
    for _ in range(100):
        pace.took(SIZE, 0.1)
    assert 0.9 * LONGEST_NAP_S < first_look(pace) <= LONGEST_NAP_S


def test_short_transfers_neither_tell_anything_nor_wait() -> None:
    pace = Pace()
    pace.took(TELLING_BYTES - 1, 10.0)
    assert first_look(pace) == SIZE / FASTEST
    pace.took(SIZE, 1.0)
    assert first_look(pace, TELLING_BYTES - 1) < 0.001


def test_no_pause_of_a_disk_in_trouble_is_long() -> None:
    pace = Pace()
    pace.took(SIZE, 1000.0)
    pauses = list(islice(pace.pauses(SIZE), 10_000))
    assert pauses[0] == LONGEST_NAP_S and max(pauses[1:]) == pauses[-1] == PATIENT_PAUSE_S
