"""What makes pods out of workloads in the test cluster: the rules of Kubernetes' controllers, a scheduler that always
finds a node, and kubelets."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from tests.kubernetes.objects import Object, Objects

COST = "controller.kubernetes.io/pod-deletion-cost"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


def is_active(pod: Object) -> bool:
    """Whether a controller counts it."""
    return "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] not in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def goes_first(pod: Object) -> Any:
    """The order in which a ReplicaSet deletes pods (ActivePodsWithRanks of Kubernetes 1.22 and newer)."""
    metadata, status = pod["metadata"], pod["status"]
    changed = [c["lastTransitionTime"] for c in status.get("conditions", []) if c["type"] == "Ready"]
    return (
        bool(pod["spec"].get("nodeName")),
        _PHASES[status["phase"]],
        is_ready(pod),
        int(metadata.get("annotations", {}).get(COST, "0")),
        # Those that became ready last, and then those created last.
        [-ord(digit) for digit in (changed or [""])[0]],
        [-ord(digit) for digit in metadata["creationTimestamp"]],
        metadata["name"],
    )


class Controllers:
    """Deployments, StatefulSets, and the nodes.

    Attributes:
        paused: nothing reacts to what is wanted, as while a controller manager restarts.
        held: pods are made and get no node.
        quota: most pods that may be made; None: any number.
        on_start, on_stop: called with a pod whose container has started, or that was told to end.
    """

    def __init__(self, objects: Objects, namespace: str) -> None:
        self._objects = objects
        self._namespace = namespace
        self._numbers = itertools.count(1)
        self.paused = False
        self.held = False
        self.quota: int | None = None
        self.on_start: Callable[[Object], None] = lambda pod: None
        self.on_stop: Callable[[Object], None] = lambda pod: None

    def run(self) -> None:
        """Until what is there is what is wanted."""
        if self.paused:
            return
        for kind in ("Deployment", "StatefulSet"):
            for workload in self._objects.list(kind, self._namespace):
                self._reconcile(kind, workload)
        for pod in self._objects.list("Pod", self._namespace):
            if not self.held and is_active(pod) and not pod["spec"].get("nodeName"):
                self._start(pod)

    def pods(self, workload: Object) -> list[Object]:
        """The active pods of a workload."""
        labels = workload["spec"]["selector"]["matchLabels"]
        return [
            pod
            for pod in self._objects.list("Pod", self._namespace)
            if labels.items() <= pod["metadata"]["labels"].items() and is_active(pod)
        ]

    def unready(self, name: str) -> None:
        """Its readiness probe fails from now on."""
        pod = copy.deepcopy(self._objects.get("Pod", self._namespace, name))
        pod["status"]["conditions"] = self._condition("False")
        self._objects.put("Pod", self._namespace, pod)

    def finish(self, name: str) -> None:
        """A pod that was told to end has ended."""
        self._objects.delete("Pod", self._namespace, name)

    def _reconcile(self, kind: str, workload: Object) -> None:
        pods, wanted = self.pods(workload), workload["spec"].get("replicas", 1)
        if len(pods) < wanted:
            for number in range(wanted - len(pods)):
                if self.quota is None or len(self._objects.list("Pod", self._namespace)) < self.quota:
                    self._make(kind, workload, {pod["metadata"]["name"] for pod in pods}, number)
                    pods = self.pods(workload)
        elif kind == "StatefulSet":
            for pod in sorted(pods, key=lambda pod: -int(pod["metadata"]["name"].rpartition("-")[2]))[
                : len(pods) - wanted
            ]:
                self._stop(pod)
        else:
            for pod in sorted(pods, key=goes_first)[: len(pods) - wanted]:
                self._stop(pod)

    def _make(self, kind: str, workload: Object, taken: set[str], number: int) -> None:
        name, template = workload["metadata"]["name"], copy.deepcopy(workload["spec"]["template"])
        labels = template["metadata"]["labels"]
        if kind == "Deployment":
            labels["pod-template-hash"] = "5d4f8c7b9"
            pod_name = f"{name}-5d4f8c7b9-{next(self._numbers):05d}"
        else:
            pod_name = next(each for n in itertools.count() if (each := f"{name}-{n}") not in taken)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        pod["metadata"]["name"] = pod_name
        made = self._objects.create("Pod", self._namespace, pod)
        made["status"] = {"phase": "Pending"}

    def _condition(self, status: str) -> list[Object]:
        return [{"type": "Ready", "status": status, "lastTransitionTime": self._objects.stamp()}]

    def _start(self, pod: Object) -> None:
        pod = copy.deepcopy(pod)
        ip = f"10.1.0.{next(self._numbers)}"
        pod["spec"]["nodeName"] = "node-1"
        first = pod["spec"]["containers"][0]
        pod["status"] = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": self._condition("True"),
            "containerStatuses": [
                {
                    "name": first["name"],
                    "image": first["image"],
                    "imageID": "sha256:0",
                    "ready": True,
                    "restartCount": 0,
                    "state": {"running": {"startedAt": self._objects.stamp()}},
                }
            ],
        }
        self.on_start(self._objects.put("Pod", self._namespace, pod))

    def _stop(self, pod: Object) -> None:
        pod = copy.deepcopy(pod)
        pod["metadata"]["deletionTimestamp"] = self._objects.stamp()
        pod["metadata"]["deletionGracePeriodSeconds"] = pod["spec"].get("terminationGracePeriodSeconds", 30)
        self.on_stop(self._objects.put("Pod", self._namespace, pod))
