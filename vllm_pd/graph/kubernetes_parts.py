"""Pieces of manifests that all components share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_pd.graph.kubernetes_options import KubernetesOptions
from vllm_pd.graph.model import Component, Graph

Manifest = dict[str, Any]

GRAPH, COMPONENT = "vllm-pd/graph", "vllm-pd/component"
STORE_PORT, ROUTER_PORT, PLANNER_PORT, WORKER_PORT = 6379, 8080, 9090, 8000
PASSWORD = "STORE_PASSWORD"
"""Key of the Secret, and variable in the pods."""
STORE_URL = "STORE_URL"
"""Key of the Secret that holds the URL of a store of one's own, where it has a password."""


def name_of(graph: Graph, component: Component | str) -> str:
    label = component if isinstance(component, str) else component.label
    return f"{graph.name}-{label}"


def selector(graph: Graph, component: Component | str) -> dict[str, str]:
    """The labels by which a component's pods are found; they never change."""
    return {GRAPH: graph.name, COMPONENT: component if isinstance(component, str) else component.label}


def labels(graph: Graph, component: Component | str) -> dict[str, str]:
    return {
        "app.kubernetes.io/part-of": "vllm-pd",
        "app.kubernetes.io/instance": name_of(graph, component),
        **selector(graph, component),
    }


def metadata(
    graph: Graph,
    component: Component | str,
    *,
    more: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    out: Manifest = {"name": name_of(graph, component), "labels": {**labels(graph, component), **(more or {})}}
    if annotations:
        out["annotations"] = dict(annotations)
    return out


def secret_name(graph: Graph, options: KubernetesOptions) -> str:
    return options.secret or f"{graph.name}-secrets"


def variables(values: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def secret_variable(graph: Graph, options: KubernetesOptions, name: str, key: str = "") -> Manifest:
    """A variable whose value is in the graph's Secret under `key` (the variable's name if not given)."""
    return {
        "name": name,
        "valueFrom": {"secretKeyRef": {"name": secret_name(graph, options), "key": key or name}},
    }


def own_variables(graph: Graph, options: KubernetesOptions, *components: Component | None) -> list[Manifest]:
    """What components are given by their `env` and `secrets`."""
    out: list[Manifest] = []
    for component in components:
        if component is not None:
            out += variables(component.env)
            out += [secret_variable(graph, options, name) for name in component.secrets]
    return out


def merged(variables: Sequence[Manifest]) -> list[Manifest]:
    """Each variable once: the last of a name, in the place of the first, since others may refer to it from there on."""
    return list({each["name"]: each for each in variables}.values())


def probe(path: str, port: str = "http", **numbers: int) -> Manifest:
    return {"httpGet": {"path": path, "port": port}, "timeoutSeconds": 5, **numbers}


def confined(*, read_only: bool) -> Manifest:
    """What a container may do: as little as it needs."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": read_only,
    }


def pod_security(*, user: int | None = None) -> Manifest:
    out: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is not None:
        out |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return out


def requests(options: KubernetesOptions, component: Component, default: Mapping[str, str]) -> dict[str, str]:
    return {**default, **options.resources.get(component.label, {})}


def deployment(
    graph: Graph,
    component: Component,
    options: KubernetesOptions,
    pod: Manifest,
    *,
    replicas: int,
    strategy: Manifest,
    progress_s: int | None = None,
    more_labels: Mapping[str, str] | None = None,
    pod_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """`more_labels` are on the Deployment and its pods, `pod_labels` on the pods alone. `progress_s`: after so long
    without a pod that comes up a rollout counts as failed; None leaves it to Kubernetes (600)."""
    spec = {"automountServiceAccountToken": False, "enableServiceLinks": False, **pod}
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    every = {**labels(graph, component), **(more_labels or {}), **(pod_labels or {})}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(graph, component, more=more_labels, annotations=annotations),
        "spec": {
            "replicas": replicas,
            "strategy": strategy,
            **({} if progress_s is None else {"progressDeadlineSeconds": progress_s}),
            "selector": {"matchLabels": selector(graph, component)},
            "template": {"metadata": {"labels": every}, "spec": spec},
        },
    }


def service(graph: Graph, component: Component, port: int, target: str, kind: str = "ClusterIP") -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(graph, component),
        "spec": {
            "type": kind,
            "selector": selector(graph, component),
            "ports": [{"name": target, "port": port, "targetPort": target}],
        },
    }


def disruption_budget(graph: Graph, component: Component) -> Manifest:
    """Nodes are emptied one pod of a component at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(graph, component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(graph, component)}},
    }


def network_policy(graph: Graph, component: Component, rules: Sequence[Manifest]) -> Manifest:
    """Who may open connections to the pods of a component."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(graph, component),
        "spec": {
            "podSelector": {"matchLabels": selector(graph, component)},
            "policyTypes": ["Ingress"],
            "ingress": list(rules),
        },
    }


def from_pods(graph: Graph, *components: Component) -> list[Manifest]:
    return [{"podSelector": {"matchLabels": selector(graph, component)}} for component in components]


def from_monitoring(options: KubernetesOptions, port: str) -> list[Manifest]:
    if not options.monitoring_namespace:
        return []
    where = {"matchLabels": {"kubernetes.io/metadata.name": options.monitoring_namespace}}
    return [{"from": [{"namespaceSelector": where}], "ports": [{"port": port}]}]
