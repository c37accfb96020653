"""The leases of vLLM's NIXL worker, ended early by a release and a little late otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_pd.connectors.send_leases import GRACE_S, SendLeases


def nixl(**leases: float) -> Any:
    return SimpleNamespace(
        _reqs_to_send=dict(leases),
        _reqs_to_process=set(leases),
        _replicated_pcp_done_sending=set(),
        consumer_notification_counts_by_req={},
        expected_consumer_notifications_by_req={},
    )


def test_a_release_ends_a_lease_and_half_of_its_readers_are_forgotten() -> None:
    worker = nixl(a=100.0, b=100.0)
    worker.consumer_notification_counts_by_req["a"] = 1
    worker.expected_consumer_notifications_by_req["a"] = 2
    SendLeases(worker).let_go(["a", "unknown"])
    assert worker._reqs_to_send == {"b": 100.0}
    assert worker._reqs_to_process == {"b"}
    assert worker._replicated_pcp_done_sending == {"a"}
    assert not worker.consumer_notification_counts_by_req
    assert not worker.expected_consumer_notifications_by_req


def test_a_lease_that_is_over_gets_grace_once() -> None:
    worker = nixl(a=100.0, b=200.0)
    leases = SendLeases(worker)
    leases.give_grace(99.9)
    assert worker._reqs_to_send["a"] == 100.0
    leases.give_grace(100.0)
    assert worker._reqs_to_send == {"a": 100.0 + GRACE_S, "b": 200.0}
    leases.give_grace(100.0 + GRACE_S)
    assert worker._reqs_to_send["a"] == 100.0 + GRACE_S, "now vLLM ends it"


def test_a_heartbeat_within_the_grace_makes_it_an_ordinary_lease_again() -> None:
    worker = nixl(a=100.0)
    leases = SendLeases(worker)
    leases.give_grace(140.0)
    worker._reqs_to_send["a"] = 160.0
    leases.give_grace(141.0)
    leases.give_grace(160.0)
    assert worker._reqs_to_send["a"] == 160.0 + GRACE_S


def test_nothing_is_remembered_of_leases_that_ended() -> None:
    worker = nixl(a=1.0, b=1.0)
    leases = SendLeases(worker)
    leases.give_grace(2.0)
    del worker._reqs_to_send["a"]
    leases.give_grace(3.0)
    assert leases._over == {"b"}
    worker._reqs_to_send.clear()
    leases.give_grace(4.0)
    assert not leases._over
