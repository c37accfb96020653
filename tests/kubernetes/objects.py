"""Objects of the test API server: versions, selectors, patches, strict schemas."""

from __future__ import annotations

import copy
import functools
import itertools
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio import client

Object = dict[str, Any]

_MODELS: Mapping[str, Any] = {
    "ConfigMap": client.V1ConfigMap,
    "Deployment": client.V1Deployment,
    "Namespace": client.V1Namespace,
    "NetworkPolicy": client.V1NetworkPolicy,
    "PersistentVolumeClaim": client.V1PersistentVolumeClaim,
    "Pod": client.V1Pod,
    "PodDisruptionBudget": client.V1PodDisruptionBudget,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
    "Scale": client.V1Scale,
    "Secret": client.V1Secret,
    "Service": client.V1Service,
    "ServiceAccount": client.V1ServiceAccount,
    "StatefulSet": client.V1StatefulSet,
}


class StatusError(Exception):
    """An answer that is no success, as the API server words it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def body(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }


def unknown_fields(given: Any, kept: Any, path: str = "") -> list[str]:
    """What of `given` a schema did not keep."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        return [
            found
            for key, value in given.items()
            for found in (unknown_fields(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"])
        ]
    if isinstance(given, list) and isinstance(kept, list):
        pairs = enumerate(itertools.zip_longest(given, kept))
        return [found for i, (one, other) in pairs for found in unknown_fields(one, other, f"{path}[{i}]")]
    return []


@functools.cache
def _serialiser() -> Any:
    return client.ApiClient(client.Configuration())


def validate(found: Object) -> None:
    """Check an object against the OpenAPI schema that the official client was made from. Raises StatusError (400)."""
    kind = str(found.get("kind"))
    if kind not in _MODELS:
        raise StatusError(400, "BadRequest", f'no kind "{kind}" is registered')
    model = _MODELS[kind]
    try:
        read = model.model_validate(found)
    except ValueError as e:
        raise StatusError(
            400, "BadRequest", f"{kind} in version {found.get('apiVersion')!r} is malformed: {e}"
        ) from None
    kept = _serialiser().sanitize_for_serialization(read)
    if strange := unknown_fields(found, kept):
        raise StatusError(400, "BadRequest", f"{kind}: unknown field {strange[0]!r}")


def merged(base: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386); on labels and annotations a strategic merge patch does the same."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    out = dict(base) if isinstance(base, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key), value)
    return out


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of equality and existence takes an object with these labels."""
    for term in filter(None, (part.strip() for part in selector.split(","))):
        key, equals, value = (part.strip() for part in term.partition("="))
        if equals:
            if labels.get(key) != value.lstrip("="):
                return False
        elif key.startswith("!"):
            if key[1:] in labels:
                return False
        elif key not in labels:
            return False
    return True


class Objects:
    """All objects of a cluster, each with a version that grows with every change."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str, str], Object] = {}
        self._versions = itertools.count(100)
        self.clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def stamp(self) -> str:
        return self.clock().strftime("%Y-%m-%dT%H:%M:%SZ")

    def create(self, kind: str, namespace: str, found: Object) -> Object:
        validate(found)
        found = copy.deepcopy(found)
        metadata = found["metadata"]
        key = (kind, namespace, metadata["name"])
        if key in self._all:
            raise StatusError(409, "AlreadyExists", f'{kind} "{metadata["name"]}" already exists')
        metadata |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": self.stamp()}
        return self.put(kind, namespace, found)

    def put(self, kind: str, namespace: str, found: Object) -> Object:
        """Without any precondition: what controllers and kubelets do in these tests."""
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        self._all[kind, namespace, found["metadata"]["name"]] = found
        return found

    def get(self, kind: str, namespace: str, name: str) -> Object:
        try:
            return self._all[kind, namespace, name]
        except KeyError:
            raise StatusError(404, "NotFound", f'{kind.lower()}s "{name}" not found') from None

    def replace(self, kind: str, namespace: str, name: str, change: Callable[[Object], Object], version: str) -> Object:
        """Change one if `version`, where given, is its newest. Raises StatusError (404, 409)."""
        found = self.get(kind, namespace, name)
        if version and version != found["metadata"]["resourceVersion"]:
            raise StatusError(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {kind.lower()}s "{name}": the object has been modified; please '
                "apply your changes to the latest version and try again",
            )
        return self.put(kind, namespace, change(copy.deepcopy(found)))

    def patch(self, kind: str, namespace: str, name: str, patch: Object) -> Object:
        found = self.get(kind, namespace, name)
        wanted = patch.get("metadata", {})
        for field in ("uid", "resourceVersion"):
            if wanted.get(field) not in (None, found["metadata"][field]):
                raise StatusError(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {kind.lower()}s "{name}": Precondition failed: {field} in '
                    f"precondition: {wanted[field]}, {field} in object meta: {found['metadata'][field]}",
                )
        patched = merged(found, patch)
        validate(patched)
        return self.put(kind, namespace, patched)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        self._all.pop((kind, namespace, name), None)

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        return [
            found
            for (its, where, _), found in sorted(self._all.items())
            if (its, where) == (kind, namespace) and selects(selector, found["metadata"].get("labels") or {})
        ]

    @property
    def version(self) -> str:
        return str(max((int(found["metadata"]["resourceVersion"]) for found in self._all.values()), default=1))
