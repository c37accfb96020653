from __future__ import annotations

from vllm_pd.router.retry_budget import MEMORY_S, RetryBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(budget: RetryBudget) -> int:
    """How many retries are allowed at once."""
    count = 0
    while budget.take():
        count += 1
    return count


def test_without_requests_the_floor_is_allowed() -> None:
    assert taken(RetryBudget(0.2, 10, Clock())) == 10


def test_a_part_of_the_requests_is_allowed() -> None:
    budget = RetryBudget(0.2, 0, Clock())
    for _ in range(1000):
        budget.note_request()
    assert taken(budget) == 200
    for _ in range(5):
        budget.note_request()
    assert taken(budget) == 1


def test_what_was_taken_comes_back_with_time() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, 10, clock)
    assert taken(budget) == 10
    clock.now += MEMORY_S
    assert taken(budget) == 6
    clock.now += 100 * MEMORY_S
    assert taken(budget) == 10


def test_a_quiet_time_saves_nothing_up() -> None:
    clock = Clock()
    budget = RetryBudget(0.5, 2, clock)
    for _ in range(100):
        budget.note_request()
    clock.now += 100 * MEMORY_S
    assert taken(budget) == 2


def test_an_outage_of_everything_adds_no_more_than_its_part() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 10, clock)
    retries = 0
    for second in range(600):
        clock.now = 100.0 + second
        for _ in range(50):
            budget.note_request()
            retries += budget.take()
    assert retries <= 0.2 * 50 * 600 + 10 * (1 + 600 / MEMORY_S)


def test_no_retry_at_all() -> None:
    budget = RetryBudget(0, 0, Clock())
    budget.note_request()
    assert not budget.take()
