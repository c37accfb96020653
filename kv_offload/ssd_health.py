"""Whether the SSD tier is worth asking, and the plain sentences about it: one when it goes off, one when it is back.

Loads are switched by a breaker here; while they are off a block is loaded for nobody, now and then, to see whether it
works again. Writes are paused, tried again and talked about by the store itself, whose word is only passed on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping

from vllm_pd.kv_offload.segments import Finished, Reason, Rows, SegmentStore, StoreStats
from vllm_pd.kv_offload.ssd_metrics import LOAD, OFF, PROBES, STORE, SWITCHED_OFF, SsdCounts
from vllm_pd.kv_offload.tier_breaker import ON, TierBreaker

logger = logging.getLogger(f"vllm.{__name__}")

_LOAD_FAULTS: Mapping[Reason, str] = {
    Reason.LATE: "loads take longer than they may",
    Reason.READ_FAILED: "reads fail",
    Reason.CORRUPT: "blocks are not what was stored",
}
"""What says something about the disk; that a block was evicted does not."""
_CANDIDATES = 64


class SsdHealth:
    """Used by the scheduler's thread.

    Args:
        place: what the sentences call the tier.
        counts: gets the gauges and counters.
        block_bytes: of a block, for trials.
        deadline_s: of a trial.
    """

    def __init__(self, place: str, counts: SsdCounts, block_bytes: int, deadline_s: float) -> None:
        self._place = place
        self._counts = counts
        self._deadline_s = deadline_s
        self._breaker: TierBreaker = ON
        self._writes_off = False
        self._candidates: deque[bytes] = deque(maxlen=_CANDIDATES)
        self._block_bytes = block_bytes
        self._trial = 0
        self._scratch: memoryview | None = None

    @property
    def may_load(self) -> bool:
        return not self._breaker.is_off

    def known(self, keys: Iterable[bytes]) -> None:
        """Blocks that can be loaded, for trials."""
        self._candidates.extend(keys)

    def loaded(self, ended: Finished, now: float) -> None:
        """A load for a request has ended."""
        faults = [reason for reason in ended.failed.values() if reason in _LOAD_FAULTS]
        if faults and len(faults) >= len(ended.ok):
            self._load_failed(faults[-1], now)
        elif ended.ok and not self._breaker.is_off:
            self._breaker = self._breaker.fine(now)

    def wrote(self, stats: StoreStats) -> None:
        """What the store says of its writes."""
        before, self._writes_off = self._writes_off, stats.writes_off is not None
        if self._writes_off and not before:
            self._counts.count(SWITCHED_OFF, 1, STORE)

    def show(self) -> None:
        """Set the gauges."""
        self._counts.gauge(OFF, int(self._breaker.is_off), LOAD)
        self._counts.gauge(OFF, int(self._writes_off), STORE)

    def try_again(self, store: SegmentStore, now: float) -> None:
        """Begin a trial if one is due and there is a block to load."""
        if not self._breaker.is_due(now):
            return
        key = next((key for key in reversed(self._candidates) if store.contains(key)), None)
        if key is None:
            return
        self._breaker = self._breaker.trying(now)
        self._trial -= 1
        # A trial that hangs keeps its memory until it is late; the next one comes after that.
        self._scratch = self._scratch or memoryview(bytearray(self._block_bytes))
        store.get(self._trial, [key], Rows(self._scratch, [0]), self._deadline_s)

    def is_trial(self, ticket: int) -> bool:
        """Whether a ticket is not one of vLLM's, which begin at 0."""
        return ticket < 0

    def tried(self, ended: Finished, now: float) -> None:
        """A trial has ended."""
        if ended.ticket != self._trial or not self._breaker.is_off:
            return
        reason = next(iter(ended.failed.values()), None)
        if reason is None:
            since = self._breaker.off_since or now
            self._counts.count(PROBES, 1, LOAD, "fine")
            self._breaker = self._breaker.fine(now)
            self._scratch = None
            logger.info("vllm-pd: the SSD tier in %s is used again after %.0f s.", self._place, now - since)
        elif reason in _LOAD_FAULTS:
            self._counts.count(PROBES, 1, LOAD, "failed")
            self._breaker = self._breaker.failed(now, _LOAD_FAULTS[reason])

    def forget(self, place: str) -> None:
        """The store is another one now."""
        self._place = place
        self._breaker, self._writes_off = ON, False
        self._candidates.clear()

    def _load_failed(self, reason: Reason, now: float) -> None:
        if self._breaker.is_off:
            # Of loads that began before; only trials say something now.
            return
        self._breaker = self._breaker.failed(now, _LOAD_FAULTS[reason])
        if self._breaker.is_off:
            self._counts.count(SWITCHED_OFF, 1, LOAD)
            logger.warning(
                "vllm-pd: the SSD tier in %s is not used for now: %s. Prompts are computed instead; whether it works "
                "again is tried after %.0f s, then less and less often.",
                self._place,
                self._breaker.cause,
                self._breaker.retry_at - now,
            )
