"""The store as its user sees it. All work with files and block contents is done by its own threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from vllm_pd.kv_offload.block_io.base import BlockIO
from vllm_pd.kv_offload.segments import block_pass, folder
from vllm_pd.kv_offload.segments.adopt import Adoption
from vllm_pd.kv_offload.segments.config import StoreConfig
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.format import MAX_KEY_BYTES
from vllm_pd.kv_offload.segments.index import Index
from vllm_pd.kv_offload.segments.load import Load
from vllm_pd.kv_offload.segments.lock import FolderLock
from vllm_pd.kv_offload.segments.log import SegmentLog
from vllm_pd.kv_offload.segments.outcome import Finished, Reason, StoreStats
from vllm_pd.kv_offload.segments.reader import Readers
from vllm_pd.kv_offload.segments.results import Results
from vllm_pd.kv_offload.segments.rows import Rows
from vllm_pd.kv_offload.segments.staging import Staging
from vllm_pd.kv_offload.segments.writer import Writer

logger = logging.getLogger(f"vllm.{__name__}")

_LOCK_S = 2.0
"""A server that is just ending, or a look at the folder from outside, lets go in this time."""

_POLL_S = 0.005
_CUT_SHORT_S = 30.0
"""What a copy that has begun may take at most; far beyond what memory needs."""


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
        self._config = config
        self._io = io
        self._clock = clock
        self._index = Index()
        self._counters = Counters()
        self._complaints = Complaints()
        self._results = Results()
        self._files = OpenFiles(io, config.open_files)
        self._closed = False
        self._lock: FolderLock | None = folder.lock_namespace(config.root, config.folder, _LOCK_S)
        try:
            folder.remove_temporary(config.folder)
            # For people; a full disk has no room for it, and still serves what it holds.
            with suppress(OSError):
                folder.write_about(config.folder, config.about)
            self._found = folder.segment_files(config.folder)
        except OSError as e:
            self._lock.release()
            raise folder.unusable(config.folder, e) from None
        first_id = self._found[-1].id + 1 if self._found else 0
        self._log = SegmentLog(config, io, self._index, self._files, self._counters, self._complaints, first_id)
        self._staging = Staging(config, self._results, self._counters, clock)
        self._writer = Writer(config, self._log, self._staging, self._counters, self._complaints, clock)
        self._readers = Readers(
            config, io, self._index, self._files, self._results, self._counters, self._complaints, clock
        )
        # Machine code for the threads' loops is made now: compiling in one of them would hold up the engine.
        block_pass.prepare()

    def start(self) -> None:
        """Start the threads. What earlier runs left is found by and by: see `take_changes`."""
        self._staging.start()
        self._readers.start()
        self._writer.start(self._adoption, self._found)

    def contains(self, key: bytes) -> bool:
        """Whether `get` can load it. A block that is still being written is not contained."""
        return key in self._index

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are contained."""
        for count, key in enumerate(keys):
            if key not in self._index:
                return count
        return len(keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks are in use: their segments are evicted later, and they outlive their segment."""
        self._index.touch(keys)

    def put(self, ticket: int, keys: Sequence[bytes], sources: Rows) -> None:
        """Store blocks. `sources` are not changed until the ticket is finished.

        The ticket is finished when the blocks are copied to staging memory or refused, so a slow disk holds the
        caller's memory for at most `put_wait_s`. Keys that are stored or staged already are ok at once.

        Raises:
            ValueError: there is no such row of memory, or a key has the wrong size; nothing was done.
        """
        addresses = self._check(keys, sources)
        reason = self._writer.refusing
        fresh: list[int] = []
        seen: set[bytes] = set()
        failed: dict[bytes, Reason] = {}
        known = 0
        for number, key in enumerate(keys):
            if key in self._index or key in self._staging or key in seen:
                known += 1
            elif reason is not None:
                failed[key] = reason
            else:
                seen.add(key)
                fresh.append(number)
        self._counters.add(duplicate_blocks_total=known)
        if reason is not None:
            self._counters.count(self._counters.puts_refused, reason, len(failed))
        self._results.opened()
        self._staging.offer(ticket, keys, fresh, sources, addresses, failed)

    def get(self, ticket: int, keys: Sequence[bytes], targets: Rows, deadline_s: float) -> None:
        """Load blocks into `targets`.

        Args:
            deadline_s: seconds from now, after which keys that are not loaded fail as late.

        Raises:
            ValueError: there is no such row of memory, or a key has the wrong size; nothing was done.
        """
        addresses = self._check(keys, targets)
        now = self._clock()
        self._results.opened()
        self._readers.submit(Load(ticket, keys, self._index.locate(keys), targets, addresses, now + deadline_s, now))

    def finished(self) -> list[Finished]:
        """Tickets that ended since this was last asked, deadlines included. Each ticket ends once."""
        self._readers.queue.end_late(self._clock())
        return self._results.take()

    def take_changes(self, limit: int) -> tuple[list[bytes], list[bytes]]:
        """Up to `limit` blocks that came (were written, or found at start) and went since this was last asked.

        To be asked regularly: changes that nobody takes are kept.
        """
        return self._index.take_changes(limit)

    def stats(self) -> StoreStats:
        """Cheap enough for every step."""
        counters = self._counters
        return StoreStats(
            blocks=len(self._index),
            segments=self._index.segment_count,
            used_bytes=self._index.used_bytes,
            recovering=self._writer.recovering,
            writes_off=self._writer.off,
            staged_bytes=self._staging.staged_bytes,
            queued_load_bytes=self._readers.queue.blocks * self._config.block_bytes,
            loads_failed=dict(counters.loads_failed),
            puts_refused=dict(counters.puts_refused),
            puts_lost=dict(counters.puts_lost),
            **counters.totals,
        )

    def wait_recovered(self, timeout_s: float) -> bool:
        """Until what earlier runs left is in the index; False if it is not yet. For tools and tests."""
        return self._wait(lambda: not self._writer.recovering, timeout_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every ticket has ended; those that have not by then are ended as late or busy.

        After it no source or target is touched; results are for `finished`. True if nothing had to be cut short.
        """
        deadline = self._clock() + timeout_s
        while (left := deadline - self._clock()) > 0:
            # Loads may be over their own deadline earlier.
            self._readers.queue.end_late(self._clock())
            if self._results.wait_for_all(min(left, _POLL_S)):
                return True
        self._cut_short(Reason.LATE, Reason.BUSY)
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken over is on the device, or was lost to an error. False: not in this time."""
        self._staging.hurry(True)
        try:
            return self._wait(lambda: self._staging.idle and self._writer.idle, timeout_s)
        finally:
            self._staging.hurry(False)

    def close(self, timeout_s: float) -> None:
        """End loads, write what was taken over, finish the open segment, end the threads, unlock.

        Idempotent. Afterwards puts and gets end with reason `closed`. A thread under a hung I/O is left behind; the
        folder then stays locked as long as this process lives, because that I/O may still reach the disk.
        """
        if self._closed:
            return
        self._closed = True
        deadline = self._clock() + timeout_s
        self._cut_short(Reason.CLOSED, Reason.CLOSED)
        ended = self._staging.close(max(0.0, deadline - self._clock()))
        ended &= self._writer.close(max(0.0, deadline - self._clock()))
        ended &= self._readers.close(max(0.0, deadline - self._clock()))
        if not ended:
            logger.warning("SSD tier: %s does not answer; what was not written is lost.", self._config.folder)
            return
        self._files.close_all()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _cut_short(self, loads: Reason, puts: Reason) -> None:
        """End every ticket. A put that is being copied goes on to the end of its portion: that is memory alone."""
        self._readers.queue.end_everything(loads)
        self._staging.refuse_waiting(puts)
        self._results.wait_for_all(_CUT_SHORT_S)

    def _check(self, keys: Sequence[bytes], rows: Rows) -> list[int]:
        """Addresses of the blocks."""
        if len(keys) != len(rows.numbers):
            raise ValueError(f"{len(keys)} keys for {len(rows.numbers)} blocks")
        sizes = set(map(len, keys))
        if sizes and not 0 < min(sizes) <= max(sizes) <= MAX_KEY_BYTES:
            raise ValueError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, got {min(sizes)} to {max(sizes)}")
        return rows.addresses(self._config.block_bytes)

    def _adoption(self, pause: Callable[[], None]) -> Adoption:
        return Adoption(self._config, self._io, self._index, self._log, self._counters, self._complaints, pause)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True
