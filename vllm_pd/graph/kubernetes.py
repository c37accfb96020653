"""Kubernetes manifests of a graph. Pure: nothing is read, and no cluster is asked.

A component becomes a Deployment called GRAPH-COMPONENT. Workers are labelled so that the planner's actuator finds them
(`vllm_pd.planner.actuators.kubernetes_model`). Secrets are only referred to: see `kubernetes_parts.secret_name`.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.graph import check_settings, commands, program_args
from vllm_pd.graph import kubernetes_parts as parts
from vllm_pd.graph.commands import EngineSpec, WorkerSpec
from vllm_pd.graph.kubernetes_check import check, no_secrets
from vllm_pd.graph.kubernetes_options import KubernetesOptions, read_options
from vllm_pd.graph.kubernetes_parts import Manifest
from vllm_pd.graph.machine import Place
from vllm_pd.graph.model import Frontend, Graph, Planner, Store, Workers
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.layered import redact
from vllm_pd.planner.actuators import kubernetes_model as labels
from vllm_pd.planner.model import Mode

ANY = "0.0.0.0"
_AFTER_DRAIN_S = 30
"""What a pod gets beyond the time for its requests, to leave the store and free its memory."""
_PROBE_S = 10
_NOBODY = 65532
_SHM_SLACK_GIB = 4
_SSD_SLACK = 1.1
_BLOCK_SIZE = 32
_CPU_MAX_MODEL_LEN = 2048
_ROUTER_GRACE_S = 10
_UNHEARD_S = 5
"""Until everybody who sends requests to a Service has heard that one of its pods is going."""
_PROGRESS_SLACK_S = 120


def render(graph: Graph) -> list[Manifest]:
    """The objects of a graph, in an order in which they can be applied.

    Raises:
        SettingsError: the section `kubernetes` is wrong, or the graph holds what cannot be so on Kubernetes.
    """
    options = read_options(graph.kubernetes)
    check(graph, options)
    # Pods come and go: a router finds them in a store, also where one machine would need none.
    store = graph.store or Store()
    out: list[Manifest] = []
    if not store.url:
        out += _store(graph, store, options)
    for workers in graph.workers:
        out += _workers(graph, workers, store, options)
    for component in graph.components:
        if isinstance(component, Frontend):
            out += _frontend(graph, component, store, options)
        elif isinstance(component, Planner):
            out += _planner(graph, component, store, options)
    return out


def _store_variables(graph: Graph, store: Store, options: KubernetesOptions) -> list[Manifest]:
    """How a program finds the store."""
    namespace = {"VLLM_PD_NAMESPACE": graph.namespace}
    if not store.url:
        # The password is put in by Kubernetes, from the variable before.
        url = f"redis://:$({parts.PASSWORD})@{parts.name_of(graph, store)}:{parts.STORE_PORT}"
        own = [parts.secret_variable(graph, options, parts.PASSWORD)]
        return [*own, *parts.variables({"VLLM_PD_STORE": url, **namespace})]
    if redact(store.url) != store.url:
        told = parts.secret_variable(graph, options, "VLLM_PD_STORE", parts.STORE_URL)
        return [told, *parts.variables(namespace)]
    return parts.variables({"VLLM_PD_STORE": str(store.url), **namespace})


def _store(graph: Graph, store: Store, options: KubernetesOptions) -> list[Manifest]:
    # All of it can be rebuilt from the workers, so it is in memory only.
    lines = {"save": '""', "appendonly": "no", "maxmemory-policy": "noeviction", "dir": "/tmp"}
    lines |= check_settings.store_lines(store)
    told = " ".join(shlex.quote(f"{key} {value}") for key, value in lines.items())
    # A file and not an argument: arguments can be read by everybody on the node.
    script = (
        f"umask 077; printf '%s\\n' {told} \"requirepass ${parts.PASSWORD}\" > /tmp/store.conf; "
        'exec valkey-server /tmp/store.conf "$@"'
    )
    ping = "valkey-cli ping | grep -q PONG"
    container: Manifest = {
        "name": "store",
        "image": options.store_image,
        "command": ["sh", "-c", script, "store", *store.args],
        "env": parts.merged(
            [
                parts.secret_variable(graph, options, parts.PASSWORD),
                # For valkey-cli in the probe.
                parts.secret_variable(graph, options, "REDISCLI_AUTH", parts.PASSWORD),
                *parts.own_variables(graph, options, store),
            ]
        ),
        "ports": [{"name": "redis", "containerPort": parts.STORE_PORT}],
        "readinessProbe": {"exec": {"command": ["sh", "-c", ping]}, "periodSeconds": 5, "timeoutSeconds": 5},
        "livenessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": _PROBE_S, "failureThreshold": 6},
        "resources": {"requests": parts.requests(options, store, {"cpu": "500m", "memory": "1Gi"})},
        "securityContext": parts.confined(read_only=True),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "securityContext": parts.pod_security(user=999),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    out = [
        parts.deployment(graph, store, options, pod, replicas=1, strategy={"type": "Recreate"}),
        parts.service(graph, store, parts.STORE_PORT, "redis"),
    ]
    if options.network_policy:
        mine = [c for c in graph.components if isinstance(c, Workers | Frontend | Planner)]
        rule = {"from": parts.from_pods(graph, *mine), "ports": [{"port": "redis"}]}
        out.append(parts.network_policy(graph, store, [rule]))
    return out


def _serve(graph: Graph, workers: Workers, options: KubernetesOptions) -> list[str]:
    told = program_args.worker_args(workers.role, workers.settings)
    no_secrets(workers, told.env)
    args = [*told.args]
    gpus = int(workers.gpus) if options.gpu_resource else 0
    if gpus > 1 and not program_args.parallel_sizes(workers.args):
        args += ["--tensor-parallel-size", str(gpus)]
    engine = EngineSpec(
        graph.model_of(workers),
        max_model_len=None if gpus else min(_CPU_MAX_MODEL_LEN, workers.kv_blocks * _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        kv_blocks=workers.kv_blocks,
        shutdown_timeout_s=options.drain_s,
    )
    spec = WorkerSpec(workers.label, None, parts.WORKER_PORT, (*args, *workers.args))
    place = Place(gpus=tuple(str(n) for n in range(gpus)))
    command = commands.worker_command(spec, engine, place, programs=Path(), store="", namespace="")
    command[command.index(LOOPBACK)] = ANY
    return command


def _worker_volumes(workers: Workers, options: KubernetesOptions) -> tuple[list[Manifest], list[Manifest]]:
    settings = {key.replace("-", "_").removeprefix("pd_"): value for key, value in workers.settings.items()}
    shm: Manifest = {"medium": "Memory"}
    if not settings.get("cpu_percent"):
        shm["sizeLimit"] = f"{int(float(settings.get('cpu_gib') or 0)) + _SHM_SLACK_GIB}Gi"
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": shm}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if options.model_volume:
        volumes.append({"name": "models", **options.model_volume})
        mounts.append({"name": "models", "mountPath": "/models"})
    if settings.get("ssd_path"):
        size = int(float(settings.get("ssd_gib") or 0) * _SSD_SLACK) + 1
        volumes.append({"name": "ssd", **(options.ssd_volume or {"emptyDir": {"sizeLimit": f"{size}Gi"}})})
        mounts.append({"name": "ssd", "mountPath": str(settings["ssd_path"])})
    return volumes, mounts


def _workers(graph: Graph, workers: Workers, store: Store, options: KubernetesOptions) -> list[Manifest]:
    volumes, mounts = _worker_volumes(workers, options)
    gpus = {options.gpu_resource: str(int(workers.gpus))} if options.gpu_resource else {}
    requests = parts.requests(options, workers, {} if gpus else {"cpu": str(workers.cores)})
    env = [
        # The address under which routers and other workers reach it.
        {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *_store_variables(graph, store, options),
        *parts.variables({"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}),
        *(parts.variables({"HF_HOME": "/models/cache"}) if options.model_volume else []),
        *parts.own_variables(graph, options, workers),
    ]
    container: Manifest = {
        "name": "vllm",
        "image": options.worker_image,
        "command": _serve(graph, workers, options),
        "env": parts.merged(env),
        "ports": [{"name": "http", "containerPort": parts.WORKER_PORT}],
        "startupProbe": parts.probe(
            "/health", periodSeconds=_PROBE_S, failureThreshold=max(1, round(workers.ready_s / _PROBE_S))
        ),
        "readinessProbe": parts.probe("/health", periodSeconds=5, failureThreshold=3),
        "livenessProbe": parts.probe("/health", periodSeconds=_PROBE_S, failureThreshold=6),
        "resources": {key: value for key, value in (("requests", requests), ("limits", gpus)) if value},
        "securityContext": parts.confined(read_only=False),
        "volumeMounts": mounts,
    }
    pod: Manifest = {
        "securityContext": parts.pod_security(),
        "terminationGracePeriodSeconds": options.drain_s + _AFTER_DRAIN_S,
        "containers": [container],
        "volumes": volumes,
    }
    if options.runtime_class:
        pod["runtimeClassName"] = options.runtime_class
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.tolerations:
        pod["tolerations"] = [dict(each) for each in options.tolerations]
    role = str(workers.role)
    # One that a planner of the graph is not linked to is scaled by people.
    held = {} if workers in graph.planned else {labels.HOLD: "true"}
    out = [
        parts.deployment(
            graph,
            workers,
            options,
            pod,
            replicas=workers.count,
            # No GPU is free for one more while the old one is there.
            strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            progress_s=int(workers.ready_s) + options.drain_s + _PROGRESS_SLACK_S,
            more_labels={labels.STARTS_AS: role, labels.NAMESPACE: graph.namespace},
            pod_labels={labels.ROLE: role},
            annotations={
                labels.MODEL: graph.model_of(workers),
                labels.MIN: str(workers.limits.min),
                labels.MAX: str(workers.limits.max),
                **held,
            },
        ),
        parts.disruption_budget(graph, workers),
    ]
    if options.network_policy:
        routers = [c for c in graph.components if isinstance(c, Frontend)]
        rules: list[Manifest] = [
            # Between workers NIXL opens connections on ports that it chooses.
            {"from": parts.from_pods(graph, *graph.workers)},
            {"from": parts.from_pods(graph, *routers), "ports": [{"port": "http"}]},
            *parts.from_monitoring(options, "http"),
        ]
        out.append(parts.network_policy(graph, workers, rules))
    return out


def _small_pod(container: Manifest, grace_s: int) -> Manifest:
    return {
        "securityContext": parts.pod_security(user=_NOBODY),
        "terminationGracePeriodSeconds": grace_s,
        "containers": [
            {
                **container,
                "securityContext": parts.confined(read_only=True),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def _frontend(graph: Graph, frontend: Frontend, store: Store, options: KubernetesOptions) -> list[Manifest]:
    router = graph.router
    settings = check_settings.router_told(graph)
    told = program_args.router_args(settings)
    no_secrets(frontend, told.env)
    args = list(told.args)
    if router is None and "--policy" not in args:
        args += ["--policy", "least-loaded"]
    own = (*frontend.args, *(router.args if router is not None else ()))
    said = program_args.value_of((*args, *own), "--shutdown-grace")
    grace = float(said or options.drain_s)
    if not said:
        args += ["--shutdown-grace", f"{grace:g}"]
    container: Manifest = {
        "name": "router",
        "image": options.router_image,
        "command": ["vllm-pd-router", "--host", ANY, "--port", str(parts.ROUTER_PORT), *args, *own],
        "env": parts.merged(
            [
                *_store_variables(graph, store, options),
                *parts.variables({"PYTHONUNBUFFERED": "1"}),
                *parts.own_variables(graph, options, router, frontend),
            ]
        ),
        "ports": [{"name": "http", "containerPort": parts.ROUTER_PORT}],
        "startupProbe": parts.probe("/health", periodSeconds=2, failureThreshold=60),
        "readinessProbe": parts.probe("/ready", periodSeconds=5, failureThreshold=2),
        "livenessProbe": parts.probe("/health", periodSeconds=_PROBE_S, failureThreshold=3),
        # A router that is told to end takes no new requests, and some are still being sent to it then.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_UNHEARD_S)]}}},
        "resources": {"requests": parts.requests(options, frontend, {"cpu": "1", "memory": "1Gi"})},
    }
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    pod = _small_pod(container, math.ceil(grace) + _UNHEARD_S + _ROUTER_GRACE_S)
    return [
        parts.deployment(graph, frontend, options, pod, replicas=frontend.count, strategy=rolling),
        parts.service(graph, frontend, frontend.port or parts.ROUTER_PORT, "http", options.service_type),
        parts.disruption_budget(graph, frontend),
    ]


def _planner(graph: Graph, planner: Planner, store: Store, options: KubernetesOptions) -> list[Manifest]:
    told = program_args.planner_args(planner.settings)
    no_secrets(planner, told.env)
    args = ["planner", "run", *told.args, *planner.args]
    own = check_settings.planner_told(planner)
    if not program_args.value_of(args, "--actuator"):
        args += ["--actuator", "kubernetes"]
    elif any(each.partition("=")[0] == "processes" for each in own.actuators):
        raise SettingsError(
            f"{planner.label} is told the actuator processes, which starts workers on one machine; on Kubernetes leave "
            "it out, or name kubernetes."
        )
    # The probe asks its page, and Prometheus does; of several that are given the last one counts.
    port = own.metrics_port or parts.PLANNER_PORT
    args += ["--metrics-host", ANY, "--metrics-port", str(port)]
    container: Manifest = {
        "name": "planner",
        "image": options.router_image,
        "command": ["vllm-pd", *args],
        "env": parts.merged(
            [
                *_store_variables(graph, store, options),
                *parts.variables({"PYTHONUNBUFFERED": "1"}),
                *parts.own_variables(graph, options, planner),
            ]
        ),
        "ports": [{"name": "metrics", "containerPort": port}],
        "livenessProbe": parts.probe("/health", "metrics", periodSeconds=_PROBE_S, failureThreshold=6),
        "resources": {"requests": parts.requests(options, planner, {"cpu": "200m", "memory": "512Mi"})},
    }
    name = parts.name_of(graph, planner)
    account = {"serviceAccountName": name, "automountServiceAccountToken": True}
    pod = {**_small_pod(container, 30), **account}
    out: list[Manifest] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": parts.metadata(graph, planner)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": parts.metadata(graph, planner),
            "rules": rules(graph, scales=own.mode == Mode.SCALE),
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": parts.metadata(graph, planner),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
        parts.deployment(
            graph,
            planner,
            options,
            pod,
            replicas=options.planner_replicas,
            strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        ),
    ]
    if options.network_policy:
        out.append(parts.network_policy(graph, planner, parts.from_monitoring(options, "metrics")))
    return out


def rules(graph: Graph, *, scales: bool) -> list[dict[str, Any]]:
    """What the planner may do: see workloads and pods, label pods, and scale this graph's workloads if it is to."""
    names = [parts.name_of(graph, workers) for workers in graph.planned]
    scale = [
        {"apiGroups": ["apps"], "resources": [what], "resourceNames": names, "verbs": verbs}
        # Its leadership is written on the Deployment itself, so that none of an older one scales it any more.
        for what, verbs in (("deployments", ["get", "patch"]), ("deployments/scale", ["update"]))
    ]
    return [
        {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["list"]},
        *(scale if scales else []),
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    ]
