"""Which pod is a worker, and whom Kubernetes takes: pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from vllm_pd.planner.actuators.kubernetes_model import (
    LEAVING,
    Kind,
    Pod,
    Seen,
    Workload,
    is_on_its_way,
    obstacle,
    pod_of,
    to_give_up,
    waited_s,
)
from vllm_pd.state import Epoch, Role, WorkerId

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
EPOCH = Epoch(int(NOW.timestamp() * 1000))
LABELS = {"app": "decode", "pod-template-hash": "a"}


def pod(name: str, **more: object) -> Pod:
    up: dict[str, object] = {
        "labels": LABELS,
        "ips": ("10.0.0.1",),
        "ports": (8000,),
        "phase": "Running",
        "is_assigned": True,
        "is_ready": True,
        "started": NOW - timedelta(seconds=30),
    }
    return Pod(name, f"uid-{name}", NOW - timedelta(minutes=5), **(up | more))  # type: ignore[arg-type]


def workload(replicas: int, kind: Kind = Kind.DEPLOYMENT) -> Workload:
    return Workload(kind, "decode", Role.DECODE, {"app": "decode"}, replicas)


def seen(of: Workload, *pods: Pod) -> Seen:
    return Seen((of,), pods, NOW)


@pytest.mark.parametrize(
    ("worker", "found"),
    [
        ("10.0.0.1:8000", True),
        ("10.0.0.1:8001", False),
        ("10.0.0.10:8000", False),
        ("[fd00::1]:8000", True),
        ("decode-0.decode.llm.svc.cluster.local:8000", True),
        ("DECODE-0:8000", True),
        ("decode-01.decode.llm.svc:8000", False),
        ("10.0.0.1:8000/some/path", True),
    ],
)
def test_a_worker_is_the_pod_at_its_address_or_of_its_name(worker: str, found: bool) -> None:
    pods = [pod("decode-0", ips=("10.0.0.1", "fd00::1")), pod("other", ips=("10.0.0.2",))]
    assert pod_of(WorkerId(worker), EPOCH, pods) == (pods[0] if found else None)


def test_workers_on_the_network_of_their_node_are_told_apart_by_port() -> None:
    pods = [pod("a", host_network=True, ports=(8000,)), pod("b", host_network=True, ports=(8001,))]
    assert pod_of(WorkerId("10.0.0.1:8001"), EPOCH, pods) == pods[1]


def test_a_container_that_started_after_the_worker_is_another_one() -> None:
    younger = pod("decode-0", started=NOW + timedelta(minutes=1))
    assert pod_of(WorkerId("10.0.0.1:8000"), EPOCH, [younger]) is None


def test_of_two_pods_with_one_address_the_one_that_stays_is_meant() -> None:
    pods = [pod("old", is_terminating=True), pod("new")]
    assert pod_of(WorkerId("10.0.0.1:8000"), EPOCH, pods) == pods[1]


@pytest.mark.parametrize(
    "other",
    [
        {"is_ready": False},
        {"phase": "Pending", "is_ready": False},
        {"phase": "Pending", "is_assigned": False, "is_ready": False},
    ],
)
def test_a_pod_that_is_not_up_stands_in_the_way_of_one_that_is(other: dict[str, object]) -> None:
    chosen, its = pod("chosen"), workload(2)
    assert "decode-x" in obstacle(chosen, its, seen(its, chosen, pod("decode-x", **other)))
    # The other way round Kubernetes takes the one that is meant.
    assert obstacle(pod("decode-x", **other), its, seen(its, chosen, pod("decode-x", **other))) == ""


def test_pods_that_end_or_have_ended_stand_in_nobodys_way() -> None:
    chosen, its = pod("chosen"), workload(1)
    ended = pod("gone", phase="Failed", is_ready=False), pod("going", is_terminating=True, is_ready=False)
    assert obstacle(chosen, its, seen(its, chosen, *ended)) == ""


def test_a_mark_counts_only_as_long_as_there_are_more_pods_than_wanted() -> None:
    marked = pod("marked", labels=LABELS | {LEAVING: "true"})
    assert is_on_its_way(marked, workload(1), seen(workload(1), marked, pod("other")))
    assert not is_on_its_way(marked, workload(2), seen(workload(2), marked, pod("other")))


def test_what_has_not_come_up_is_given_up_and_what_serves_is_not() -> None:
    up, loading = pod("up"), pod("loading", is_ready=False)
    unmade = workload(3)
    assert to_give_up(unmade, seen(unmade, up, loading), {up.uid}, 5) == ([loading], 1)
    assert to_give_up(unmade, seen(unmade, up, loading), {up.uid}, 1) == ([], 1)
    assert to_give_up(unmade, seen(unmade, up, loading), {up.uid, loading.uid}, 0) == ([], 0)


def test_of_a_stateful_set_only_the_last_pods_can_be_given_up() -> None:
    its = workload(3, Kind.STATEFUL_SET)
    pods = [pod("decode-0", is_ready=False), pod("decode-1"), pod("decode-2", is_ready=False)]
    assert to_give_up(its, seen(its, *pods), {pods[1].uid}, 2) == ([pods[2]], 0)


def test_how_long_something_is_waited_for_begins_when_it_stopped_being_ready() -> None:
    its = workload(1)
    assert waited_s(pod("a", is_ready=False), seen(its)) == 300
    assert waited_s(pod("a", is_ready=False, ready_since=NOW - timedelta(seconds=20)), seen(its)) == 20
    assert waited_s(replace(pod("a"), created=NOW + timedelta(hours=1)), seen(its)) == 0
