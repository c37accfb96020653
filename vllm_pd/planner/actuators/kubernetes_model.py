"""Workers as pods: which pod serves as which worker, which workload starts what, and whom Kubernetes takes first. Pure.

A workload is a Deployment or a StatefulSet whose metadata and pod template carry the labels `vllm-pd/starts-as`
(prefill, decode or both) and `vllm-pd/namespace` (that of the workers' store).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from urllib.parse import urlsplit

from vllm_pd.state.base import Epoch, PoolId, RegistrySnapshot, Role, WorkerId, WorkerRecord

STARTS_AS = "vllm-pd/starts-as"
"""Label: the role that its workers are started in. It stays, whatever they do later."""
NAMESPACE = "vllm-pd/namespace"
"""Label: the namespace of the store, as in --pd-namespace."""
ROLE = "vllm-pd/role"
"""Label of a pod: what its worker does now; kept up to date by the planner, for people."""
LEAVING = "vllm-pd/leaving"
"""Label of a pod that was chosen to be taken away."""
POOL = "vllm-pd/pool"
"""Annotation of a workload: the pool that its workers join, where that cannot be told otherwise."""
MODEL = "vllm-pd/model"
"""Annotation of a workload: the model that its workers serve."""
MIN, MAX = "vllm-pd/min-replicas", "vllm-pd/max-replicas"
"""Annotations of a workload: between how many it may be scaled by a planner."""
HOLD = "vllm-pd/hold"
"""Annotation of a workload: a person scales it, and no planner does."""
TERM = "vllm-pd/planner-term"
"""Annotation of a workload: POOL/TERM, the pool and the leadership of the planner that scaled it last."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-1000000000"

_CLOCK_SLACK_S = 5.0
"""A container's start is known to the second, and the worker's epoch is of its node's clock too."""


class Kind(StrEnum):
    """What scales the pods of a worker component."""

    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"

    @property
    def resource(self) -> str:
        """Its name in RBAC rules."""
        return f"{self.lower()}s"


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet that starts workers."""

    kind: Kind
    name: str
    starts_as: Role
    selector: Mapping[str, str]
    replicas: int
    """Wanted."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    first_ordinal: int = 0
    """Of a StatefulSet."""
    version: str = ""
    """Of the object, in which all of this stands."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def is_held(self) -> bool:
        return self.annotations.get(HOLD, "").lower() not in ("", "false", "no", "off")

    @property
    def least(self) -> int:
        return _whole(self.annotations.get(MIN), 0)

    @property
    def most(self) -> int:
        return _whole(self.annotations.get(MAX), 1 << 30)

    def term_of(self, pool: PoolId) -> int:
        """The leadership of this pool in which it was scaled last; 0 if it was not, or for another pool."""
        named, _, term = self.annotations.get(TERM, "").partition("/")
        return _whole(term, 0) if named == pool else 0

    def owns(self, pod: Pod) -> bool:
        return bool(self.selector) and self.selector.items() <= pod.labels.items()


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a workload."""

    name: str
    uid: str
    created: datetime
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ips: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    """That its containers declare."""
    host_network: bool = False
    phase: str = "Pending"
    is_assigned: bool = False
    """Whether it has a node."""
    is_ready: bool = False
    is_terminating: bool = False
    ready_since: datetime | None = None
    """When its readiness last changed."""
    started: datetime | None = None
    """When the newest of its running containers was started; None while none runs."""
    grace_s: int = 30
    """How long it gets to finish when it is deleted."""

    @property
    def is_live(self) -> bool:
        """Whether it counts as one of the replicas."""
        return not self.is_terminating and self.phase not in ("Succeeded", "Failed")

    @property
    def rank(self) -> tuple[int, int, int]:
        """By this a ReplicaSet chooses whom to delete, lowest first, before it looks at the deletion cost."""
        phases = {"Pending": 0, "Unknown": 1}
        return int(self.is_assigned), phases.get(self.phase, 2), int(self.is_ready)

    @property
    def ordinal(self) -> int:
        """Number of a StatefulSet's pod; -1 if it has none."""
        tail = self.name.rpartition("-")[2]
        return int(tail) if tail.isdigit() else -1


@dataclass(frozen=True, slots=True)
class Seen:
    """The workloads and pods of a namespace."""

    workloads: tuple[Workload, ...]
    pods: tuple[Pod, ...]
    at: datetime
    """By the API server's clock."""

    def of(self, workload: Workload) -> list[Pod]:
        """Its live pods."""
        return [pod for pod in self.pods if pod.is_live and workload.owns(pod)]

    def owner(self, pod: Pod) -> Workload | None:
        return next((workload for workload in self.workloads if workload.owns(pod)), None)


