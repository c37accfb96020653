"""Tokenizers and prompt hashers of the pools, built in the background. Requests never wait for one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from vllm_pd.background import end_tasks
from vllm_pd.errors import StoreError
from vllm_pd.router.prompt_blocks import PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.state.base import PoolId, PoolSpec, Registry, TokenizerFiles

RETRY_S = 10.0
FETCH_DEADLINE_S = 15.0
MAX_TOKENIZERS = 16

_OVERRIDE = "override"
"""Stands for the hash of the files that were given."""

_log = logging.getLogger(__name__)


class TokenizerCache:
    """At most `MAX_TOKENIZERS` tokenizers by content hash, the one unused longest dropped first.

    Args:
        registry: where to fetch from; None without a store, then every tokenizer but the override is unknown.
        clock: monotonic seconds.
        override: files that stand for whatever workers publish, or do not publish.
    """

    def __init__(
        self, registry: Registry | None, clock: Callable[[], float], override: TokenizerFiles | None = None
    ) -> None:
        self._registry = registry
        self._override = override
        self._clock = clock
        self._ready: dict[str, PromptTokenizer] = {}
        self._past_mismatches = 0
        self._retry_at: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hashers: dict[tuple[PoolId, str], tuple[PromptTokenizer | None, PromptHasher]] = {}

    @property
    def ready(self) -> list[PromptTokenizer]:
        """The tokenizers that are there."""
        return list(self._ready.values())

    @property
    def mismatches(self) -> int:
        """Tokenizers, past and present, for which fastokens was given up."""
        return self._past_mismatches + sum(tokenizer.encoder.mismatches for tokenizer in self._ready.values())

    @property
    def kept_bytes(self) -> int:
        """What is kept of earlier prompts, in all."""
        segments = sum(tokenizer.segments.kept_bytes for tokenizer in self._ready.values())
        return segments + sum(hasher.kept_bytes for _, hasher in self._hashers.values())

    @property
    def loading(self) -> bool:
        """Whether a tokenizer is being fetched or built."""
        return bool(self._tasks)

    def hasher(self, spec: PoolSpec, pool: PoolId, sha: str) -> PromptHasher:
        """The pool's hasher, for token ids only until its tokenizer is there.

        Args:
            pool: the spec's id, which takes a while to compute.
            sha: of the tokenizer that its workers publish; "" when they publish none.
        """
        tokenizer = self.get(pool, sha)
        known = self._hashers.get((pool, sha))
        if known is not None and known[0] is tokenizer:
            return known[1]
        hasher = PromptHasher(spec, tokenizer)
        self._hashers[pool, sha] = (tokenizer, hasher)
        while len(self._hashers) > MAX_TOKENIZERS:
            del self._hashers[next(iter(self._hashers))]
        return hasher

    def get(self, pool: PoolId, sha: str) -> PromptTokenizer | None:
        """The tokenizer if it is there; otherwise None, and it is fetched for later calls."""
        sha = self._effective(sha)
        tokenizer = self._ready.pop(sha, None)
        if tokenizer is not None:
            self._ready[sha] = tokenizer
        else:
            self._begin(pool, sha)
        return tokenizer

    def prefetch(self, pool: PoolId, sha: str) -> None:
        """Fetch it before a request asks, as long as no other one has to make room for it.

        Building one holds Python's lock for up to a second (the library does), so it is best done while workers join.
        """
        sha = self._effective(sha)
        if sha not in self._ready and len(self._ready) + len(self._tasks) < MAX_TOKENIZERS:
            self._begin(pool, sha)

    def _effective(self, sha: str) -> str:
        return sha if self._override is None else _OVERRIDE

    def _begin(self, pool: PoolId, sha: str) -> None:
        due = self._clock() >= self._retry_at.get(sha, 0.0)
        there = self._override is not None or self._registry is not None
        if sha and there and sha not in self._tasks and due:
            self._tasks[sha] = asyncio.create_task(self._load(pool, sha))

    async def _load(self, pool: PoolId, sha: str) -> None:
        try:
            files = self._override
            if files is None and self._registry is not None:
                async with asyncio.timeout(FETCH_DEADLINE_S):
                    files = await self._registry.get_tokenizer(pool, sha)
            if files is None:
                raise ValueError("it is not in the store")
            self._ready[sha] = await asyncio.to_thread(PromptTokenizer, files)
            self._retry_at.pop(sha, None)
            while len(self._ready) > MAX_TOKENIZERS:
                dropped = self._ready.pop(next(iter(self._ready)))
                self._past_mismatches += dropped.encoder.mismatches
        except (StoreError, ValueError, OSError) as e:
            self._retry_at[sha] = self._clock() + RETRY_S
            _log.debug("tokenizer %s is not usable: %s", sha[:12], e or "the store did not answer in time")
        finally:
            del self._tasks[sha]

    async def close(self) -> None:
        """Stop what is being fetched. Idempotent."""
        tasks = list(self._tasks.values())
        await end_tasks(tasks)
