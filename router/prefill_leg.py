"""The prefill leg of a split request: one worker computes the prompt and keeps its blocks for another to read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec

from vllm_pd.router.attempt import Placed
from vllm_pd.router.call import Call
from vllm_pd.router.decode_leg import computed
from vllm_pd.router.directory import Directory
from vllm_pd.router.leg_request import leg_headers, with_turn
from vllm_pd.router.legs import prefill_body, transfer_params
from vllm_pd.router.metrics import status_name
from vllm_pd.router.placement import Placer
from vllm_pd.router.settings import RouterSettings
from vllm_pd.router.transport import ConnectFailed, FirstByteTimeout, Upstream, UpstreamError, UpstreamResponse
from vllm_pd.state.base import PoolId, WorkerId

MAX_PREFILL_ANSWER = 64 * 1024 * 1024
"""Bytes. Transfer parameters list every block of the prompt, so long prompts have long answers."""
CONNECT = "connect"
"""The failure after which another worker may be tried at once: the first saw nothing of the request."""


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """How a prefill leg ended."""

    failure: str = ""
    """Why it failed, as a metric's label; empty on success."""
    params: bytes | None = None
    """Transfer parameters as raw JSON: what the decode worker reads the blocks by."""
    worker: WorkerId | None = None
    """Who computed it."""
    pool: PoolId | None = None
    """Whose workers may read the blocks."""


class PrefillDispatch(Protocol):
    """A way in which prefill work gets to a worker."""

    async def run(self, call: Call, placed: Placed) -> PrefillOutcome:
        """Have the prompt computed, on the placed worker or, where the way allows, on another. Ends in bounded time.
        Cancelling it cancels the work."""


class DirectPrefill:
    """The router sends the work to the placed worker itself."""

    def __init__(self, settings: RouterSettings, directory: Directory, upstream: Upstream, placer: Placer) -> None:
        self._settings = settings
        self._directory = directory
        self._upstream = upstream
        self._placer = placer

    async def run(self, call: Call, placed: Placed) -> PrefillOutcome:
        worker = placed.worker
        try:
            body = prefill_body(call.body)
        except msgspec.MsgspecError:
            return PrefillOutcome("unreadable_body")
        headers = leg_headers(self._settings, call, placed, f"{call.id}-prefill")
        headers = [pair for pair in headers if pair[0].lower() != "accept-encoding"]
        deadline = self._settings.prefill_timeout
        answer: UpstreamResponse | None = None
        attempt = self._placer.begin(placed)
        try:
            body, headers = with_turn(body, headers, attempt, call)
            async with asyncio.timeout(deadline):
                answer = await self._upstream.open("POST", worker.url, call.request.target, headers, body, deadline)
                worker.note_success()
                content = await answer.read(MAX_PREFILL_ANSWER, deadline)
            if answer.status == HTTPStatus.OK:
                attempt.first_byte()
        except ConnectFailed as e:
            self._directory.note_failure(worker, str(e))
            return PrefillOutcome(CONNECT)
        except (FirstByteTimeout, TimeoutError):
            return PrefillOutcome("timeout")
        except UpstreamError:
            return PrefillOutcome("disconnect")
        finally:
            attempt.end()
            if answer is not None:
                answer.close()
        if answer.status != 200:
            return PrefillOutcome(status_name(answer.status))
        computed(self._placer, attempt, call)
        params = transfer_params(content)
        if params is None:
            return PrefillOutcome("no_params")
        return PrefillOutcome(params=params, worker=worker.id, pool=worker.pool)
