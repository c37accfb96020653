"""Keeps the directory equal to the registry: asks for a snapshot about twice a second, for ever."""

from __future__ import annotations

import asyncio

from vllm_pd.errors import StoreError
from vllm_pd.router.directory import Directory
from vllm_pd.router.index_watch import IndexWatch
from vllm_pd.router.repeat import repeat
from vllm_pd.router.tokenizer_cache import TokenizerCache
from vllm_pd.router.worker import Source
from vllm_pd.state.base import Registry

DEADLINE_S = 2.0


class StoreWatch:
    """One background task. A store that is down, slow or restarted empty is met by asking again."""

    def __init__(
        self,
        registry: Registry,
        directory: Directory,
        tokenizers: TokenizerCache,
        *,
        index: IndexWatch | None = None,
        interval: float,
    ) -> None:
        self._registry = registry
        self._directory = directory
        self._tokenizers = tokenizers
        self._index = index
        self._interval = interval

    async def run(self) -> None:
        """Until cancelled."""
        await repeat(self.refresh, self._interval)

    async def refresh(self) -> None:
        """Ask once. Never raises for a store that fails."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                snapshot = await self._registry.snapshot()
        except StoreError as e:
            self._directory.store_down(str(e))
        except (TimeoutError, OSError) as e:
            self._directory.store_down(str(e) or f"no answer within {DEADLINE_S:g} s")
        else:
            was_down = self._directory.store_up()
            self._directory.replace(Source.STORE, snapshot.workers, after_outage=was_down)
            for worker in self._directory.workers:
                self._tokenizers.prefetch(worker.pool, worker.record.tokenizer)
            if self._index is not None:
                await self._index.refresh()
