"""A modelled engine in real time, on an asyncio loop, as many times as fast as asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from vllm_pd.block_hash import BlockKey
from vllm_pd.sim.engine import Engine
from vllm_pd.sim.work import Outcome, Step, Work

TICK_S = 0.004
"""Steps shorter than this are taken several at a time: a loop cannot wake up for each."""
_LATE_S = 0.02
"""A step that ends late by less does not delay the one after it."""


class Listener(Protocol):
    """Hears of one request; the `tag` of its `Work`."""

    def progress(self, generated: int, finished: bool) -> None:
        """So many tokens there are now. Must not raise."""

    def fetched(self) -> None:
        """The KV that another worker had computed has arrived."""


class LiveEngine:
    """Runs one engine. All methods are for the loop that it was made in.

    Args:
        engine: idle.
        speed: how many of its seconds pass in one.
        changed: told of changes of the cache: block -> tier bits.
        loaded: told after every step, when the load may be another one.
    """

    def __init__(
        self,
        engine: Engine,
        speed: float,
        changed: Callable[[Mapping[BlockKey, int]], None],
        loaded: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._speed = speed
        self._changed = changed
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._aborted: list[Work] = []
        self._closed = False

    def submit(self, work: Work) -> None:
        """Queue a request; its tag is its `Listener`."""
        cut = self.engine.add(work)
        if self._step is None:
            self._begin(self._now())
        elif cut:
            self._cut()

    def abort(self, work: Work) -> None:
        """Drop a request that has not finished; it is not heard of any more."""
        self._aborted.append(work)
        if self._step is None:
            self._begin(self._now())
        else:
            self._cut()

    def release(self, work: Work) -> None:
        """Let go of a finished request's blocks."""
        self.engine.release(work)
        if self._step is None and self.engine.waiting:
            self._begin(self._now())

    def reset_cache(self) -> bool:
        """Forget what no request uses, if no request uses anything. Returns whether that was so."""
        changed = self.engine.reset_cache()
        if changed:
            self._changed(changed)
        return changed is not None

    def close(self) -> None:
        """Stop for good. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> float:
        return (self._loop.time() - self._began) * self._speed

    def _wake_at(self, time: float, action: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if self._closed else self._loop.call_at(self._began + time / self._speed, action)

    def _begin(self, now: float) -> None:
        for work in self._aborted:
            # It may have finished while it waited here: nobody will ask for what it was to hold.
            if self.engine.generated(work) < work.output:
                self.engine.abort(work)
            elif work.hold:
                self.engine.release(work)
        self._aborted.clear()
        engine = self.engine
        each = engine.timing.decode(engine.kv_usage, engine.decoding)
        step = self._step = engine.begin(now, max(1, int(TICK_S * self._speed / each)))
        self._loaded()
        if step is not None:
            self._wake_at(step.ends, self._end)
            return
        self._tell(engine.end())
        if engine.next_load is not None:
            self._wake_at(engine.next_load, self._end)

    def _cut(self) -> None:
        assert self._step is not None
        if self._step.iterations > 1:
            self._wake_at(self.engine.cut(self._now()), self._end)

    def _end(self) -> None:
        step, self._step = self._step, None
        self._timer = None
        self._tell(self.engine.end())
        now = self._now()
        late = now - step.ends if step is not None else 0.0
        self._begin(step.ends if step is not None and late < _LATE_S * self._speed else now)

    def _tell(self, outcome: Outcome) -> None:
        if outcome.changed:
            self._changed(outcome.changed)
        for work in outcome.fetched:
            _listener(work).fetched()
        for work in outcome.finished:
            _listener(work).progress(work.generated, True)
        for work in self.engine.decoders:
            _listener(work).progress(self.engine.generated(work), False)


def _listener(work: Work) -> Listener:
    return work.tag  # type: ignore[return-value]
