"""The HTTP API of mock workers: the part of vLLM's OpenAI server that routers and clients use, and their faults."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from vllm_pd.block_hash import Lora
from vllm_pd.errors import SettingsError
from vllm_pd.router.conversation import PromptUnknown
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.sim.mock_faults import Faults, faults_from_json
from vllm_pd.sim.mock_metrics import metrics_page
from vllm_pd.sim.mock_worker import ENGINE_VERSION, Generation, MockWorker

MAX_BODY = 256 * 1024 * 1024
_PEER_TIMEOUT = aiohttp.ClientTimeout(total=2.0)

Find = Callable[[web.Request], MockWorker]


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Options(msgspec.Struct):
    """What a request says beyond the prompt."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _TokenizeOptions(msgspec.Struct):
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


@dataclass(slots=True)
class _Answer:
    """A request that was read, and what its answer says of itself."""

    id: str
    chat: bool
    model: str
    ids: list[int]
    lora: Lora | None
    salt: str | None
    output: int
    finish_reason: str
    options: _Options
    created: int

    @property
    def transfer(self) -> dict[str, Any]:
        return self.options.kv_transfer_params or {}

    @property
    def wants_usage(self) -> bool:
        return bool((self.options.stream_options or {}).get("include_usage"))


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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
            fields, options = _fields(body), msgspec.json.decode(body, type=_TokenizeOptions)
            ids = _prompt_ids(worker, fields, chat=fields.messages is not msgspec.UNSET)
        except (_Refused, msgspec.DecodeError) as e:
            return _error(e.status if isinstance(e, _Refused) else 400, str(e))
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
            answer = _read(worker, body, chat, request.headers.get("X-Request-Id"))
        except _Refused as e:
            return _error(e.status, str(e))
        began = time.perf_counter()
        remote = bool(answer.transfer.get("do_remote_prefill")) and await self._peer(answer, "fetch")
        holds = bool(answer.transfer.get("do_remote_decode"))
        try:
            generation = worker.start(
                answer.ids, answer.output, lora=answer.lora, salt=answer.salt, remote=remote, hold=holds
            )
        except ValueError as e:
            return _error(400, str(e))
        if remote:
            generation.on_fetched = lambda: self._later(lambda: self._peer(answer, "release"))
        first: float | None = None
        try:
            await generation.more()
            first = time.perf_counter() - began
            if answer.options.stream:
                return await self._stream(request, worker, answer, generation, faults)
            while not generation.finished:
                await generation.more()
            return web.json_response(_whole(worker, answer, generation, faults))
        finally:
            worker.end(generation, first)

    async def _stream(
        self, request: web.Request, worker: MockWorker, answer: _Answer, generation: Generation, faults: Faults
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if answer.chat:
            await response.write(_event(_chunk(answer, {"role": "assistant", "content": ""}, None)))
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
            text = worker.tokenizer.answer_text(sent, end)
            sent = end
            reason = answer.finish_reason if sent == answer.output else None
            delta: Any = {"content": text} if answer.chat else text
            await response.write(_event(_chunk(answer, delta, reason)))
        if answer.wants_usage:
            usage = {**_chunk(answer, None, None), "choices": [], "usage": _usage(worker, answer, generation)}
            await response.write(_event(usage))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # KV from another worker.

    async def _peer(self, answer: _Answer, action: str) -> bool:
        """Ask the worker that prefilled; False when it does not have the blocks (any more), or does not answer."""
        transfer = answer.transfer
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
        known = asked["engine_id"] == worker.engine_id and worker.holds(asked["request_id"])
        return web.Response(status=200 if known else 404)

    async def _kv_release(self, request: web.Request) -> web.Response:
        worker, asked = self._find(request), await request.json()
        worker.release(asked["request_id"])
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


def _read(worker: MockWorker, body: bytes, chat: bool, request_id: str | None) -> _Answer:
    fields = _fields(body)
    try:
        options = msgspec.json.decode(body, type=_Options)
    except msgspec.DecodeError as e:
        raise _Refused(400, str(e)) from None
    config = worker.config
    model = fields.model or config.model
    lora = next((lora for lora in config.loras if lora.name == model), None)
    if lora is None and model != config.model:
        raise _Refused(404, f"The model `{model}` does not exist.")
    if (fields.n or 1) != 1:
        raise _Refused(400, "A mock worker gives one answer to a request (n=1).")
    ids = _prompt_ids(worker, fields, chat=chat)
    wanted = options.max_completion_tokens or options.max_tokens
    room = min(config.max_model_len, config.engine.gpu_blocks * config.engine.block_size) - len(ids)
    if room < max(1, wanted or 1):
        raise _Refused(
            400,
            f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
            f"{wanted or 1} output tokens and your prompt contains {len(ids)} input tokens.",
        )
    limit = wanted or room
    output = limit if options.ignore_eos else min(limit, max(config.output_tokens, options.min_tokens))
    prefix = "chatcmpl" if chat else "cmpl"
    return _Answer(
        id=f"{prefix}-{request_id or uuid.uuid4().hex}",
        chat=chat,
        model=model,
        ids=ids,
        lora=lora,
        salt=fields.cache_salt,
        output=output,
        finish_reason="length" if output == limit else "stop",
        options=options,
        created=int(time.time()),
    )


def _fields(body: bytes) -> RequestFields:
    fields = read_fields(body)
    if fields is None:
        raise _Refused(400, "The body must be a JSON object with fields of the right types.")
    return fields


def _prompt_ids(worker: MockWorker, fields: RequestFields, *, chat: bool) -> list[int]:
    tokenizer = worker.tokenizer.prompts
    if chat:
        if fields.messages is msgspec.UNSET:
            raise _Refused(400, "messages is required")
        try:
            return tokenizer.encode(tokenizer.render(fields), add_special_tokens=bool(fields.add_special_tokens))
        except PromptUnknown as e:
            raise _Refused(400, f"A mock worker cannot render this chat: {e.reason}.") from None
    if fields.prompt is msgspec.UNSET:
        raise _Refused(400, "prompt is required")
    prompt = json.loads(bytes(fields.prompt))
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=fields.add_special_tokens is not False)
    if not prompt or not isinstance(prompt, list) or not all(isinstance(i, int) and i >= 0 for i in prompt):
        raise _Refused(400, "A mock worker takes one prompt a request: a text, or a list of token ids.")
    return prompt


