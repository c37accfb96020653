"""How a worker's role changes, by a clock of the test's own."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.agent.role_move import (
    BLOCKS_PART,
    DEFAULT_TIMEOUT_S,
    HAND_OVER_PART,
    SETTLE_S,
    RoleState,
    Seen,
    differs,
)
from vllm_pd.state.base import Epoch, MoveState, Role
from vllm_pd.state.roles import WantedRole

IDLE, BUSY = Seen(), Seen(requests=3)
TIMEOUT_S = 20.0
START = 1000.0
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def wish(role: Role, id: str = "w1", by: str = "operator", timeout_s: float = TIMEOUT_S) -> WantedRole:
    return WantedRole(role, Epoch(1), id, by, int(timeout_s * 1000))


def draining(old: Role, new: Role, told: bool = True) -> RoleState:
    state = RoleState(old).wish(wish(new), START, 5)
    assert state.moving_to is new and state.role is old and not state.claims
    return state.told(START) if told else state


@pytest.mark.parametrize(("old", "new"), [(DECODE, BOTH), (PREFILL, BOTH)])
def test_a_role_that_takes_nothing_away_is_there_at_once(old: Role, new: Role) -> None:
    state = RoleState(old).wish(wish(new), START, 5)
    assert (state.role, state.role_epoch, state.moving_to) == (new, 1, None)
    assert state.move is not None and state.move.state is MoveState.DONE and state.move.took_ms == 0
    assert state.claims


def test_the_role_that_it_has_is_only_noted_with_who_wishes_it() -> None:
    state = RoleState(DECODE, 4).wish(wish(DECODE, by=""), START, 5)
    assert (state.role, state.role_epoch) == (DECODE, 4)
    assert state.move is not None and (state.move.by, state.move.state) == ("", MoveState.DONE)


@pytest.mark.parametrize(("old", "new"), [(DECODE, PREFILL), (PREFILL, DECODE), (BOTH, PREFILL)])
def test_an_idle_worker_moves_when_routers_have_had_time_to_hear_of_it(old: Role, new: Role) -> None:
    state = draining(old, new)
    assert state.look(IDLE, START + SETTLE_S - 0.01, 6).moving_to is new
    moved = state.look(IDLE, START + SETTLE_S, 7)
    assert (moved.role, moved.role_epoch, moved.moving_to, moved.claims) == (new, 1, None, new.prefills)
    assert moved.move is not None
    assert (moved.move.state, moved.move.took_ms, moved.move.since_ms) == (MoveState.DONE, 1000 * SETTLE_S, 7)


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        (DECODE, PREFILL, BUSY),
        (DECODE, PREFILL, Seen(kv_usage=0.1)),
        (PREFILL, DECODE, Seen(jobs=1)),
        (PREFILL, DECODE, BUSY),
        (BOTH, PREFILL, BUSY),
        (BOTH, DECODE, Seen(requests=5, jobs=1, kv_usage=0.5)),
    ],
)
def test_it_waits_for_what_is_under_way(old: Role, new: Role, seen: Seen) -> None:
    state = draining(old, new).look(seen, START + 2, 6)
    assert state.moving_to is new
    assert state.move is not None and "waits for" in state.move.detail
    assert state.look(IDLE, START + 3, 7).role is new


@pytest.mark.parametrize(("old", "new"), [(PREFILL, DECODE), (BOTH, DECODE), (BOTH, PREFILL)])
def test_jobs_that_wait_for_one_that_begins_none_go_to_others(old: Role, new: Role) -> None:
    state = draining(old, new)
    assert state.gives_jobs_away
    assert not state.look(IDLE, START + 2, 6).gives_jobs_away


def test_one_that_did_not_prefill_has_no_jobs_to_give_away() -> None:
    assert not draining(DECODE, PREFILL).gives_jobs_away


def test_one_that_goes_on_decoding_need_not_become_idle() -> None:
    assert draining(BOTH, DECODE).look(Seen(requests=9, kv_usage=0.9), START + 2, 6).role is DECODE


def test_blocks_that_nobody_reads_are_left_to_their_lease() -> None:
    held = Seen(kv_usage=0.1)
    state = draining(PREFILL, DECODE)
    assert state.look(held, START + BLOCKS_PART * TIMEOUT_S - 1, 6).moving_to is DECODE
    assert state.look(held, START + BLOCKS_PART * TIMEOUT_S, 7).role is DECODE


def test_after_a_part_of_the_time_running_streams_are_to_be_handed_over() -> None:
    state = draining(DECODE, PREFILL).look(BUSY, START + HAND_OVER_PART * TIMEOUT_S - 0.1, 6)
    assert state.move is not None and not state.move.hand_over
    later = state.look(BUSY, START + HAND_OVER_PART * TIMEOUT_S, 7)
    assert later.move is not None and later.move.hand_over and differs(state.move, later.move)
    moved = later.look(IDLE, START + 6, 8)
    assert moved.move is not None and moved.role is PREFILL and not moved.move.hand_over
    # A worker that only prefills has no streams.
    other = draining(PREFILL, DECODE).look(BUSY, START + 9, 7)
    assert other.move is not None and not other.move.hand_over


def test_a_move_that_cannot_finish_is_undone_and_says_what_it_waited_for() -> None:
    state = draining(DECODE, PREFILL).look(Seen(requests=2, kv_usage=0.5), START + TIMEOUT_S, 9)
    assert (state.role, state.role_epoch, state.moving_to) == (DECODE, 0, None)
    assert state.move is not None and state.move.state is MoveState.UNDONE
    assert "20 s" in state.move.detail and "2 requests" in state.move.detail


def test_one_that_has_drained_moves_although_it_was_not_looked_at_in_time() -> None:
    assert draining(DECODE, PREFILL).look(IDLE, START + TIMEOUT_S + 5, 6).role is PREFILL


def test_a_time_too_short_for_routers_to_hear_of_it_says_so() -> None:
    undone = draining(DECODE, PREFILL).look(IDLE, START + SETTLE_S / 2, 6)
    assert undone.moving_to is PREFILL
    short = RoleState(DECODE).wish(wish(PREFILL, timeout_s=0.5), START, 5).told(START).look(IDLE, START + 0.5, 6)
    assert short.moving_to is None and short.move is not None
    assert "0.5 s" in short.move.detail and "routers" in short.move.detail


def test_what_routers_have_not_heard_of_is_undone() -> None:
    state = draining(DECODE, PREFILL, told=False)
    assert state.look(IDLE, START + TIMEOUT_S - 1, 6).moving_to is PREFILL
    undone = state.look(IDLE, START + TIMEOUT_S, 7)
    assert undone.role is DECODE and undone.move is not None and "did not hear" in undone.move.detail


def test_a_wish_is_obeyed_once() -> None:
    state = draining(DECODE, PREFILL).look(IDLE, START + 2, 6)
    assert state.wish(wish(PREFILL), START + 3, 7) is state
    again = state.wish(wish(DECODE, "w2"), START + 3, 7)
    assert again.moving_to is DECODE and again.role is PREFILL


def test_the_same_wish_of_somebody_else_takes_over_what_is_under_way() -> None:
    state = draining(DECODE, PREFILL).wish(wish(PREFILL, "w2", "planner"), START + 10, 6)
    assert state.move is not None and (state.move.id, state.move.by) == ("w2", "planner")
    assert state.look(BUSY, START + TIMEOUT_S, 7).moving_to is PREFILL, "with a time-out of its own"
    assert state.look(BUSY, START + 10 + TIMEOUT_S, 8).role is DECODE
    assert state.look(IDLE, START + 11, 8).role is PREFILL


def test_a_wish_for_the_old_role_ends_a_move_at_once() -> None:
    state = draining(DECODE, PREFILL).wish(wish(DECODE, "w2"), START + 3, 6)
    assert (state.role, state.role_epoch, state.moving_to) == (DECODE, 0, None)
    assert state.move is not None and (state.move.id, state.move.state) == ("w2", MoveState.DONE)


def test_a_wish_that_is_taken_back_changes_nothing_but_a_move_under_way() -> None:
    undone = draining(DECODE, PREFILL).undo("the wish was taken back", START + 2, 6)
    assert undone.role is DECODE and undone.move is not None and undone.move.state is MoveState.UNDONE
    assert undone.move.detail == "the wish was taken back" and undone.move.took_ms == 2000
    assert undone.undo("again", START + 3, 7) is undone


def test_a_wish_without_a_time_gets_the_usual_one() -> None:
    state = RoleState(DECODE).wish(wish(PREFILL, timeout_s=0), START, 5).told(START)
    assert state.look(BUSY, START + DEFAULT_TIMEOUT_S - 1, 6).moving_to is PREFILL
    assert state.look(BUSY, START + DEFAULT_TIMEOUT_S, 7).moving_to is None


_event = st.one_of(
    st.tuples(st.just("wish"), st.sampled_from(Role), st.integers(0, 9)),
    st.tuples(st.just("look"), st.integers(0, 2), st.integers(0, 2)),
    st.sampled_from([("undo",), ("told",), ("wait",)]),
)


@given(st.sampled_from(Role), st.lists(_event, max_size=40))
def test_whatever_comes_a_move_ends_in_time_and_epochs_count_changes(
    first: Role, events: list[tuple[object, ...]]
) -> None:
    state, now, changes = RoleState(first), START, 0
    for event in events:
        now += 0.7
        before = state
        if event[0] == "wish":
            state = state.wish(wish(Role(str(event[1])), f"w{event[2]}"), now, 1)
        elif event[0] == "look":
            state = state.look(Seen(int(str(event[1])), int(str(event[2]))), now, 1)
        elif event[0] == "undo":
            state = state.undo("x", now, 1)
        elif event[0] == "told":
            state = state.told(now)
        else:
            now += 5
        changes += state.role is not before.role
        assert state.role_epoch == changes
        if state.role is not before.role and before.moving_to is not None and state.move is not None:
            assert state.role is before.moving_to or state.move.id != (before.move and before.move.id)
        assert not (state.claims and state.moving_to is not None)
        assert dataclasses.replace(state) == state
    if state.moving_to is not None:
        assert state.look(BUSY, state.began + state.timeout_s, 1).moving_to is None
