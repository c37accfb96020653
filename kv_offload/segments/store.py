"""The store as its user sees it. All work with files and block contents is done by its own threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from vllm_pd.kv_offload.block_io.base import BlockIO
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.outcome import Finished, StoreStats


class SegmentStore:
    """Blocks by key in segment files. For one user thread (the scheduler's), which is never made to wait for I/O.

    Threads: one takes blocks over into staging memory, one writes, `config.readers` read.

    Args:
        config: sizes and places.
        io: moves the bytes; stays the caller's, who closes it after the store.
        clock: seconds; deadlines and waits are measured by it.

    Raises:
        SettingsError: the folder cannot be made or written, or another process uses this namespace.
    """

    def __init__(self, config: StoreConfig, io: BlockIO, clock: Callable[[], float] = time.monotonic) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Lock the namespace and start the threads. What earlier runs left is found by and by: see `take_changes`."""

    def contains(self, key: bytes) -> bool:
        """Whether `get` can load it. A block that is still being written is not contained."""

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are contained."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks are in use: their segments are evicted later, and they outlive their segment."""

    def put(self, ticket: int, keys: Sequence[bytes], sources: Sequence[memoryview]) -> None:
        """Store blocks. `sources[i]` holds `block_bytes` and is not changed until the ticket is finished.

        The ticket is finished when the blocks are copied to staging memory or refused, so a slow disk holds the
        caller's memory for at most `put_wait_s`. Keys that are stored or staged already are ok at once.
        """

    def get(self, ticket: int, keys: Sequence[bytes], targets: Sequence[memoryview], deadline_s: float) -> None:
        """Load blocks into `targets`. Checked before they are copied there.

        Args:
            deadline_s: seconds from now, after which keys that are not loaded fail as late.
        """

    def finished(self) -> list[Finished]:
        """Tickets that ended since this was last asked, deadlines included. Each ticket ends once."""

    def take_changes(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Up to `limit` blocks that came (were written, or found at start) and went since this was last asked."""

    def stats(self) -> StoreStats:
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        """Wait until every ticket has ended; those that have not by then are ended as late or busy.

        After it no source or target is touched; results are for `finished`. True if nothing had to be cut short.
        """

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken over is on the device, or was lost to an error. False: not in this time."""

    def close(self, timeout_s: float) -> None:
        """Drain, flush, finish the open segment, end the threads, unlock. A thread under a hung I/O is left behind.

        Idempotent. Afterwards puts and gets end with reason `closed`.
        """
