"""A read counts only if it was over before its lease was, by the worker's own clock."""

from __future__ import annotations

import pytest

from vllm_pd.connectors.read_leases import KEEP_S, ReadLease, ReadLeases

BLOCKS = ("engine", "request")
LEASE = ReadLease(BLOCKS, until=1025.0, extension_s=15.0)
"""By the wall clock, which shows 1000 when the worker's own shows 50."""


@pytest.fixture
def leases() -> ReadLeases:
    made = ReadLeases()
    made.learn([LEASE], 1000.0, 50.0)
    return made


@pytest.mark.parametrize(("now", "late"), [(74.9, set()), (75.1, {"r"})])
def test_a_read_is_late_when_its_lease_is_over(leases: ReadLeases, now: float, late: set[str]) -> None:
    leases.begin("r", BLOCKS)
    assert leases.late(["r"], now) == late
    assert leases.late(["r"], now) == set(), "said once"


def test_a_stop_between_scheduler_and_worker_counts(leases: ReadLeases) -> None:
    """The scheduler wrote the end down 20 s ago, by both clocks."""
    stopped = ReadLeases()
    stopped.learn([LEASE], 1020.0, 70.0)
    stopped.begin("r", BLOCKS)
    assert stopped.late(["r"], 75.1) == {"r"}


def test_another_hosts_clock_starts_elsewhere() -> None:
    other = ReadLeases()
    other.learn([LEASE], 1000.0, 1e6)
    other.begin("r", BLOCKS)
    assert other.late(["r"], 1e6 + 24.9) == set()


def test_heartbeats_extend_it(leases: ReadLeases) -> None:
    leases.begin("r", BLOCKS)
    for now in (60.0, 70.0, 80.0):
        leases.beat([BLOCKS, ("engine", "unknown")], now)
    assert leases.late(["r"], 94.9) == set()


def test_a_heartbeat_never_shortens_it(leases: ReadLeases) -> None:
    leases.begin("r", BLOCKS)
    leases.beat([BLOCKS], 51.0)
    assert leases.late(["r"], 74.9) == set()


def test_a_heartbeat_after_the_end_revives_nothing(leases: ReadLeases) -> None:
    leases.begin("r", BLOCKS)
    leases.beat([BLOCKS], 75.1)
    assert leases.late(["r"], 75.2) == {"r"}


def test_loads_that_are_no_reads_of_ours_are_never_late(leases: ReadLeases) -> None:
    assert leases.late(["from a tier"], 1e9) == set()


def test_blocks_that_another_request_has_read_are_gone(leases: ReadLeases) -> None:
    leases.begin("r", BLOCKS)
    leases.begin("s", BLOCKS)
    assert leases.late(["r"], 60.0) == set()
    assert leases.late(["s"], 60.0) == {"s"}


def test_a_lease_that_nobody_uses_is_forgotten_and_one_that_is_read_under_is_not(leases: ReadLeases) -> None:
    other = ReadLease(("engine", "aborted"), 1025.0, 15.0)
    leases.learn([other], 1000.0, 50.0)
    leases.begin("r", BLOCKS)
    leases.learn([ReadLease(("engine", "new"), 2000.0, 15.0)], 1025.0 + KEEP_S + 1, 75.0 + KEEP_S + 1)
    assert set(leases._leases) == {BLOCKS, ("engine", "new")}
    leases.begin("a", other.blocks)
    assert leases.late(["a", "r"], 75.0 + KEEP_S + 2) == {"a", "r"}


def test_an_engine_that_gets_hand_offs_for_hours_keeps_few() -> None:
    leases = ReadLeases()
    for n in range(5000):
        leases.learn([ReadLease(("engine", str(n)), n + 25.0, 15.0)], float(n), float(n))
    assert len(leases._leases) <= 25 + KEEP_S + 1
