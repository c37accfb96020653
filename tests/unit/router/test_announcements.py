from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.router.test_directory import Clock, state
from vllm_pd.block_hash import BlockKey
from vllm_pd.router.announcements import ANNOUNCE_S, MISSES, PROVEN_S, Announcements
from vllm_pd.router.worker import Source, Worker
from vllm_pd.routing.rates import RateLearner
from vllm_pd.state import WorkerId
from vllm_pd.state.block_index import Holder

HOLDER = Holder(WorkerId("a"))
KEYS = [b"first", b"second", b"last"]


class Engine:
    """What one cache has announced."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.keys: set[BlockKey] = set()
        self.seq = 0
        self.announcements = Announcements(self.holds, lambda holder: self.seq, self.clock)
        self.workers = [Worker(state("a"), Source.STORE, RateLearner(), "", 0.0)]

    def holds(self, holder: Holder, keys: Sequence[BlockKey]) -> bool:
        return not self.keys.isdisjoint(keys)

    def announce(self, *keys: BlockKey) -> None:
        self.seq += 1
        self.keys.update(keys)

    def ask(self, *, announced: Sequence[BlockKey] = (), events: bool = True) -> str:
        """Send a prompt; what comes of it after the time that announcements take."""
        self.announcements.sent(HOLDER, KEYS, self.seq)
        if events:
            self.announce(*announced or [b"something else"])
        self.clock.now += ANNOUNCE_S
        return self.announcements.problem(self.workers)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_several_prompts_in_a_row_of_which_nothing_is_announced_are_a_problem(engine: Engine) -> None:
    assert [bool(engine.ask()) for _ in range(MISSES)] == [False] * (MISSES - 1) + [True]
    assert "worker a announces blocks" in engine.announcements.problem(engine.workers)


def test_what_is_announced_while_an_answer_is_in_the_making_counts(engine: Engine) -> None:
    """An answer in one piece begins when everything is long announced, and nothing may follow."""
    for _ in range(MISSES):
        before = engine.announcements.seq(HOLDER)
        engine.announce(b"something else")
        engine.announcements.sent(HOLDER, KEYS, before)
        engine.clock.now += ANNOUNCE_S
        problem = engine.announcements.problem(engine.workers)
    assert problem


@pytest.mark.parametrize("key", [KEYS[0], KEYS[-1]])
def test_one_block_of_a_prompt_is_proof_enough(engine: Engine, key: BlockKey) -> None:
    for _ in range(MISSES - 1):
        engine.ask()
    assert not engine.ask(announced=[key])
    engine.keys.clear()
    assert not engine.ask()


def test_worker_that_announces_nothing_at_all_proves_nothing(engine: Engine) -> None:
    assert not any(engine.ask(events=False) for _ in range(3 * MISSES))


def test_block_counts_also_if_it_is_evicted_later(engine: Engine) -> None:
    for _ in range(MISSES):
        engine.announcements.sent(HOLDER, KEYS, engine.seq)
        engine.announce(*KEYS)
        assert not engine.announcements.problem(engine.workers)
        engine.keys.clear()
        engine.announce(b"other")
        engine.clock.now += ANNOUNCE_S
        assert not engine.announcements.problem(engine.workers)


def test_a_proven_cache_is_not_watched_for_a_while(engine: Engine) -> None:
    assert engine.announcements.wants(HOLDER)
    engine.announcements.sent(HOLDER, KEYS, engine.seq)
    assert not engine.announcements.wants(HOLDER)
    engine.announcements.proven(HOLDER)
    assert not engine.announcements.wants(HOLDER)
    engine.clock.now += PROVEN_S
    assert engine.announcements.wants(HOLDER)


def test_worker_that_starts_anew_begins_without_misses(engine: Engine) -> None:
    for _ in range(MISSES - 1):
        engine.ask()
    engine.announcements.forget(WorkerId("a"))
    assert not engine.ask()
