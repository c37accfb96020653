"""Workers named by `--worker URL=role`: asked over HTTP who they are, as no store tells."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from vllm_pd.router.directory import Directory
from vllm_pd.router.headers import to_worker
from vllm_pd.router.repeat import repeat
from vllm_pd.router.transport import FirstByteTimeout, Upstream, UpstreamError
from vllm_pd.router.worker import Source
from vllm_pd.state.base import Epoch, PoolSpec, Role, WorkerId, WorkerRecord, WorkerState

DEADLINE_S = 2.0
DEFAULT_BLOCK_SIZE = 16
"""vLLM's default, taken when a worker does not publish its own."""

MAX_LATE = 3
"""Rounds in a row in which a known worker may be too busy to answer. One that refuses is gone at once."""

_MAX_ANSWER = 16 * 1024 * 1024
_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """One `--worker URL=role`."""

    url: str
    role: Role

    @property
    def id(self) -> WorkerId:
        return WorkerId(urlsplit(self.url).netloc)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""


class ProbeFailed(Exception):
    """The worker did not say what it must; the text says which question failed."""


def block_size_in(metrics: str) -> int | None:
    """The KV block size in a vLLM metrics page, or None."""
    found = _CACHE_INFO.search(metrics)
    labels = dict(_LABEL.findall(found[1])) if found else {}
    size = labels.get("block_size", "")
    return int(size) if size.isdigit() and int(size) > 0 else None


class StaticProbe:
    """One background task that asks every static worker for its health and its models at an interval."""

    def __init__(
        self,
        workers: Sequence[StaticWorker],
        upstream: Upstream,
        directory: Directory,
        *,
        worker_key: str = "",
        interval: float,
    ) -> None:
        self._workers = workers
        self._upstream = upstream
        self._directory = directory
        self._headers = to_worker([], worker_key=worker_key, request_id=None)
        self._interval = interval
        self._constants: dict[WorkerId, tuple[int, str]] = {}
        self._problems: dict[WorkerId, str] = {}
        self._last: dict[WorkerId, WorkerState] = {}
        self._late: dict[WorkerId, int] = {}

    async def run(self) -> None:
        """Until cancelled."""
        await repeat(self.refresh, self._interval)

    async def refresh(self) -> None:
        """Ask all of them once, side by side. Never raises for a worker that fails."""
        states = await asyncio.gather(*(self._probe(worker) for worker in self._workers))
        self._directory.replace(Source.STATIC, [state for state in states if state is not None])

    async def _probe(self, worker: StaticWorker) -> WorkerState | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._get(worker, "/health")
                models = msgspec.json.decode(await self._get(worker, "/v1/models"), type=_Models).data
                if not models:
                    raise ProbeFailed("/v1/models names no model")
                block_size, version = await self._constants_of(worker)
        except (FirstByteTimeout, TimeoutError):
            return self._excuse(worker)
        except (ProbeFailed, UpstreamError, msgspec.DecodeError) as e:
            self._forget(worker, str(e))
            return None
        self._problems.pop(worker.id, None)
        pool = PoolSpec(models[0].id, "", "", "", "", block_size, "", version)
        record = WorkerRecord(
            id=worker.id,
            epoch=Epoch(0),
            pool=pool,
            url=worker.url,
            role=worker.role,
            models=tuple(model.id for model in models),
            # Nobody says whether it can hand KV over; whoever gives it a role claims that it can.
            nixl_host=urlsplit(worker.url).hostname or "",
            max_model_len=models[0].max_model_len or 0,
        )
        self._late.pop(worker.id, None)
        self._last[worker.id] = WorkerState(record, lease_left_ms=int((self._interval + DEADLINE_S) * 1000))
        return self._last[worker.id]

    def _excuse(self, worker: StaticWorker) -> WorkerState | None:
        """The last state of a worker that is late, for a few rounds."""
        late = self._late[worker.id] = self._late.get(worker.id, 0) + 1
        if late <= MAX_LATE and worker.id in self._last:
            return self._last[worker.id]
        self._forget(worker, f"no answer within {DEADLINE_S:g} s")
        return None

    def _forget(self, worker: StaticWorker, problem: str) -> None:
        self._constants.pop(worker.id, None)
        self._last.pop(worker.id, None)
        if self._problems.get(worker.id) != problem:
            self._problems[worker.id] = problem
            _log.warning("static worker %s is not usable: %s", worker.id, problem)

    async def _constants_of(self, worker: StaticWorker) -> tuple[int, str]:
        """Block size and vLLM version. Asked once per life of the worker: a metrics page is long."""
        if worker.id not in self._constants:
            try:
                metrics = (await self._get(worker, "/metrics")).decode("utf-8", "replace")
            except ProbeFailed:
                metrics = ""
            try:
                version = msgspec.json.decode(await self._get(worker, "/version"), type=_Version).version
            except (ProbeFailed, msgspec.DecodeError):
                version = ""
            self._constants[worker.id] = (block_size_in(metrics) or DEFAULT_BLOCK_SIZE, version)
        return self._constants[worker.id]

    async def _get(self, worker: StaticWorker, path: str) -> bytes:
        answer = await self._upstream.open("GET", worker.url, path, self._headers, None, DEADLINE_S)
        try:
            body = await answer.read(_MAX_ANSWER, DEADLINE_S)
            if answer.status == 401:
                raise ProbeFailed(f"{path} asks for an API key; set VLLM_PD_WORKER_API_KEY")
            if answer.status != 200:
                raise ProbeFailed(f"{path} answered with status {answer.status}")
            return body
        finally:
            answer.close()
