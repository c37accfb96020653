"""A namespace of a Kubernetes cluster through the official client (its asyncio half).

Only requests; what they are for is decided in `kubernetes`. Nothing is retried here except what the API server asked to
be retried (429). The HTTP library itself repeats a GET or PUT whose connection broke: a PUT carries the version that it
changes, so it is done once, and the repetition is a conflict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client, config

# Named here, or the client would load them within the first request: seconds in which the event loop stands still.
from kubernetes.aio.client.api.apps_v1_api import AppsV1Api
from kubernetes.aio.client.api.core_v1_api import CoreV1Api
from kubernetes.aio.client.exceptions import ApiException
from pydantic import ValidationError

from vllm_pd.errors import SettingsError
from vllm_pd.planner.actuators.kubernetes_cluster import Conflict, NotKnown, Refused, Unanswered
from vllm_pd.planner.actuators.kubernetes_model import NAMESPACE, STARTS_AS, Kind, Pod, Seen, Workload
from vllm_pd.state.base import Role

T = TypeVar("T")

IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_THROTTLED = 429
_TRIES = 4
_LONGEST_PAUSE_S = 5.0
_MERGE = "application/merge-patch+json"


async def connect(*, kubeconfig: str = "", context: str = "", namespace: str = "") -> tuple[client.Configuration, str]:
    """How to reach the cluster, and the namespace: of the pod that this runs in, or else of a kubeconfig file.

    Raises:
        SettingsError: there is neither, or it cannot be read.
    """
    settings = client.Configuration()
    # Whether to try again is decided here, where it is known what was asked.
    settings.retries = None
    own = ""
    try:
        if os.environ.get(IN_CLUSTER) and not kubeconfig:
            config.incluster_config.InClusterConfigLoader(
                token_filename=config.incluster_config.SERVICE_TOKEN_FILENAME,
                cert_filename=config.incluster_config.SERVICE_CERT_FILENAME,
            ).load_and_set(settings)
            own = await asyncio.to_thread(_own_namespace)
        else:
            path = kubeconfig or os.environ.get("KUBECONFIG") or None
            await config.load_kube_config(path, context=context or None, client_configuration=settings)
            if not namespace:
                _, active = config.list_kube_config_contexts(path)
                own = str(active.get("context", {}).get("namespace") or "")
    except (config.ConfigException, OSError, ValueError) as e:
        raise SettingsError(
            f"No Kubernetes cluster is known here ({e}); run in a pod with a service account, or set KUBECONFIG."
        ) from None
    return settings, namespace or own or "default"


class OfficialCluster:
    """Implements `Cluster`.

    Args:
        settings: how to reach the API server.
        namespace: of the workers' pods.
        selector: label selector of workloads and pods.
        deadline_s: of one request, pauses that the server asked for included.
    """

    def __init__(self, settings: client.Configuration, namespace: str, *, selector: str, deadline_s: float) -> None:
        self._api = client.ApiClient(settings)
        self._core, self._apps = CoreV1Api(self._api), AppsV1Api(self._api)
        self.namespace = namespace
        self._selector = selector
        self._deadline_s = deadline_s

    async def look(self) -> Seen:
        options = {"label_selector": self._selector, "_request_timeout": self._deadline_s}

        def listed(call: Callable[..., Awaitable[Any]], resource: str) -> Awaitable[Any]:
            return self._ask(lambda: call(self.namespace, **options), "list", resource)

        deployments, sets, pods = await asyncio.gather(
            listed(self._apps.list_namespaced_deployment_with_http_info, "deployments.apps"),
            listed(self._apps.list_namespaced_stateful_set_with_http_info, "statefulsets.apps"),
            listed(self._core.list_namespaced_pod_with_http_info, "pods"),
        )
        return Seen(
            tuple(
                found
                for kind, answer in ((Kind.DEPLOYMENT, deployments), (Kind.STATEFUL_SET, sets))
                for each in answer.data.items
                if (found := _workload(kind, each)) is not None
            ),
            tuple(_pod(each) for each in pods.data.items),
            _date(pods.headers),
        )

    async def read(self, workload: Workload) -> Workload:
        call = {
            Kind.DEPLOYMENT: self._apps.read_namespaced_deployment,
            Kind.STATEFUL_SET: self._apps.read_namespaced_stateful_set,
        }[workload.kind]
        found = await self._ask(
            lambda: call(workload.name, self.namespace, _request_timeout=self._deadline_s),
            "get",
            f"{workload.kind.resource}.apps",
        )
        return _still(workload, found)

    async def annotate(self, workload: Workload, annotations: Mapping[str, str]) -> Workload:
        call = {
            Kind.DEPLOYMENT: self._apps.patch_namespaced_deployment,
            Kind.STATEFUL_SET: self._apps.patch_namespaced_stateful_set,
        }[workload.kind]
        body = {"metadata": {"resourceVersion": workload.version, "annotations": dict(annotations)}}
        found = await self._ask(
            lambda: call(workload.name, self.namespace, body, _content_type=_MERGE, _request_timeout=self._deadline_s),
            "patch",
            f"{workload.kind.resource}.apps",
        )
        return _still(workload, found)

    async def set_scale(self, workload: Workload, replicas: int) -> None:
        call = {
            Kind.DEPLOYMENT: self._apps.replace_namespaced_deployment_scale,
            Kind.STATEFUL_SET: self._apps.replace_namespaced_stateful_set_scale,
        }[workload.kind]
        body = client.V1Scale(
            api_version="autoscaling/v1",
            kind="Scale",
            metadata=client.V1ObjectMeta(
                name=workload.name, namespace=self.namespace, resource_version=workload.version
            ),
            spec=client.V1ScaleSpec(replicas=replicas),
        )
        await self._ask(
            lambda: call(workload.name, self.namespace, body, _request_timeout=self._deadline_s),
            "update",
            f"{workload.kind.resource}.apps/scale",
        )

    async def mark(
        self, pod: Pod, *, labels: Mapping[str, str | None], annotations: Mapping[str, str | None] | None = None
    ) -> None:
        # With the uid, a pod that took the place of this one is not changed.
        metadata = {"uid": pod.uid, "labels": dict(labels), "annotations": dict(annotations or {})}
        await self._ask(
            lambda: self._core.patch_namespaced_pod(
                pod.name,
                self.namespace,
                {"metadata": metadata},
                _content_type=_MERGE,
                _request_timeout=self._deadline_s,
            ),
            "patch",
            "pods",
        )

    async def close(self) -> None:
        await self._api.close()

    async def _ask(self, call: Callable[[], Awaitable[T]], verb: str, resource: str) -> T:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._until_admitted(call)
        except ApiException as e:
            raise self._error(e, verb, resource) from None
        except TimeoutError:
            raise Unanswered(
                f"The API server did not answer {verb} {resource} within {self._deadline_s:g} s."
            ) from None
        except (aiohttp.ClientError, OSError) as e:
            raise Unanswered(f"The API server cannot be reached to {verb} {resource}: {e}.") from None
        except ValidationError as e:
            raise Unanswered(
                f"The API server's answer to {verb} {resource} is not understood: {e.error_count()} fields."
            ) from None

    @staticmethod
    async def _until_admitted(call: Callable[[], Awaitable[T]]) -> T:
        for left in reversed(range(_TRIES)):
            try:
                return await call()
            except ApiException as e:
                if e.status != _THROTTLED or not left:
                    raise
                after = str((e.headers or {}).get("Retry-After", ""))
                await asyncio.sleep(min(_LONGEST_PAUSE_S, float(after)) if after.isdigit() else 1.0)
        raise AssertionError("the last try returns or raises")

    def _error(self, error: ApiException, verb: str, resource: str) -> Refused | Conflict | Unanswered:
        status, said = error.status, _message(error)
        if status == 403:
            return Refused(
                f"The planner may not {verb} {resource} in namespace {self.namespace} (403); grant its service account "
                f"the verb {verb} on {resource}, as deploy/kubernetes does."
            )
        if status == 401:
            return NotKnown(
                f"The API server does not know who the planner is (401, on {verb} {resource}); renew its credentials."
            )
        if status == 404:
            return Refused(f"There is nothing any more to {verb} among {resource} in namespace {self.namespace} (404).")
        if status == 409:
            return Conflict(said)
        if status == _THROTTLED:
            return Refused(
                f"The API server has too much to do to {verb} {resource} (429), also when asked {_TRIES} times; it is "
                "tried again at the next step."
            )
        if status is not None and 400 <= status < 500:
            return Refused(f"The API server refused to {verb} {resource} ({status}): {said}.")
        return Unanswered(f"The API server failed to {verb} {resource} ({status}): {said}.")


def _own_namespace() -> str:
    return _OWN_NAMESPACE.read_text().strip() if _OWN_NAMESPACE.is_file() else ""


def _message(error: ApiException) -> str:
    """What a `Status` object says, shortened."""
    text = getattr(error.data, "message", "") or error.body or error.reason or ""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            text = str(json.loads(text).get("message") or text)
    return " ".join(text.split())[:300].rstrip(".") or "it said nothing"


def _date(headers: Mapping[str, str] | None) -> datetime:
    """The server's clock; this machine's where the server tells none."""
    try:
        return parsedate_to_datetime((headers or {})["Date"]).astimezone(UTC)
    except (KeyError, ValueError):
        return datetime.now(UTC)


def _workload(kind: Kind, found: Any) -> Workload | None:
    """None for one whose label names no role."""
    metadata, spec = found.metadata, found.spec
    starts_as = (metadata.labels or {}).get(STARTS_AS)
    if starts_as not in list(Role):
        return None
    ordinals = getattr(spec, "ordinals", None)
    return Workload(
        kind,
        metadata.name,
        Role(starts_as),
        dict(spec.selector.match_labels or {}),
        # Left out it is one.
        spec.replicas if spec.replicas is not None else 1,
        dict(metadata.annotations or {}),
        (ordinals.start or 0) if ordinals is not None else 0,
        metadata.resource_version or "",
    )


def _still(before: Workload, found: Any) -> Workload:
    """Raises Refused where it starts no workers any more."""
    now = _workload(before.kind, found)
    if now is None:
        raise Refused(f"{before} has lost its label {STARTS_AS} meanwhile.")
    return now


def _pod(found: Any) -> Pod:
    metadata, spec, status = found.metadata, found.spec, found.status
    containers = [*(spec.containers or []), *(spec.init_containers or [])]
    ready = next((c for c in (status.conditions or []) if c.type == "Ready"), None)
    running = [
        each.state.running.started_at
        for each in (status.container_statuses or [])
        if each.state is not None and each.state.running is not None and each.state.running.started_at is not None
    ]
    ips = [each.ip for each in (status.pod_ips or []) if each.ip]
    return Pod(
        name=metadata.name,
        uid=metadata.uid,
        created=metadata.creation_timestamp,
        labels=dict(metadata.labels or {}),
        annotations=dict(metadata.annotations or {}),
        ips=tuple(dict.fromkeys([*([status.pod_ip] if status.pod_ip else []), *ips])),
        ports=tuple(port.container_port for each in containers for port in (each.ports or [])),
        host_network=bool(spec.host_network),
        phase=status.phase or "Pending",
        is_assigned=bool(spec.node_name),
        is_ready=ready is not None and ready.status == "True",
        is_terminating=metadata.deletion_timestamp is not None,
        ready_since=ready.last_transition_time if ready is not None else None,
        started=max(running, default=None),
        grace_s=spec.termination_grace_period_seconds if spec.termination_grace_period_seconds is not None else 30,
    )


def selector_for(namespace: str) -> str:
    """Of the workloads and pods of workers that register in this namespace of the store.

    Raises:
        SettingsError: the name is too long for a label.
    """
    if len(namespace) > 63:
        raise SettingsError(f"The namespace {namespace!r} is longer than a Kubernetes label may be; use 63 letters.")
    return f"{STARTS_AS},{NAMESPACE}={namespace}"
