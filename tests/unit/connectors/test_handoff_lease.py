"""Blocks of a prefill worker are read only while its lease holds."""

from __future__ import annotations

from vllm_pd.connectors.handoff_lease import EXTENSION_FIELD, FIELD, HandoffLease

HANDOFF = {"do_remote_prefill": True, "remote_block_ids": [[1]]}


def stamped(at: float, lease_s: float = 30) -> dict[str, object]:
    params = HandoffLease(lease_s).stamp(dict(HANDOFF), at)
    assert params is not None
    return params


def test_a_request_in_time_is_read() -> None:
    assert not HandoffLease().arrived("r", stamped(1000.0), 1024.9, 0.0)


def test_a_request_after_the_lease_is_not() -> None:
    assert HandoffLease().arrived("r", stamped(1000.0), 1025.1, 0.0)


def test_the_margin_never_eats_a_short_lease() -> None:
    assert not HandoffLease(3).arrived("r", stamped(1000.0, 3), 1001.9, 0.0)
    assert HandoffLease(3).arrived("r", stamped(1000.0, 3), 1002.1, 0.0)


def test_parameters_of_another_kind_or_without_the_field_are_fresh() -> None:
    lease = HandoffLease()
    assert not lease.arrived("r", HANDOFF, 1e12, 0.0)
    assert not lease.arrived("r", {**HANDOFF, FIELD: "soon"}, 1e12, 0.0)
    assert not lease.arrived("r", None, 1e12, 0.0)
    assert not lease.arrived("r", {**stamped(0.0), "do_remote_prefill": False}, 1e12, 0.0)
    assert lease.stamp({"do_remote_decode": True}, 0.0) == {"do_remote_decode": True}
    assert lease.stamp(None, 0.0) is None
    assert {FIELD, EXTENSION_FIELD} <= set(stamped(0.0))


def test_an_end_that_passed_through_a_float_still_counts() -> None:
    params = stamped(1000.0)
    params[FIELD] = float(str(params[FIELD]))
    assert HandoffLease().arrived("r", params, 1025.1, 0.0)


def test_a_queued_request_stays_readable_while_heartbeats_go_out() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    for now in range(55, 300, 5):
        assert not lease.is_stale("r", float(now))
        lease.heartbeat(float(now))


def test_a_request_that_came_late_and_waits_is_read_only_for_what_was_left_of_its_lease() -> None:
    """Its first heartbeat may have become a handshake, which extends nothing."""
    lease = HandoffLease()
    assert not lease.arrived("r", stamped(1000.0), 1024.0, 50.0)
    lease.heartbeat(50.5)
    assert not lease.is_stale("r", 50.9)
    assert lease.is_stale("r", 51.1)


def test_a_request_is_stale_after_the_process_stood_still() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    for now in (55.0, 60.0, 65.0):
        lease.heartbeat(now)
    assert not lease.is_stale("r", 79.0)
    assert lease.is_stale("r", 81.0)


def test_steps_without_a_heartbeat_keep_nothing_alive() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1000.0, 50.0)
    assert not lease.is_stale("r", 74.9)
    assert lease.is_stale("r", 75.1)


def test_the_prefill_workers_extension_counts_not_ours() -> None:
    lease = HandoffLease(600)
    lease.arrived("r", stamped(1000.0, 12), 1000.0, 50.0)
    lease.heartbeat(51.0)
    lease.heartbeat(57.0)
    assert not lease.is_stale("r", 60.9)
    assert lease.is_stale("r", 61.1)


def test_a_heartbeat_never_shortens_a_lease() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1000.0, 50.0)
    lease.heartbeat(50.1)
    lease.heartbeat(50.2)
    assert not lease.is_stale("r", 74.0)


def test_a_long_idle_engine_does_not_make_a_new_request_stale() -> None:
    lease = HandoffLease()
    lease.heartbeat(1.0)
    lease.arrived("r", stamped(1000.0), 1001.0, 5000.0)
    assert not lease.is_stale("r", 5000.1)


def test_a_forgotten_request_is_never_stale() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    lease.forget("r")
    lease.forget("r")
    assert not lease.is_stale("r", 1e9)
