"""Does this router see prompts as the engines do? Two proofs for every pool, and what happens when one fails.

Tokens: a few prompts go to `/tokenize` of each worker; the blocks of its tokens must be those the router computes from
the text. Events: blocks of requests that were sent must be announced (`announcements`). A pool that fails is routed by
load until one of its workers starts anew: hits that are never found would be worse, as nobody would notice. Events
that come too late can fail the second proof too, so it is tried again after some minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Any, Protocol

import msgspec

from vllm_pd.block_hash import SUPPORTED_ALGORITHM, BlockKey
from vllm_pd.router.announcements import Announcements
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.headers import to_worker
from vllm_pd.router.prompt_blocks import PromptBlocks
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.router.transport import Upstream, UpstreamError
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import Epoch, PoolId, WorkerId

DEADLINE_S = 5.0
RETRY_S = 10.0
RECHECK_S = 600.0
"""Until a pool that failed by its events gets another chance."""
MAX_ANSWER = 4 * 1024 * 1024
_TEXT = (
    "Grüße aus Zürich, 東京 and Αθήνα; наука не стоит на месте, مرحبا بالعالم. "
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 says: price = 3.50 € (not $4,00)!\n"
    "\tdef f(x):  return x ** 2  # indented\r\n\u00a0e\u0301 is not é, and 0123456789 is one number. "
)
_NAMES = {PromptKind.CHAT: "a chat", PromptKind.COMPLETION: "a text"}

_log = logging.getLogger(__name__)


_Start = tuple[Epoch, str]
"""Epoch and tokenizer of a worker."""


class Hasher(Protocol):
    """From a request to its blocks; `prompt_blocks.PromptHasher`."""

    def blocks(self, fields: RequestFields, kind: PromptKind) -> PromptBlocks: ...


class _Tokens(msgspec.Struct):
    tokens: list[int]


def samples(block_size: int) -> list[tuple[PromptKind, dict[str, Any]]]:
    """Prompts of more than two blocks: several scripts, emoji, code, an empty message, messages of each role."""
    # Such a text has at least one token for eight characters.
    text = _TEXT * (1 + 16 * block_size // len(_TEXT))
    roles = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "Ja 👍."},
        {"role": "user", "content": ""},
    ]
    return [
        (PromptKind.COMPLETION, {"prompt": text}),
        (PromptKind.CHAT, {"messages": [{"role": "user", "content": f" {text}\n"}]}),
        (PromptKind.CHAT, {"messages": [{"role": "system", "content": "Sois bref."}, *roles]}),
    ]


@dataclass(slots=True)
class _Pool:
    problem: str = ""
    workers: dict[WorkerId, _Start] = field(default_factory=dict)
    """Those whose tokens were compared."""
    starts: Mapping[WorkerId, _Start] = field(default_factory=dict)
    """The pool's workers when it was looked at last."""
    told: bool = False
    """Whether the problem was logged."""
    retry_at: dict[WorkerId, float] = field(default_factory=dict)
    """When to ask those again that did not answer."""
    recheck_at: float = inf


