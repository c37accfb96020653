"""The HTTP API of mock workers: the part of vLLM's OpenAI server that routers and clients use, and their faults."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from vllm_pd.background import end_tasks
from vllm_pd.errors import SettingsError
from vllm_pd.given_up import GivenUp, given_up
from vllm_pd.holds import released_keys
from vllm_pd.sim.mock_answer import chunk, event, usage_of, whole_answer
from vllm_pd.sim.mock_faults import Faults, faults_from_json
from vllm_pd.sim.mock_metrics import metrics_page
from vllm_pd.sim.mock_request import (
    MockRequest,
    Refused,
    TokenizeOptions,
    decode_fields,
    prompt_ids,
    read_request,
)
from vllm_pd.sim.mock_worker import ENGINE_VERSION, Generation, MockWorker

MAX_BODY = 256 * 1024 * 1024
_PEER_TIMEOUT = aiohttp.ClientTimeout(total=2.0)

Find = Callable[[web.Request], MockWorker]


class MockApi:
    """Answers for any number of workers; `find` tells for which one a request is.

    Args:
        find: the worker of a request.
        fail: cuts a worker's connections and closes its port as its faults say; called when they have changed.
    """

    def __init__(self, find: Find, fail: Callable[[MockWorker], Awaitable[None]]) -> None:
        self._find = find
        self._fail = fail
        self._peers: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_get("/mock/state", self._state)
        app.router.add_get("/mock/faults", self._show_faults)
        app.router.add_post("/mock/faults", self._set_faults)
        app.router.add_delete("/mock/faults", self._clear_faults)
        app.router.add_post("/mock/kv/fetch", self._kv_fetch)
        app.router.add_post("/mock/kv/release", self._kv_release)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        await end_tasks(self._tasks)
        if self._peers is not None:
            await self._peers.close()

    # What is asked of every vLLM server.

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._find(request).faults.unhealthy else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": ENGINE_VERSION})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics_page(self._find(request)))

    async def _models(self, request: web.Request) -> web.Response:
        config = self._find(request).config

        def entry(name: str, parent: str | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm-pd",
                "root": name,
                "parent": parent,
                "max_model_len": config.max_model_len,
            }

        data = [entry(config.model, None), *(entry(lora.name, config.model) for lora in config.loras)]
        return web.json_response({"object": "list", "data": data})

    async def _reset(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._find(request).live.reset_cache() else 409)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        worker = self._find(request)
        try:
            body = await request.read()
            fields, options = decode_fields(body), msgspec.json.decode(body, type=TokenizeOptions)
            ids = prompt_ids(worker, fields, chat=fields.messages is not msgspec.UNSET)
        except (Refused, msgspec.DecodeError) as e:
            return _error(e.status if isinstance(e, Refused) else 400, str(e))
        texts = [worker.tokenizer.decode([i]) for i in ids] if options.return_token_strs else None
        return web.json_response(
            {"count": len(ids), "max_model_len": worker.config.max_model_len, "tokens": ids, "token_strs": texts}
        )

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        try:
            ids = [int(token) for token in json.loads(await request.read())["tokens"]]
            text = self._find(request).tokenizer.decode(ids)
        except (ValueError, KeyError, TypeError, OverflowError):
            return _error(400, "tokens must be a list of token ids")
        return web.json_response({"prompt": text})

    # Completions.

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=True)

    async def _serve(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        worker = self._find(request)
        body = await request.read()
        faults = _due_faults(worker)
        if faults.delay:
            await asyncio.sleep(faults.delay)
        if faults.hang:
            await asyncio.Event().wait()
        if faults.status is not None:
            retry = {"Retry-After": "1"} if faults.status in (429, 503) else {}
            return _error(faults.status, "a fault of the mock worker", retry)
        try:
            answer = read_request(worker, body, chat, request.headers.get("X-Request-Id"))
        except Refused as e:
            return _error(e.status, str(e))
        worker.holds.let_go(released_keys(answer.transfer))
        if told := given_up(answer.transfer):
            self._give_up(worker, told)
        if not answer.transfer.get("do_remote_prefill"):
            return await self._generate(request, worker, answer, faults, remote=False)
        transfer, name = answer.transfer, uuid.uuid4().hex
        blocks = str(transfer.get("remote_engine_id")), str(transfer.get("remote_request_id"))
        if worker.arrivals.arrived(name, blocks, time.monotonic()):
            return await self._generate(request, worker, answer, faults, remote=False)
        reads = False
        try:
            remote = await self._peer(transfer, "fetch")
            reads = True
            return await self._generate(request, worker, answer, faults, remote=remote)
        finally:
            worker.arrivals.ended(name, time.monotonic())
            if not reads:
                self._later(lambda: self._peer(transfer, "release"))

    async def _generate(
        self, request: web.Request, worker: MockWorker, answer: MockRequest, faults: Faults, *, remote: bool
    ) -> web.StreamResponse:
        """`remote`: another worker has computed the prompt and keeps its blocks."""
        began = time.perf_counter()
        holds = bool(answer.transfer.get("do_remote_decode"))
        try:
            generation = worker.start(
                answer.ids,
                answer.output,
                lora=answer.lora,
                salt=answer.salt,
                remote=remote,
                hold=holds,
                priority=answer.options.priority,
                told=answer.told,
            )
        except ValueError as e:
            return _error(400, str(e))
        if remote:
            generation.on_fetched = lambda: self._later(lambda: self._peer(answer.transfer, "release"))
        first: float | None = None
        try:
            await generation.more()
            first = time.perf_counter() - began
            if answer.options.stream:
                return await self._stream(request, worker, answer, generation, faults)
            while not generation.finished:
                await generation.more()
            return web.json_response(whole_answer(worker, answer, generation, faults))
        finally:
            worker.end(generation, first)
            if remote and first is None:
                # As NIXL does when a request is aborted that was to read.
                self._later(lambda: self._peer(answer.transfer, "release"))

    async def _stream(
        self, request: web.Request, worker: MockWorker, answer: MockRequest, generation: Generation, faults: Faults
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        asks_ids = bool(answer.options.return_token_ids)
        if answer.chat:
            head = chunk(answer, {"role": "assistant", "content": ""}, None)
            if asks_ids:
                head["prompt_token_ids"] = answer.ids
            await response.write(event(head))
        sent = 0
        limits = [limit for limit in (faults.stall_after, faults.cut_after) if limit is not None]
        while sent < answer.output:
            if limits and sent >= min(limits):
                if faults.cut_after is not None and sent >= faults.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await asyncio.Event().wait()
            while generation.generated <= sent:
                await generation.more()
            end = min([generation.generated, *limits])
            text = worker.tokenizer.answer_text(answer.told + sent, answer.told + end)
            ids = worker.tokenizer.answer(end - sent, answer.told + sent) if asks_ids else None
            reason = answer.finish_reason if end == answer.output else None
            delta: Any = {"content": text} if answer.chat else text
            made = chunk(answer, delta, reason, ids)
            if asks_ids and not answer.chat:
                made["choices"][0]["prompt_token_ids"] = answer.ids if sent == 0 else None
            sent = end
            await response.write(event(made))
        if answer.wants_usage:
            usage = {**chunk(answer, None, None), "choices": [], "usage": usage_of(answer, generation)}
            await response.write(event(usage))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # KV from another worker.

    def _give_up(self, worker: MockWorker, told: GivenUp) -> None:
        """As the real connector: of what has not come, the worker that prefilled is told."""
        if not told.is_for(worker.engine_id):
            return
        now, wall = time.monotonic(), time.time()
        for handoff in told.handoffs:
            until = now + handoff.pd_lease_until_ms / 1000 - wall
            blocks = handoff.remote_engine_id, handoff.remote_request_id
            if until > now and worker.arrivals.give_up(blocks, until, now):
                transfer = msgspec.structs.asdict(handoff)
                self._later(lambda transfer=transfer: self._peer(transfer, "release"))  # type: ignore[misc]

    async def _peer(self, transfer: Mapping[str, Any], action: str) -> bool:
        """Ask the worker that prefilled; False when it does not have the blocks (any more), or does not answer."""
        try:
            host, port, request_id = (
                str(transfer["remote_host"]),
                int(transfer["remote_port"]),
                transfer["remote_request_id"],
            )
        except (KeyError, TypeError, ValueError):
            return False
        if self._peers is None:
            self._peers = aiohttp.ClientSession(timeout=_PEER_TIMEOUT)
        try:
            async with self._peers.post(
                f"http://{host}:{port}/mock/kv/{action}",
                json={"engine_id": transfer.get("remote_engine_id"), "request_id": request_id},
            ) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    def _later(self, work: Callable[[], Awaitable[object]], delay: float = 0.0) -> None:
        async def run() -> None:
            await asyncio.sleep(delay)
            await work()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _kv_fetch(self, request: web.Request) -> web.Response:
        worker, asked = self._find(request), await request.json()
        known = asked["engine_id"] == worker.engine_id and asked["request_id"] in worker.holds
        return web.Response(status=200 if known else 404)

    async def _kv_release(self, request: web.Request) -> web.Response:
        worker, asked = self._find(request), await request.json()
        worker.holds.release(asked["request_id"])
        return web.Response()

    # Administration.

    async def _state(self, request: web.Request) -> web.Response:
        worker = self._find(request)
        engine = worker.live.engine
        endpoints = worker.event_endpoints
        return web.json_response(
            {
                "role": worker.role,
                "running": engine.running,
                "waiting": engine.waiting,
                "kv_usage": engine.kv_usage,
                "kv_events": None if endpoints is None else {"live": endpoints.live, "replay": endpoints.replay},
                "counters": msgspec.to_builtins(worker.counters),
            }
        )

    async def _show_faults(self, request: web.Request) -> web.Response:
        return _faults_reply(self._find(request))

    async def _set_faults(self, request: web.Request) -> web.StreamResponse:
        worker = self._find(request)
        try:
            worker.faults = faults_from_json(await request.read())
        except SettingsError as e:
            return _error(400, str(e))
        reply = _faults_reply(worker)
        if worker.faults.die or worker.faults.refuse:
            # After the answer: this connection may be among those that are cut.
            self._later(lambda: self._fail(worker), delay=0.05)
        return reply

    async def _clear_faults(self, request: web.Request) -> web.Response:
        worker = self._find(request)
        worker.faults = Faults()
        return _faults_reply(worker)


def _due_faults(worker: MockWorker) -> Faults:
    """The faults for one request; counts it."""
    faults = worker.faults
    if faults.times == 1:
        worker.faults = faults.without_request_faults()
    elif faults.times > 1:
        worker.faults = msgspec.structs.replace(faults, times=faults.times - 1)
    return faults


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    error = {"message": message, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def _faults_reply(worker: MockWorker) -> web.Response:
    return web.Response(body=msgspec.json.encode(worker.faults), content_type="application/json")