def _due_faults(worker: MockWorker) -> Faults:
    """The faults for one request; counts it."""
    faults = worker.faults
    if faults.times == 1:
        worker.faults = faults.without_request_faults()
    elif faults.times > 1:
        worker.faults = msgspec.structs.replace(faults, times=faults.times - 1)
    return faults


def _whole(worker: MockWorker, answer: _Answer, generation: Generation, faults: Faults) -> dict[str, Any]:
    text = worker.tokenizer.answer_text(0, answer.output)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": answer.finish_reason, "stop_reason": None}
    if answer.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    value: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion" if answer.chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
        "usage": _usage(worker, answer, generation),
        "kv_transfer_params": None,
    }
    if answer.transfer.get("do_remote_decode"):
        value["kv_transfer_params"] = _spoil(worker, answer, worker.hold(answer.id, generation), faults)
        if faults.wrong_prefill == "missing":
            del value["kv_transfer_params"]
    return value


def _spoil(worker: MockWorker, answer: _Answer, params: Mapping[str, Any], faults: Faults) -> dict[str, Any] | None:
    """Transfer parameters as the faults want them."""
    if faults.wrong_prefill is None:
        return dict(params)
    worker.release(answer.id)
    if faults.wrong_prefill == "garbage":
        return {"do_remote_prefill": True, "remote_block_ids": "none", "remote_port": -1}
    return dict(params) if faults.wrong_prefill == "gone" else None


def _usage(worker: MockWorker, answer: _Answer, generation: Generation) -> dict[str, Any]:
    assert generation.work is not None
    return {
        "prompt_tokens": len(answer.ids),
        "completion_tokens": generation.generated,
        "total_tokens": len(answer.ids) + generation.generated,
        "prompt_tokens_details": {"cached_tokens": generation.work.cached},
    }


def _chunk(answer: _Answer, content: Any, finish_reason: str | None) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "chat.completion.chunk" if answer.chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [
            {
                "index": 0,
                "delta" if answer.chat else "text": content,
                "logprobs": None,
                "finish_reason": finish_reason,
            }
        ],
    }


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    error = {"message": message, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def _faults_reply(worker: MockWorker) -> web.Response:
    return web.Response(body=msgspec.json.encode(worker.faults), content_type="application/json")
