"""Blocks of a prefill worker are read only while its lease holds."""

from __future__ import annotations

from vllm_pd.connectors.handoff_lease import FIELD, HandoffLease

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


def test_parameters_of_another_kind_or_without_the_field_never_expire() -> None:
    lease = HandoffLease()
    assert not lease.arrived("r", HANDOFF, 1e12, 0.0)
    assert not lease.arrived("r", None, 1e12, 0.0)
    assert not lease.arrived("r", {**stamped(0.0), "do_remote_prefill": False}, 1e12, 0.0)
    assert lease.stamp({"do_remote_decode": True}, 0.0) == {"do_remote_decode": True}
    assert lease.stamp(None, 0.0) is None
    assert FIELD in stamped(0.0)


def test_a_queued_request_stays_readable_while_steps_send_heartbeats() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    for now in range(60, 300, 10):
        lease.stepped(float(now))
        assert not lease.is_stale("r", now + 5.0)


def test_a_request_is_stale_after_the_process_stood_still() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    lease.stepped(51.0)
    assert lease.is_stale("r", 51.0 + 20.0)


def test_a_long_idle_engine_does_not_make_a_new_request_stale() -> None:
    lease = HandoffLease()
    lease.stepped(1.0)
    lease.arrived("r", stamped(1000.0), 1001.0, 5000.0)
    assert not lease.is_stale("r", 5000.1)


def test_a_forgotten_request_is_never_stale() -> None:
    lease = HandoffLease()
    lease.arrived("r", stamped(1000.0), 1001.0, 50.0)
    lease.forget("r")
    lease.forget("r")
    assert not lease.is_stale("r", 1e9)
