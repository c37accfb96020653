"""What the store's threads count, and what they say to people: once, not for each block."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from vllm_pd.kv_offload.segments.outcome import Reason

logger = logging.getLogger(f"vllm.{__name__}")

_SILENCE_S = 600.0


class Counters:
    """Sums since the start. Thread-safe.

    Attributes:
        totals: by the name of the field in `StoreStats`.
        loads_failed, puts_refused, puts_lost: blocks by reason.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.totals: Counter[str] = Counter()
        self.loads_failed: Counter[Reason] = Counter()
        self.puts_refused: Counter[Reason] = Counter()
        self.puts_lost: Counter[Reason] = Counter()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self.totals.update(amounts)

    def count(self, counter: Counter[Reason], reason: Reason, blocks: int) -> None:
        """Into one of the counters above."""
        if blocks:
            with self._lock:
                counter[reason] += blocks


class Complaints:
    """Says what is wrong: the first time, and then at most every ten minutes for each kind of trouble.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, float] = {}

    def say(self, kind: str, text: str) -> None:
        """A warning, unless one of this kind was given a while ago."""
        now = self._clock()
        with self._lock:
            if now - self._said.get(kind, -_SILENCE_S) < _SILENCE_S:
                return
            self._said[kind] = now
        logger.warning("SSD tier: %s", text)

    def is_over(self, kind: str, text: str) -> None:
        """The trouble of this kind is over; said once if it was complained about."""
        with self._lock:
            if self._said.pop(kind, None) is None:
                return
        logger.info("SSD tier: %s", text)
