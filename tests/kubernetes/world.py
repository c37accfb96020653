"""Workers as pods of the test API server: a pod that starts registers, one that is told to end leaves the registry."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kubernetes.aio import client

from tests.conformance.registry import POOL
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.controllers import is_active
from tests.kubernetes.objects import Object
from vllm_pd.planner.actuators.kubernetes import KubernetesActuator
from vllm_pd.planner.actuators.kubernetes_client import OfficialCluster, selector_for
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.state import Epoch, PoolId, PoolSpec, Role, WorkerId, WorkerRecord
from vllm_pd.state.memory_registry import MemoryRegistry
from vllm_pd.state.memory_store import MemoryStore

LEASE_MS = 3_600_000
PORT = 8000
STORE_NAMESPACE = "default"


def workload(
    name: str,
    role: Role,
    replicas: int,
    *,
    kind: str = "Deployment",
    annotations: Mapping[str, str] | None = None,
    namespace: str = STORE_NAMESPACE,
) -> Object:
    """A manifest as an operator would write it."""
    labels = {"app": name, "vllm-pd/starts-as": str(role), "vllm-pd/namespace": namespace}
    container = {"name": "vllm", "image": "vllm-pd/worker", "ports": [{"containerPort": PORT}]}
    spec: dict[str, Any] = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {
            "metadata": {"labels": labels},
            "spec": {"terminationGracePeriodSeconds": 60, "containers": [container]},
        },
    }
    if kind == "StatefulSet":
        spec["serviceName"] = name
    metadata = {"name": name, "labels": labels, "annotations": dict(annotations or {})}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": spec}


class KubernetesWorld:
    """An `ActuatorWorld` (tests/conformance) over the test API server, which is started already."""

    def __init__(self, server: ApiServer, *, deadline_s: float = 120.0) -> None:
        self.server = server
        self.store = MemoryStore()
        self.registry = MemoryRegistry(STORE_NAMESPACE, self.store)
        self.pool: PoolId = POOL.id
        self.pool_of: dict[str, PoolSpec] = {}
        """By the name of a workload, where it is not the usual pool."""
        self.deadline_s = deadline_s
        self.connected = 0
        """How often an actuator made connections."""
        self._opened: list[KubernetesActuator] = []
        self._pending: list[Object] = []
        server.controllers.on_start = self._pending.append
        server.controllers.on_stop = self._stopped
        self.actuator = self.open()

    def open(self, mandate: Mandate = ANYBODY) -> KubernetesActuator:
        """An actuator with connections of its own."""
        settings = client.Configuration()
        settings.host = self.server.url
        settings.api_key["BearerToken"] = f"bearer {ApiServer.TOKEN}"
        settings.retries = None

        async def cluster() -> OfficialCluster:
            self.connected += 1
            selector = selector_for(STORE_NAMESPACE)
            return OfficialCluster(settings, self.server.namespace, selector=selector, deadline_s=self.deadline_s / 2)

        self._opened.append(KubernetesActuator(cluster, self.registry, deadline_s=self.deadline_s, mandate=mandate))
        return self._opened[-1]

    def forget_others(self) -> None:
        """Pods that are no workers do not register."""
        self._pending[:] = [pod for pod in self._pending if "vllm-pd/starts-as" in pod["metadata"]["labels"]]

    async def close(self) -> None:
        for each in self._opened:
            await each.close()

    async def settle(self) -> None:
        """Workers whose pods started register, unless they cannot."""
        while self._pending:
            pod = self._pending.pop()
            if is_active(self.server.objects.get("Pod", self.server.namespace, pod["metadata"]["name"])):
                await self.registry.heartbeat(self.record(pod), LEASE_MS)

    def record(self, pod: Object, role: Role | None = None) -> WorkerRecord:
        id = WorkerId(f"{pod['status']['podIP']}:{PORT}")
        started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
        epoch = Epoch(int(datetime.fromisoformat(started).timestamp() * 1000) + 500)
        labels = pod["metadata"]["labels"]
        pool = self.pool_of.get(labels.get("app", ""), POOL)
        its = role or Role(labels["vllm-pd/starts-as"])
        return WorkerRecord(id=id, epoch=epoch, pool=pool, url=f"http://{id}", role=its, models=("tiny",))

    def pod_of(self, worker: WorkerId) -> Object:
        return next(pod for pod in self.pods() if f"{pod['status'].get('podIP')}:{PORT}" == worker)

    def pods(self, app: str = "") -> list[Object]:
        """Those that are not terminating."""
        found = self.server.objects.list("Pod", self.server.namespace, f"app={app}" if app else "")
        return [pod for pod in found if is_active(pod)]

    def _stopped(self, pod: Object) -> None:
        if "podIP" not in pod["status"]:
            return
        record = self.record(pod)
        space = self.store.namespace(STORE_NAMESPACE)
        space.workers.pop((record.pool.id, record.id), None)

    # What the conformance suite asks for.

    async def another(self) -> KubernetesActuator:
        return self.open()

    async def workers(self) -> Mapping[WorkerId, tuple[Epoch, Role]]:
        await self.settle()
        snapshot = await self.registry.snapshot()
        return {each.record.id: (each.record.epoch, each.record.role) for each in snapshot.workers}

    async def asked_for(self, role: Role) -> int:
        found = [
            each
            for kind in ("Deployment", "StatefulSet")
            for each in self.server.objects.list(kind, self.server.namespace)
        ]
        return sum(
            each["spec"]["replicas"] for each in found if each["metadata"]["labels"]["vllm-pd/starts-as"] == role
        )

    async def was_told(self, worker: WorkerId, to: Role) -> int:
        return 0

    async def hold_starts(self) -> None:
        self.server.controllers.held = True

    async def let_start(self) -> None:
        self.server.controllers.held = False
        self.server.controllers.run()

    async def cut(self) -> None:
        self.server.down = True

    async def heal(self) -> None:
        self.server.down = False
