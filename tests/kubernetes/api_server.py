"""The HTTP half of the test API server: paths, verbs, RBAC, patch types, faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.kubernetes.controllers import Controllers
from tests.kubernetes.objects import Object, Objects, StatusError, validate

GROUPS = {"deployments": "apps", "statefulsets": "apps", "pods": ""}
KINDS = {"deployments": "Deployment", "statefulsets": "StatefulSet", "pods": "Pod"}
VERBS = {"GET": "get", "PUT": "update", "PATCH": "patch", "POST": "create", "DELETE": "delete"}
_PATCH_TYPES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass
class Fault:
    """What happens instead of the next `times` requests of a kind.

    Attributes:
        status: the answer; 0: the connection is cut, -1: there is no answer for as long as the client waits.
        done: whether what was asked for is done all the same.
    """

    verb: str
    resource: str
    status: int
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    done: bool = False


class ApiServer:
    """One namespace of a cluster on a loopback port.

    Attributes:
        rules: of the only user, as in a Role; None: everything is allowed.
        asked: (verb, resource) of every request, in order.
        before: called with verb and resource before a request is looked at: what somebody else does in between.
    """

    TOKEN = "test-token"

    def __init__(self, namespace: str = "llm") -> None:
        self.namespace = namespace
        self.objects = Objects()
        self.controllers = Controllers(self.objects, namespace)
        self.rules: list[Object] | None = None
        self.asked: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.before: Callable[[str, str], None] = lambda verb, resource: None
        self.down = False
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._released = asyncio.Event()

    async def __aenter__(self) -> ApiServer:
        await self.start(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._released.set()
        await self.stop()

    async def start(self, port: int) -> None:
        app = web.Application()
        for base in ("/api/v1", "/apis/apps/v1"):
            path = base + "/namespaces/{namespace}/{resource}"
            app.router.add_get(path, self._handle)
            app.router.add_route("*", path + "/{name}", self._handle)
            app.router.add_route("*", path + "/{name}/{sub}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        address = self._runner.addresses[0]
        self.url = f"http://{address[0]}:{address[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def create(self, manifests: Iterable[Object]) -> None:
        """As `kubectl apply` would for the first time. Every object is validated."""
        for manifest in manifests:
            self.objects.create(manifest["kind"], self.namespace, manifest)
        self.controllers.run()

    def set_replicas(self, kind: str, name: str, replicas: int) -> None:
        """A person scales."""

        def change(found: Object) -> Object:
            found["spec"]["replicas"] = replicas
            return found

        self.objects.replace(kind, self.namespace, name, change, "")
        self.controllers.run()

    def replicas(self, kind: str, name: str) -> int:
        return int(self.objects.get(kind, self.namespace, name)["spec"]["replicas"])

    def fail(self, verb: str, resource: str, status: int, **more: Any) -> None:
        self.faults.append(Fault(verb, resource, status, **more))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        resource, name = request.match_info["resource"], request.match_info.get("name", "")
        sub = request.match_info.get("sub", "")
        verb = VERBS.get(request.method, "?") if name or request.method != "GET" else "list"
        what = f"{resource}/{sub}" if sub else resource
        if self.down:
            return self._cut(request)
        self.asked.append((verb, what))
        self.before(verb, what)
        fault = next((f for f in self.faults if (f.verb, f.resource) == (verb, what) and f.times > 0), None)
        try:
            self._authenticate(request)
            self._authorise(verb, resource, sub, name)
            if fault is not None:
                fault.times -= 1
                if fault.done:
                    with contextlib.suppress(StatusError):
                        await self._answer(request, verb, resource, name, sub)
                if fault.status == 0:
                    return self._cut(request)
                if fault.status == -1:
                    await self._released.wait()
                    return self._cut(request)
                raise StatusError(fault.status, "Fault", "made by the test")
            return web.json_response(await self._answer(request, verb, resource, name, sub))
        except StatusError as e:
            headers = fault.headers if fault is not None else None
            return web.json_response(e.body(), status=e.code, headers=headers)

    @staticmethod
    def _cut(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _authenticate(self, request: web.Request) -> None:
        if request.headers.get("Authorization", "").lower() != f"bearer {self.TOKEN}":
            raise StatusError(401, "Unauthorized", "Unauthorized")

    def _authorise(self, verb: str, resource: str, sub: str, name: str) -> None:
        what = f"{resource}/{sub}" if sub else resource
        if self.rules is None or any(
            GROUPS.get(resource, "?") in rule["apiGroups"]
            and what in rule["resources"]
            and verb in rule["verbs"]
            and ("resourceNames" not in rule or name in rule["resourceNames"])
            for rule in self.rules
        ):
            return
        raise StatusError(
            403,
            "Forbidden",
            f'{resource} is forbidden: User "system:serviceaccount:{self.namespace}:planner" cannot {verb} resource '
            f'"{what}" in API group "{GROUPS.get(resource, "?")}" in the namespace "{self.namespace}"',
        )

    async def _answer(self, request: web.Request, verb: str, resource: str, name: str, sub: str) -> Object:
        kind, namespace = KINDS.get(resource), request.match_info["namespace"]
        group = GROUPS.get(resource)
        if kind is None or request.path.startswith("/apis/") != bool(group):
            raise StatusError(404, "NotFound", "the server could not find the requested resource")
        version = "apps/v1" if group else "v1"
        match verb, sub:
            case "list", "":
                found = self.objects.list(kind, namespace, request.query.get("labelSelector", ""))
                return {
                    "kind": f"{kind}List",
                    "apiVersion": version,
                    "metadata": {"resourceVersion": self.objects.version},
                    "items": found,
                }
            case "get", "":
                return self.objects.get(kind, namespace, name)
            case "get", "scale" if kind != "Pod":
                return _scale_of(self.objects.get(kind, namespace, name), namespace)
            case "update", "scale" if kind != "Pod":
                return self._rescale(kind, namespace, name, await _json(request))
            case "patch", "":
                if request.content_type not in _PATCH_TYPES:
                    raise StatusError(
                        415, "UnsupportedMediaType", f"the body of the request was {request.content_type}"
                    )
                patched = self.objects.patch(kind, namespace, name, await _json(request))
                self.controllers.run()
                return patched
        raise StatusError(405, "MethodNotAllowed", f"the server does not allow {verb} on {resource}/{sub}")

    def _rescale(self, kind: str, namespace: str, name: str, body: Object) -> Object:
        validate(body)
        if body["metadata"].get("name") != name:
            raise StatusError(400, "BadRequest", "the name of the object does not match the name on the URL")
        replicas = body.get("spec", {}).get("replicas", 0)
        if replicas < 0:
            raise StatusError(422, "Invalid", "spec.replicas: Invalid value: must be greater than or equal to 0")

        def change(found: Object) -> Object:
            found["spec"]["replicas"] = replicas
            found["metadata"]["generation"] = found["metadata"].get("generation", 1) + 1
            return found

        changed = self.objects.replace(kind, namespace, name, change, body["metadata"].get("resourceVersion", ""))
        self.controllers.run()
        return _scale_of(changed, namespace)


async def _json(request: web.Request) -> Object:
    try:
        body = json.loads(await request.read())
    except ValueError:
        raise StatusError(400, "BadRequest", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise StatusError(400, "BadRequest", "the body is no object")
    return body


def _scale_of(found: Object, namespace: str) -> Object:
    metadata = found["metadata"]
    replicas = found["spec"].get("replicas", 1)
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {"name": metadata["name"], "namespace": namespace, "uid": metadata["uid"]}
        | {"resourceVersion": metadata["resourceVersion"], "creationTimestamp": metadata["creationTimestamp"]},
        "spec": {"replicas": replicas} if replicas else {},
        "status": {"replicas": replicas, "selector": "vllm-pd/starts-as"},
    }