class SelfCheck:
    """Proofs of all pools. Belongs to one event loop.

    Args:
        hasher: what hashes prompts for this worker; None while its tokenizer is not there.
        announcements: the proof by events.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        worker_key: str,
        hasher: Callable[[Worker], Hasher | None],
        announcements: Announcements,
        clock: Callable[[], float],
    ) -> None:
        self._upstream = upstream
        self._headers = to_worker([("Content-Type", "application/json")], worker_key=worker_key, request_id=None)
        self._hasher = hasher
        self._announcements = announcements
        self._clock = clock
        self._pools: dict[PoolId, _Pool] = {}

    def problem(self, pool: PoolId) -> str:
        """Why prompts of this pool are not looked up, in one sentence; "" when they are."""
        found = self._pools.get(pool)
        return found.problem if found is not None else ""

    def problems(self) -> dict[PoolId, str]:
        """Every pool that was looked at, with its problem or ""."""
        return {pool: state.problem for pool, state in self._pools.items()}

    async def refresh(self, pools: Sequence[tuple[Worker, ...]]) -> None:
        """Compare what has not been compared, and look at what should have been announced by now."""
        current = {workers[0].pool: workers for workers in pools}
        for pool in self._pools.keys() - current.keys():
            self._forget(self._pools.pop(pool).starts)
        for pool, workers in current.items():
            state = self._pools.setdefault(pool, _Pool())
            starts = {worker.id: (worker.record.epoch, worker.record.tokenizer) for worker in workers}
            if self._clock() >= state.recheck_at:
                _log.warning("the prompts of pool %s are checked again", pool)
                self._forget(state.starts)
                self._pools[pool] = state = _Pool()
            if starts != state.starts:
                self._forget(name for name, start in state.starts.items() if starts.get(name) != start)
                if state.problem:
                    _log.warning("workers of pool %s have changed; its prompts are checked again", pool)
                    self._pools[pool] = state = _Pool()
                state.starts = starts
                state.workers = {name: start for name, start in state.workers.items() if name in starts}
                state.retry_at = {name: at for name, at in state.retry_at.items() if name in starts}
            if not state.problem:
                state.problem = _algorithm(workers[0])
            if not state.problem and (problem := self._announcements.problem(workers)):
                state.problem, state.recheck_at = problem, self._clock() + RECHECK_S
            if not state.problem:
                await self._compare(state, workers)
            if state.problem and not state.told:
                state.told = True
                _log.error("pool %s is routed by load alone: %s", pool, state.problem)

    def _forget(self, workers: Iterable[WorkerId]) -> None:
        """These are gone, or are other processes now."""
        for worker in workers:
            self._announcements.forget(worker)

    async def _compare(self, state: _Pool, workers: Sequence[Worker]) -> None:
        for worker in workers:
            key = (worker.record.epoch, worker.record.tokenizer)
            if state.workers.get(worker.id) == key or self._clock() < state.retry_at.get(worker.id, 0.0):
                continue
            hasher = self._hasher(worker)
            if hasher is None:
                return
            try:
                async with asyncio.timeout(DEADLINE_S):
                    state.problem = await self._compare_with(worker, hasher)
            except (UpstreamError, TimeoutError, msgspec.DecodeError) as e:
                level = logging.DEBUG if worker.id in state.retry_at else logging.WARNING
                _log.log(
                    level, "worker %s did not say how it tokenizes, it is asked again later: %s", worker.id, e or "late"
                )
                state.retry_at[worker.id] = self._clock() + RETRY_S
                return
            if state.problem:
                return
            state.workers[worker.id] = key
            _log.info("worker %s tokenizes as this router does", worker.id)

    async def _compare_with(self, worker: Worker, hasher: Hasher) -> str:
        """The first difference as a sentence, or ""."""
        record = worker.record
        for kind, prompt in samples(record.pool.block_size):
            fields = _fields(prompt)
            own = await asyncio.to_thread(hasher.blocks, fields, kind)
            if own.why_unknown:
                # Nothing is claimed for such prompts, so nothing can be wrong.
                continue
            body = msgspec.json.encode({"model": record.models[0], **prompt})
            answer = await self._upstream.open("POST", worker.url, "/tokenize", self._headers, body, DEADLINE_S)
            try:
                content = await answer.read(MAX_ANSWER, DEADLINE_S)
            finally:
                answer.close()
            if answer.status in (400, 422):
                # The worker refuses such prompts (no chat template, say), so none will come.
                continue
            if answer.status != 200:
                raise UpstreamError(f"/tokenize answered with status {answer.status}")
            tokens = msgspec.json.decode(content, type=_Tokens).tokens
            theirs = hasher.blocks(_fields({"prompt": tokens}), PromptKind.COMPLETION)
            if own.tokens != len(tokens):
                difference = f"{own.tokens} tokens here and {len(tokens)} there"
            elif list(own.keys) != list(theirs.keys):
                same = _equal_blocks(own.keys, theirs.keys) * record.pool.block_size
                difference = f"other tokens after the first {same}"
            else:
                continue
            return (
                f"{_NAMES[kind]} has {difference} on worker {worker.id}; give this router the model's own files with "
                "--tokenizer, or start the worker without a tokenizer or chat template of its own."
            )
        return ""


def _algorithm(worker: Worker) -> str:
    """What is wrong with the pool's hash algorithm, or ""."""
    algorithm = worker.record.pool.hash_algo
    if algorithm == SUPPORTED_ALGORITHM:
        return ""
    return (
        f"its workers hash blocks by {algorithm or 'an unknown algorithm'!r}; start them with "
        f"--prefix-caching-hash-algo {SUPPORTED_ALGORITHM}."
    )


def _fields(body: dict[str, Any]) -> RequestFields:
    fields = read_fields(msgspec.json.encode(body))
    assert fields is not None
    return fields


def _equal_blocks(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """How many leading blocks are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
