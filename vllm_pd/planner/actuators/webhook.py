"""An actuator that posts JSON to a URL of the operator's.

    POST URL  {"action": "add", "role": "decode", "count": 2, "pool": "...", "term": 5, "why": "..."}
    POST URL  {"action": "remove", "worker": "10.0.0.7:8000", "epoch": 17640, "pool": "...", "term": 5, "why": "..."}
    POST URL  {"action": "give_up", "role": "decode", "count": 2, "pool": "...", "term": 5, "why": "..."}
    POST URL  {"action": "starting", "pool": "..."}    answered with [{"role": "decode", "count": 2, "for_s": 12.5}]

It answers at once and does not wait for a worker. 2xx: it is begun. 4xx: it is refused, nothing was changed, and the
body says why; of `starting` 404, 405 and 501 say that it does not know. Everything else: what came of it is unknown.
Each request has an `Idempotency-Key` of its own, and is sent once.

`term`, also in the header `Vllm-Pd-Planner-Term`, is the number of the planner's leadership of the pool. It only grows:
a server that keeps the largest one it has seen of each pool can refuse (409) what a planner that was replaced meanwhile
still asks for.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from vllm_pd.errors import ActuatorError, SettingsError
from vllm_pd.layered import redact
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.known_start import another_start
from vllm_pd.planner.actuators.wire import as_json, read_starts
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.planner.model import Action, AddAction, GiveUp, MoveAction, RemoveAction, StartView
from vllm_pd.state.base import PoolId, Registry, Role

TERM_HEADER = "Vllm-Pd-Planner-Term"
_MOST_SAID = 300
_MOST_BODY = 1 << 20
_DOES_NOT_KNOW = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)


class WebhookActuator:
    """Adds and removes workers by asking an HTTP server. Belongs to one event loop.

    Args:
        url: where to post.
        registry: where the workers of the pool are found. Stays open.
        token: sent as a bearer token, if given.
        deadline_s: of one request, seconds.
        mandate: in whose name it acts.

    Raises:
        SettingsError: `url` is no HTTP URL.
    """

    name = "webhook"

    def __init__(
        self,
        url: str,
        registry: Registry,
        *,
        token: str = "",
        deadline_s: float = 30.0,
        mandate: Mandate = ANYBODY,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"The actuator webhook must be http://... or https://..., got {redact(url)!r}.")
        self._url = url
        self._shown = _origin(url)
        self._registry = registry
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._deadline_s = deadline_s
        self._mandate = mandate
        self._session: aiohttp.ClientSession | None = None

    def can(self, action: Action) -> bool:
        return isinstance(action, AddAction | RemoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        if isinstance(action, MoveAction):
            return Outcome(False, "A webhook adds and removes workers; roles are moved by the actuator roles.")
        if isinstance(action, RemoveAction) and (refused := await another_start(self._registry, pool, action)):
            return refused
        return await self._do(pool, as_json(action))

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        status, body = await self._post({"action": "starting", "pool": pool})
        if status in _DOES_NOT_KNOW:
            return ()
        if not 200 <= status < 300:
            raise ActuatorError(f"{self._shown} answered starting with status {status}: {_said(body)}.")
        try:
            return read_starts(body)
        except ValueError as e:
            raise ActuatorError(f"{self._shown} answered starting with something else than it should: {e}.") from None

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        return await self._do(pool, as_json(GiveUp(role, count, "They did not come up in time.")))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _do(self, pool: PoolId, asked: Mapping[str, Any]) -> Outcome:
        term = await self._mandate.confirm(pool)
        status, body = await self._post({**asked, "pool": pool, "term": term}, {TERM_HEADER: str(term)})
        if 200 <= status < 300:
            return Outcome(True)
        if 400 <= status < 500:
            return Outcome(False, f"{self._shown} refused to {asked['action']} with status {status}: {_said(body)}.")
        raise ActuatorError(f"{self._shown} answered {asked['action']} with status {status}: {_said(body)}.")

    async def _post(self, asked: Mapping[str, Any], more_headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._deadline_s))
        own = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(16)}
        headers = {**self._headers, **own, **(more_headers or {})}
        try:
            async with self._session.post(
                self._url, data=msgspec.json.encode(asked), headers=headers, allow_redirects=False
            ) as answer:
                return answer.status, await _body(answer.content)
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            why = "it took too long" if isinstance(e, TimeoutError) else str(e) or type(e).__name__
            raise ActuatorError(f"{self._shown} gave no answer to {asked['action']}: {why}.") from None


def _origin(url: str) -> str:
    """Scheme, host and port: in the rest there may be secrets. Raises SettingsError when it has none."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise SettingsError("The actuator webhook must be http://HOST:PORT/... or https://HOST/..., and names no host.")
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + (f":{port}" if port is not None else "")


async def _body(content: aiohttp.StreamReader) -> bytes:
    """All of it, unless it is much longer than an answer is."""
    kept = bytearray()
    async for chunk in content.iter_any():
        kept += chunk
        if len(kept) > _MOST_BODY:
            break
    return bytes(kept)


def _said(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text[:_MOST_SAID].rstrip(".") or "it said nothing"


def open_actuator(argument: str, context: ActuatorContext) -> WebhookActuator:
    """`argument` is the URL. Raises SettingsError as `WebhookActuator`."""
    return WebhookActuator(
        argument,
        context.registry,
        token=context.webhook_token,
        deadline_s=context.deadline_s,
        mandate=context.mandate,
    )
