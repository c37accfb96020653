from __future__ import annotations

from vllm_pd.router.sessions import MAX_NAME, Sessions
from vllm_pd.state import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def test_session_stays_where_it_went_last_until_its_time_is_over() -> None:
    sessions = Sessions(ttl_s=10)
    sessions.note("s", A, now=0)
    sessions.note("s", B, now=5)
    assert sessions.worker("s", now=14) == B
    assert sessions.worker("s", now=15) is None
    assert sessions.worker("other", now=5) is None


def test_only_so_many_sessions_are_kept_and_the_one_unused_longest_goes_first() -> None:
    sessions = Sessions(ttl_s=10, limit=3)
    for name in "abc":
        sessions.note(name, A, now=0)
    sessions.note("a", B, now=1)
    sessions.note("d", A, now=1)
    assert len(sessions) == 3
    assert [name for name in "abcd" if sessions.worker(name, now=2)] == ["a", "c", "d"]


def test_sessions_whose_time_is_over_leave_the_memory_while_others_come() -> None:
    sessions = Sessions(ttl_s=10)
    for n in range(100):
        sessions.note(f"old-{n}", A, now=0)
    for n in range(100):
        sessions.note(f"new-{n}", A, now=20)
    assert len(sessions) == 100


def test_name_that_is_no_sensible_one_is_not_kept() -> None:
    sessions = Sessions(ttl_s=10)
    sessions.note("", A, now=0)
    sessions.note("x" * (MAX_NAME + 1), A, now=0)
    assert len(sessions) == 0
