"""From a path to its handler: the allow list of inference endpoints, and what the router answers itself."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm_pd.router import explain_endpoint, roles_endpoint, service_discovery
from vllm_pd.router.call import CHAT, COMPLETION, CallReader, Endpoint
from vllm_pd.router.directory import Directory
from vllm_pd.router.drain import STOPPING, Drain
from vllm_pd.router.explain_endpoint import ExplainEndpoint
from vllm_pd.router.headers import to_worker
from vllm_pd.router.metrics import CLIENT_GONE, RouterMetrics
from vllm_pd.router.placement import Placer
from vllm_pd.router.proxy import Proxy
from vllm_pd.router.readiness import Readiness
from vllm_pd.router.replies import send_error, send_json
from vllm_pd.router.roles_endpoint import RolesEndpoint
from vllm_pd.router.service_discovery import ServiceDiscovery
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import (
    ClientGone,
    ClientReply,
    ClientRequest,
    Headers,
    Upstream,
    UpstreamError,
    header,
)
from vllm_pd.router.worker import Source, Worker

MODELS_DEADLINE_S = 2.0
MAX_MODELS_ANSWER = 16 * 1024 * 1024

INFERENCE = (
    CHAT,
    COMPLETION,
    Endpoint("/v1/responses"),
    Endpoint("/v1/messages"),
    Endpoint("/v1/messages/count_tokens"),
    Endpoint("/v1/embeddings"),
    Endpoint("/v1/score"),
    Endpoint("/score"),
    Endpoint("/v1/rerank"),
    Endpoint("/v2/rerank"),
    Endpoint("/rerank"),
    Endpoint("/pooling"),
    Endpoint("/classify"),
    Endpoint("/tokenize"),
    Endpoint("/detokenize"),
    Endpoint("/v1/chat/completions/render"),
    Endpoint("/v1/completions/render"),
)
"""What is passed on. Nothing that administers a worker (adapters, sleep, profiling, weights) is ever among them."""


class _ModelsAnswer(msgspec.Struct):
    data: list[dict[str, Any]]


_models_answer = msgspec.json.Decoder(_ModelsAnswer)
_log = logging.getLogger(__name__)
_Own = Callable[[ClientRequest, ClientReply], Awaitable[None]]


class Endpoints:
    """The router's `Handler`.

    Args:
        clock: monotonic seconds, the directory's.
    """

    def __init__(
        self,
        settings: RouterSettings,
        directory: Directory,
        upstream: Upstream,
        proxy: Proxy,
        calls: CallReader,
        placer: Placer,
        readiness: Readiness,
        drain: Drain,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        roles: RolesEndpoint,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._proxy = proxy
        self._readiness = readiness
        self._drain = drain
        self._metrics = metrics
        self._clock = clock
        self._api_key = settings.api_key.encode()
        self._inference = {endpoint.path: endpoint for endpoint in INFERENCE}
        self._explain = ExplainEndpoint(directory, calls, placer, self._inference)
        self._own: dict[str, _Own] = {
            explain_endpoint.PATH: self._explain.serve,
            roles_endpoint.PATH: roles.serve,
            service_discovery.PATH: ServiceDiscovery(directory).serve,
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics_page,
            "/v1/models": self._models,
        }

    async def __call__(self, request: ClientRequest, reply: ClientReply) -> None:
        """Answer one request. Whatever goes wrong, the client gets a status and the counters are right."""
        started = time.monotonic()
        label = request.path if request.path in self._inference or request.path in self._own else "other"
        status = 0
        try:
            await self._dispatch(request, reply)
            status = reply.status
        except ClientGone:
            status = CLIENT_GONE
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        except Exception:
            _log.exception("unexpected error at %s", label)
            if reply.status == 0:
                await send_error(reply, 500, "The router failed on this request; its log has the details.")
            else:
                reply.abort()
            status = 500
        finally:
            self._metrics.finished(label, status, started)

    async def _dispatch(self, request: ClientRequest, reply: ClientReply) -> None:
        path, method = request.path, request.method
        endpoint = self._inference.get(path)
        if endpoint is not None:
            if method != "POST":
                await _wrong_method(reply, path, "POST")
            elif not self._is_allowed(request):
                await _unauthorized(reply)
            elif self._drain.draining:
                await send_error(reply, 503, STOPPING, [("Connection", "close")])
            else:
                self._drain.begin()
                try:
                    await self._proxy.serve(endpoint, request, reply)
                finally:
                    self._drain.end()
            return
        own = self._own.get(path)
        if own is None:
            paths = ", ".join(sorted([*self._inference, *self._own]))
            await send_error(reply, 404, f"The router has no path {path}; it has {paths}.")
        elif path != roles_endpoint.PATH and (
            (right := "POST" if path == explain_endpoint.PATH else "GET") != method.replace("HEAD", "GET")
        ):
            await _wrong_method(reply, path, right)
        elif path.startswith("/v1/") and not self._is_allowed(request):
            await _unauthorized(reply)
        else:
            await own(request, reply)

    def _is_allowed(self, request: ClientRequest) -> bool:
        if not self._api_key:
            return True
        given = header(request.headers, "authorization") or ""
        scheme, _, key = given.partition(" ")
        key_bytes = key.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(key_bytes, self._api_key)

    async def _health(self, request: ClientRequest, reply: ClientReply) -> None:
        await reply.send(200, [("Content-Type", "text/plain; charset=utf-8")], b"")

    async def _metrics_page(self, request: ClientRequest, reply: ClientReply) -> None:
        await reply.send(200, [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")], self._metrics.page())

    async def _ready(self, request: ClientRequest, reply: ClientReply) -> None:
        missing = STOPPING if self._drain.draining else self._readiness.missing()
        store = self._directory.store
        value = {
            "ready": not missing,
            "reason": missing or None,
            "store": {"configured": store.configured, "up": store.up, "problem": store.problem or None},
            "workers": [self._describe(worker) for worker in self._directory.workers],
        }
        await send_json(reply, 503 if missing else 200, value, [("Retry-After", "1")] if missing else None)

    def _describe(self, worker: Worker) -> dict[str, Any]:
        now = self._clock()
        return {
            "id": worker.id,
            "url": worker.url,
            "role": worker.role,
            "moving_to": worker.record.moving_to,
            "pool": worker.pool,
            "models": worker.record.models,
            "source": worker.source,
            "lease_left_ms": worker.lease_left_ms(now) if worker.source is Source.STORE else None,
            "usable": worker.is_usable(now),
            "trouble": f"{worker.breaker.trouble}: {worker.breaker.cause}" if worker.is_broken else None,
            "load": {
                "inflight": worker.inflight,
                "running": worker.running,
                "waiting": worker.waiting,
                "kv_usage": worker.kv_usage,
            },
        }

    async def _models(self, request: ClientRequest, reply: ClientReply) -> None:
        """One worker of each pool is asked, since adapters come and go there; memory stands in for silent ones."""
        # Of the client's headers only its key: the answer is for the router, which reads no compressed ones.
        key = [pair for pair in request.headers if pair[0].lower() == "authorization"]
        answers = await asyncio.gather(*(self._models_of(pool, key) for pool in self._directory.pools))
        merged: dict[str, dict[str, Any]] = {}
        for answer in answers:
            for model in answer:
                if isinstance(name := model.get("id"), str):
                    merged.setdefault(name, model)
        await send_json(reply, 200, {"object": "list", "data": list(merged.values())})

    async def _models_of(self, pool: tuple[Worker, ...], headers: Headers) -> list[dict[str, Any]]:
        now = self._clock()
        asked = min(pool, key=lambda worker: (not worker.is_usable(now), not worker.role.decodes, worker.inflight))
        try:
            async with asyncio.timeout(MODELS_DEADLINE_S):
                answer = await self._upstream.open(
                    "GET",
                    asked.url,
                    "/v1/models",
                    to_worker(headers, worker_key=self._settings.worker_api_key, request_id=None),
                    None,
                    MODELS_DEADLINE_S,
                )
                try:
                    body = await answer.read(MAX_MODELS_ANSWER, MODELS_DEADLINE_S)
                finally:
                    answer.close()
            if answer.status == 200:
                return _models_answer.decode(body).data
        except (UpstreamError, TimeoutError, msgspec.DecodeError, RecursionError) as e:
            _log.debug("worker %s did not say its models: %s", asked.id, e)
        return [_model_card(worker, name) for worker in pool for name in worker.record.models]


def _model_card(worker: Worker, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(worker.record.epoch / 1000) or int(time.time()),
        "owned_by": "vllm",
        "root": worker.record.pool.model,
        "parent": None,
        "max_model_len": worker.record.max_model_len or None,
    }


async def _wrong_method(reply: ClientReply, path: str, right: str) -> None:
    await send_error(reply, 405, f"{path} takes {right} requests only.", [("Allow", right)])


async def _unauthorized(reply: ClientReply) -> None:
    await send_error(
        reply,
        401,
        "The API key is missing or wrong; send the router's key as 'Authorization: Bearer KEY'.",
        [("WWW-Authenticate", "Bearer")],
    )
