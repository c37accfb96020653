from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.router.selection import cost, pick_decode, pick_pair, pick_prefill
from vllm_pd.state import PoolId, Role, WorkerId

A, B = PoolId("a"), PoolId("b")


@dataclass(frozen=True)
class Seen:
    id: WorkerId
    pool: PoolId = A
    role: Role = Role.BOTH
    inflight: int = 0
    inflight_at_report: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    last_pick: int = 0


def worker(name: str, role: Role = Role.BOTH, pool: PoolId = A, **load: float) -> Seen:
    return replace(Seen(WorkerId(name), pool, role), **load)  # type: ignore[arg-type]


counts = st.integers(0, 50)
workers = st.lists(
    st.builds(
        Seen,
        id=st.integers(0, 1000).map(lambda n: WorkerId(str(n))),
        pool=st.sampled_from([A, B]),
        role=st.sampled_from(Role),
        inflight=counts,
        inflight_at_report=counts,
        running=counts,
        waiting=counts,
        kv_usage=st.floats(0, 1),
        last_pick=counts,
    ),
    max_size=12,
    unique_by=lambda w: w.id,
)


@given(workers)
def test_pair_is_of_one_pool_of_two_workers_with_fitting_roles(known: list[Seen]) -> None:
    pair = pick_pair(known)
    assert (pair is None) == (not any(w.role.decodes for w in known))
    if pair is not None:
        assert pair.decode.role.decodes
        fitting = [w for w in known if w.role.prefills and w.pool == pair.decode.pool and w is not pair.decode]
        assert (pair.prefill is None) == (not fitting)
        if pair.prefill is not None:
            assert pair.prefill in fitting


@given(workers)
def test_nobody_of_the_role_is_cheaper_than_the_one_picked(known: list[Seen]) -> None:
    chosen = pick_decode(known)
    assert chosen is None or all(cost(chosen) <= cost(w) for w in known if w.role.decodes)


@given(workers, st.sets(st.integers(0, 1000).map(lambda n: WorkerId(str(n)))))
def test_excluded_workers_are_never_picked(known: list[Seen], excluded: set[WorkerId]) -> None:
    chosen = pick_prefill(known, A, frozenset(excluded))
    assert chosen is None or (chosen.id not in excluded and chosen.pool == A and chosen.role.prefills)


@given(workers, counts)
def test_one_more_own_request_never_makes_a_worker_cheaper(known: list[Seen], more: int) -> None:
    for w in known:
        assert cost(replace(w, inflight=w.inflight + more)) >= cost(w)


def test_own_requests_count_before_the_next_report() -> None:
    fresh, used = worker("fresh"), worker("used", inflight=1)
    assert pick_decode([used, fresh]) is fresh


def test_own_requests_already_in_the_report_are_not_counted_twice() -> None:
    reported = worker("a", running=5, inflight=5, inflight_at_report=5)
    other = worker("b", running=6)
    assert pick_decode([other, reported]) is reported


def test_requests_finished_since_the_report_are_taken_off() -> None:
    emptied = worker("a", running=5, inflight=0, inflight_at_report=5)
    assert pick_decode([worker("b", running=1), emptied]) is emptied


def test_a_waiting_request_weighs_more_than_a_running_one() -> None:
    assert pick_decode([worker("waits", waiting=2), worker("runs", running=6)]).id == "runs"  # type: ignore[union-attr]


def test_equal_loads_fall_to_kv_use_then_to_the_one_picked_longest_ago() -> None:
    full, empty = worker("full", running=2, kv_usage=0.9), worker("empty", running=2, kv_usage=0.1)
    assert pick_decode([full, empty]) is empty
    late, early = worker("late", last_pick=9), worker("early", last_pick=3)
    assert pick_decode([late, early]) is early


def test_idle_workers_take_turns() -> None:
    known = {name: worker(name) for name in ("a", "b", "c")}
    picks = Counter[str]()
    for turn in range(1, 31):
        chosen = pick_decode(known.values())
        assert chosen is not None
        picks[chosen.id] += 1
        known[chosen.id] = replace(chosen, last_pick=turn)
    assert picks == {"a": 10, "b": 10, "c": 10}


def test_single_worker_for_both_is_not_paired_with_itself() -> None:
    pair = pick_pair([worker("only")])
    assert pair is not None
    assert pair.prefill is None