def _whole(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.strip().isdigit() else otherwise


def pod_of(worker: WorkerId, epoch: Epoch, pods: Iterable[Pod]) -> Pod | None:
    """The pod in which this start of a worker runs, terminating or not.

    A worker is known by where it can be reached: the address of its pod, or a name that begins with the pod's. An
    address may have been given to another pod meanwhile, whose container is then younger than the worker's epoch.
    """
    parts = urlsplit(f"//{worker}")
    host, port = parts.hostname or "", parts.port
    found = [
        pod
        for pod in pods
        if (host in pod.ips or host == pod.name.lower() or host.startswith(f"{pod.name.lower()}."))
        and (port is None or not pod.ports or port in pod.ports)
        and (pod.started is None or epoch / 1000 >= pod.started.timestamp() - _CLOCK_SLACK_S)
    ]
    # A terminating one may still have the address that the network gave to the next.
    return min(found, key=lambda pod: pod.is_terminating) if found else None


def serving(records: Iterable[WorkerRecord], pods: Sequence[Pod]) -> dict[str, WorkerRecord]:
    """By the uid of a pod: the worker that is registered and runs in it."""
    out: dict[str, WorkerRecord] = {}
    for record in records:
        if (pod := pod_of(record.id, record.epoch, pods)) is not None:
            out[pod.uid] = record
    return out


def records_of(snapshot: RegistrySnapshot) -> list[WorkerRecord]:
    return [state.record for state in snapshot.workers]


def workloads_of(pool: PoolId, seen: Seen, records: Sequence[WorkerRecord]) -> list[Workload]:
    """The workloads whose workers join this pool: by annotation, by the workers that they have, by their model. One of
    which nothing is known belongs to the only pool there is.
    """
    models = {record.pool.id: record.pool.model for record in records}
    by_pod = serving(records, seen.pods)
    out = []
    for workload in seen.workloads:
        pools = {by_pod[pod.uid].pool.id for pod in seen.of(workload) if pod.uid in by_pod}
        named, model = workload.annotations.get(POOL), workload.annotations.get(MODEL)
        if named:
            its = named == pool
        elif pools:
            its = pool in pools
        elif model and pool in models:
            its = model == models[pool]
        else:
            its = not set(models) - {pool}
        if its:
            out.append(workload)
    return out


def waiting(workload: Workload, seen: Seen, up: Collection[str]) -> tuple[list[Pod], int]:
    """Pods that have not come up, and how many are wanted and not even made. `up`: uids of pods that serve."""
    pods = seen.of(workload)
    return [pod for pod in pods if pod.uid not in up], max(0, workload.replicas - len(pods))


def waited_s(pod: Pod, seen: Seen) -> float:
    """How long a pod that is not up has had for it."""
    since = pod.ready_since if not pod.is_ready and pod.ready_since is not None else pod.created
    return max(0.0, (seen.at - since).total_seconds())


def is_on_its_way(pod: Pod, workload: Workload, seen: Seen) -> bool:
    """Whether the replicas were reduced for this pod already, and Kubernetes is about to delete it."""
    return LEAVING in pod.labels and len(seen.of(workload)) > workload.replicas


def obstacle(pod: Pod, workload: Workload, seen: Seen) -> str:
    """Why Kubernetes would, with one replica less, not take this pod away; "" when it would."""
    live = seen.of(workload)
    others = [other for other in live if other.uid != pod.uid and not is_on_its_way(other, workload, seen)]
    if workload.kind is Kind.STATEFUL_SET:
        last = max(others, key=lambda other: other.ordinal, default=None)
        if last is not None and last.ordinal > pod.ordinal:
            return (
                f"{workload} always loses its last pod first, which is {last.name}; remove the worker of that one, or "
                "run these workers as a Deployment"
            )
        return ""
    if len({other.labels.get("pod-template-hash") for other in (*others, pod)}) > 1:
        return f"a rollout of {workload} is under way; try again when `kubectl rollout status` says that it is over"
    if len(live) < workload.replicas:
        return f"{workload} waits for a pod that could not be made, and would give up that one; see its events"
    sooner = [other for other in others if other.rank < pod.rank]
    if sooner:
        return (
            f"pod {sooner[0].name} of {workload} is not ready, and Kubernetes would take that one first; it is to "
            "come up or to be given up before"
        )
    return ""


def to_give_up(workload: Workload, seen: Seen, up: Collection[str], count: int) -> tuple[list[Pod], int]:
    """Of at most `count` workers that have not come up: the pods to delete, and how many that were not made yet.

    Pods that serve stay: with so many replicas less Kubernetes deletes exactly these.
    """
    pods, missing = waiting(workload, seen, up)
    missing = min(missing, count)
    if workload.kind is Kind.STATEFUL_SET:
        ordered = sorted(seen.of(workload), key=lambda pod: -pod.ordinal)
        last: list[Pod] = []
        for pod in ordered:
            if pod not in pods:
                break
            last.append(pod)
        # With some not made, it may be any ordinal that is missing: only what is certain.
        return last[: count - missing], missing
    return sorted(pods, key=lambda pod: pod.rank)[: count - missing], missing
