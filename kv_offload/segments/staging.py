"""Takes blocks over from the tier above: copies them into batches in memory, where they wait for the disk.

A thread of its own copies, so that a disk that hangs in a write pins nothing of the tier above for longer than
`put_wait_s`: with all batches waiting, what is put is refused.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vllm_pd.kv_offload.block_io.aligned import StagingPool
from vllm_pd.kv_offload.segments.batch import Batch
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Counters
from vllm_pd.kv_offload.segments.flight import IN_FLIGHT
from vllm_pd.kv_offload.segments.outcome import Finished, Reason
from vllm_pd.kv_offload.segments.results import Results
from vllm_pd.kv_offload.segments.rows import Rows

logger = logging.getLogger(f"vllm.{__name__}")

GATHER_S = 0.05
"""How long a batch that is not full waits for more blocks: each write has a header of at least a page."""

_LEAST_BATCHES = IN_FLIGHT + 2
"""Beside those that are written one waits and one is filled."""


class _Put:
    """A ticket whose blocks are being taken over. `rest` is the number of the first that is not."""

    __slots__ = ("addresses", "began", "failed", "fresh", "keys", "rest", "sources", "started", "ticket")

    def __init__(
        self,
        ticket: int,
        keys: Sequence[bytes],
        fresh: list[bytes],
        sources: Rows,
        addresses: list[int],
        failed: dict[bytes, Reason],
        started: float,
    ) -> None:
        self.ticket = ticket
        self.keys = keys
        self.fresh = fresh
        self.sources: Rows | None = sources
        self.addresses = addresses
        self.failed = failed
        self.started = started
        self.began: float | None = None
        self.rest = 0


class Staging:
    """
    Args:
        config: sizes.
        results: hears of tickets that end.
        clock: seconds.
    """

    def __init__(self, config: StoreConfig, results: Results, counters: Counters, clock: Callable[[], float]) -> None:
        self._config = config
        self._results = results
        self._counters = counters
        self._clock = clock
        size = Batch.bytes_for(config.batch_blocks, config.stride)
        self._pool = StagingPool(max(_LEAST_BATCHES, config.staging_bytes // size), size)
        self._changed = threading.Condition()
        self._puts: deque[_Put] = deque()
        self._copying = False
        self._full: deque[Batch] = deque()
        self._open: Batch | None = None
        self._opened_at = 0.0
        self._backlog = 0
        self._keys: set[bytes] = set()
        self._hurry = False
        self._woken = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vllm_pd_ssd_stage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __contains__(self, key: bytes) -> bool:
        """Taken over, or about to be, and not in the hands of the writer's success or failure yet."""
        return key in self._keys

    @property
    def staged_bytes(self) -> int:
        """Of blocks that were taken over or accepted, and are not written."""
        return len(self._keys) * self._config.block_bytes

    def offer(
        self,
        ticket: int,
        keys: Sequence[bytes],
        fresh: Sequence[int],
        sources: Rows,
        addresses: list[int],
        failed: dict[bytes, Reason],
    ) -> None:
        """Blocks `fresh` of a put. Those that the backlog has no room for are refused; never waits.

        Args:
            sources: what keeps the memory, in which the blocks have these `addresses`.
            failed: keys that were refused before; a put has one result for all.
        """
        now = self._clock()
        with self._changed:
            room = max(0, self._config.backlog_bytes // self._config.block_bytes - self._backlog)
            if self._closed:
                room = 0
            taken, refused = fresh[:room], fresh[room:]
            reason = Reason.CLOSED if self._closed else Reason.BUSY
            for number in refused:
                failed[keys[number]] = reason
            put = _Put(ticket, keys, [keys[i] for i in taken], sources, [addresses[i] for i in taken], failed, now)
            self._keys.update(put.fresh)
            self._backlog += len(taken)
            if taken:
                self._puts.append(put)
                self._changed.notify_all()
        self._counters.count(self._counters.puts_refused, reason, len(refused))
        if not taken:
            self._end(put)

    def take(self, timeout_s: float) -> Batch | None:
        """The next batch to write, full or what has gathered for a while; None: none in time, or `wake`."""
        with self._changed:
            deadline = self._clock() + timeout_s
            while True:
                if self._full:
                    return self._full.popleft()
                now = self._clock()
                wait = deadline - now
                if self._open is not None and not self._copying:
                    age = now - self._opened_at
                    if age >= GATHER_S or self._hurry or len(self._open) * 2 >= self._open.most:
                        batch, self._open = self._open, None
                        return batch
                    wait = min(wait, GATHER_S - age)
                if deadline - now <= 0 or self._woken:
                    self._woken = False
                    return None
                self._changed.wait(wait)

    def done(self, batch: Batch) -> None:
        """The writer is through with it, well or not."""
        self._keys.difference_update(batch.keys)
        batch.release()
        with self._changed:
            self._changed.notify_all()

    def refuse_waiting(self, reason: Reason) -> None:
        """End puts whose blocks still wait for memory. One that is being copied goes on to the end of its portion."""
        with self._changed:
            puts, self._puts = list(self._puts), deque()
        for put in puts:
            self._refuse(put, reason)

    def wake(self) -> None:
        """Have the writer look for other work once. For any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def hurry(self, on: bool) -> None:
        """Do not wait for batches to fill. A writer that waits for one looks for other work once."""
        with self._changed:
            self._hurry = on
            # What another thread woke it for stays to be done.
            self._woken |= on
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """All that was taken over has been written or lost."""
        with self._changed:
            return not (self._puts or self._copying or self._keys)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more; end the thread. False if it still runs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._pool.touch()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._puts or self._closed)
                if not self._puts:
                    return
                put = self._puts.popleft()
                self._copying = True
            try:
                self._copy(put)
            except Exception:
                # The thread must live: without it every later put would wait for ever.
                logger.exception("SSD tier: blocks could not be taken over.")
                self._refuse(put, Reason.WRITE_FAILED)
            finally:
                with self._changed:
                    self._copying = False
                    self._changed.notify_all()

    def _copy(self, put: _Put) -> None:
        deadline = put.started + self._config.put_wait_s
        while put.rest < len(put.fresh):
            batch = self._batch(deadline)
            if batch is None:
                break
            if put.began is None:
                put.began = self._clock()
            last = min(put.rest + batch.room, len(put.fresh))
            part = slice(put.rest, last)
            batch.add(self._config.namespace, put.fresh[part], put.addresses[part], self._config.block_bytes)
            with self._changed:
                self._backlog -= last - put.rest
                put.rest = last
                if not batch.room:
                    self._full.append(batch)
                    self._open = None
                self._changed.notify_all()
        self._refuse(put, Reason.CLOSED if self._closed else Reason.BUSY)

    def _batch(self, deadline: float) -> Batch | None:
        """The one that is being filled, or a new one; None if there is no memory in time."""
        with self._changed:
            if self._open is not None:
                return self._open
        # Not waited for with the lock: the writer gives memory back through it.
        buffer = self._pool.take(max(0.0, deadline - self._clock()))
        if buffer is None:
            return None
        batch = Batch(buffer.view, self._config.batch_blocks, self._config.stride, buffer.give_back)
        with self._changed:
            self._open, self._opened_at = batch, self._clock()
        return batch

    def _refuse(self, put: _Put, reason: Reason) -> None:
        """End a put; what it still has is refused."""
        rest = put.fresh[put.rest :]
        put.failed.update(dict.fromkeys(rest, reason))
        self._keys.difference_update(rest)
        with self._changed:
            self._backlog -= len(rest)
        self._counters.count(self._counters.puts_refused, reason, len(rest))
        self._end(put)

    def _end(self, put: _Put) -> None:
        now = self._clock()
        put.sources = None
        ok = tuple(key for key in put.keys if key not in put.failed)
        size = put.rest * self._config.block_bytes
        began = now if put.began is None else put.began
        self._results.ended(
            Finished(put.ticket, ok, put.failed, size, now - put.started, began - put.started, is_load=False)
        )
