"""From a request to the blocks of its prompt, for each pool that may serve it, without holding up other requests.

A prompt that takes long is hashed in a thread; one that is not done in time, or not known to be hashed as its engines
do it, is placed without any claim about caches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from vllm_pd.block_hash import Lora
from vllm_pd.router.decision import PromptKind, surely_short
from vllm_pd.router.demand import Demand
from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.prompt_blocks import PromptBlocks, PromptHasher
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.router.self_check import SelfCheck
from vllm_pd.router.tokenizer_cache import TokenizerCache
from vllm_pd.router.worker import Worker
from vllm_pd.state.base import PoolId, WorkerRecord

THREADS = 2
MAX_HASHING = 64
"""Prompts that wait for a thread or are in one; what comes beyond is placed by load."""
DEADLINE_S = 1.0
_BYTES_PER_TOKEN = 4
_COUNTED_BYTES_PER_TOKEN = 32
"""Where nothing is looked up, only prompts that could be under one block are worth counting."""

# Reasons beside those of `conversation.Unknown`.
ENDPOINT = "endpoint"
NO_INDEX = "no_index"
LOADING = "index_loading"
MISMATCH = "hash_mismatch"
MODEL = "unknown_model"
LOGPROBS = "prompt_logprobs"
"""vLLM computes such prompts anew, whatever is cached. An echo may ask for them too."""
BUSY = "too_busy"
LATE = "too_late"
ERROR = "error"

_log = logging.getLogger(__name__)


class PromptReader:
    """Belongs to one event loop.

    Args:
        index: mirrors of the block index, and
        check: which pools are hashed as their engines do; None where the router keeps no index.
    """

    def __init__(
        self,
        tokenizers: TokenizerCache,
        metrics: RouterMetrics,
        *,
        index: IndexWatch | None = None,
        check: SelfCheck | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._index = index
        self._check = check
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompt")
        self._hashing = 0

    def close(self) -> None:
        """Let go of the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, demand: Demand, body_bytes: int, workers: Sequence[Worker]) -> None:
        """Fill in `demand.prompts` for the pools of `workers`, of which there is at least one."""
        pools: Mapping[PoolId, Worker] = {worker.pool: worker for worker in workers}
        found: dict[PoolId, PromptBlocks] = {}
        for pool, worker in pools.items():
            lora = _lora(demand.model, worker.record)
            alike = lora is None or all(
                _lora(demand.model, other.record) == lora for other in workers if other.pool == pool
            )
            prompt = found[pool] = await self._read(demand, body_bytes, worker, lora if alike else None)
            if prompt.why_unknown:
                self._metrics.prompt_unknown(prompt.why_unknown)
            else:
                self._metrics.looked_up.inc()
                self._metrics.prompt_tokens.inc(prompt.tokens)
        demand.prompts = found

    async def _read(self, demand: Demand, body_bytes: int, worker: Worker, lora: Lora | None) -> PromptBlocks:
        """`worker` is any of the pool, `lora` the adapter where all of them have it from one path."""
        fields, kind, record = demand.fields, demand.kind, worker.record
        if fields is None or kind is None:
            return PromptBlocks(body_bytes // _BYTES_PER_TOKEN, (), ENDPOINT)
        block_size = record.pool.block_size
        # One that names no model gets the base model.
        known = not demand.model or (
            demand.model in record.models and (lora is not None or demand.model not in record.loras)
        )
        why = self._why_not(worker) or ("" if known else MODEL)
        if not why and (fields.prompt_logprobs is not None or fields.echo):
            why = LOGPROBS
        if why and body_bytes > _COUNTED_BYTES_PER_TOKEN * block_size:
            return PromptBlocks(max(body_bytes // _BYTES_PER_TOKEN, block_size), (), why)
        hasher = self._tokenizers.hasher(record.pool, worker.pool, record.tokenizer)
        began = time.perf_counter()
        try:
            found = await self._hash(hasher, fields, kind, lora)
        except Exception:
            # A mistake in here must not cost a request that its worker can serve.
            _log.exception("the blocks of a prompt of %s are not known", demand.path)
            found = PromptBlocks(body_bytes // _BYTES_PER_TOKEN, (), ERROR)
        self._metrics.hashing_seconds.observe(time.perf_counter() - began)
        if found.why_unknown:
            # Unknown counts as long, unless its very size says otherwise.
            tokens = 1 if surely_short(fields, kind, block_size) else max(found.tokens, block_size)
            return PromptBlocks(tokens, (), why or found.why_unknown)
        return PromptBlocks(found.tokens, (), why) if why else found

    async def _hash(
        self, hasher: PromptHasher, fields: RequestFields, kind: PromptKind, lora: Lora | None
    ) -> PromptBlocks:
        if hasher.cheap(fields, kind, lora=lora):
            return hasher.blocks(fields, kind, lora=lora)
        if self._hashing >= MAX_HASHING:
            return PromptBlocks(0, (), BUSY)
        self._hashing += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: hasher.blocks(fields, kind, lora=lora))
        work.add_done_callback(self._hashed)
        try:
            async with asyncio.timeout(DEADLINE_S):
                # What was begun is useful for the conversation's next turn, so it goes on.
                return await asyncio.shield(work)
        except TimeoutError:
            return PromptBlocks(0, (), LATE)

    def _hashed(self, _: asyncio.Future[PromptBlocks]) -> None:
        self._hashing -= 1

    def _why_not(self, worker: Worker) -> str:
        """Why prompts of the worker's pool are not looked up; "" when they are."""
        if self._index is None or self._check is None or not self._index.follows(worker.pool):
            return NO_INDEX
        if self._index.mirror(worker.pool) is None:
            return LOADING
        return MISMATCH if self._check.problem(worker.pool) else ""


def _lora(model: str | None, record: WorkerRecord) -> Lora | None:
    """The adapter that a request for `model` uses, if it is one whose path is known."""
    if model is None or model not in record.loras:
        return None
    paths = dict(zip(record.loras, record.lora_paths, strict=False))
    return Lora(model, paths[model]) if model in paths else None
