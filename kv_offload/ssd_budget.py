"""Keeps the SSD tier's folder within its budget. vLLM's file tier writes and reads block files but never deletes one.

Two halves. `admit` is asked before each write and refuses what would exceed the budget, so the bound holds however
fast the engine writes. A thread scans the folder, corrects the estimate, and deletes the least recently used block
files when the folder is nearly full or the file system runs out of space; it gives way to the scheduler, in whose
process it runs, after every few files. Deleting a file at any time is safe: a block that is gone when it is looked up
or read is a miss and is recomputed.

Only what the tier itself wrote is ever touched: block files, abandoned temporary files, and empty folders.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(f"vllm.{__name__}")

GIB = 1 << 30
BLOCK_SUFFIX = ".bin"
TEMPORARY_SUFFIX = ".tmp"
DIRECTORY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    Attributes:
        budget_bytes: what the folder may take; never exceeded by one server's writes.
        floor_bytes: free space to keep on the file system.
        low_water: eviction stops at this fraction of the budget, so that it does not run for every block.
        high_water: eviction starts at this fraction.
        stale_s: age after which a temporary file or an empty folder is abandoned.
        scan_every_s: a scan happens at least this often, to see what other processes wrote.
        tick_s: how often the free space is looked at.
        victims_per_pass: most files deleted between two scans; bounds memory.
    """

    budget_bytes: int
    floor_bytes: int
    low_water: float = 0.9
    high_water: float = 0.95
    stale_s: float = 600.0
    scan_every_s: float = 60.0
    tick_s: float = 1.0
    victims_per_pass: int = 20_000


def default_floor(path: Path) -> int:
    """5% of the file system, at least 1 GiB: most file systems get slow when they are nearly full."""
    info = os.statvfs(path)
    return max(GIB, info.f_blocks * info.f_frsize // 20)


@dataclass(frozen=True, slots=True, order=True)
class BlockFile:
    """A file that may be deleted; older sorts first."""

    used_at: float
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan saw: allocated bytes in all, and the least recently used block files, oldest first."""

    total_bytes: int
    oldest: tuple[BlockFile, ...]


def bytes_to_free(total: int, free: int, limits: Limits) -> int:
    """How many bytes eviction should remove now; 0 while below the high-water mark and above the floor."""
    over_budget = total - int(limits.budget_bytes * limits.low_water)
    if total <= limits.budget_bytes * limits.high_water:
        over_budget = 0
    # As with the budget, stop a little beyond the line.
    under_floor = int(limits.floor_bytes * 1.05) - free if free < limits.floor_bytes else 0
    return max(0, over_budget, min(under_floor, total))


class Watcher(Protocol):
    """Is told what the budget sees and does, in the budget's thread."""

    def scan_begins(self) -> None: ...

    def found(self, path: str) -> None:
        """A block file, during a scan."""

    def scan_ended(self) -> None:
        """The scan has seen every file; not called for a scan that was cut short."""

    def deleted(self, path: str) -> None: ...


class SsdBudget:
    """The accountant of one folder. `admit` is called from one thread; the rest happens in a thread of its own.

    Args:
        root: folder to keep bounded; exists.
        limits: how.
        free_bytes: free space of the file system; replaced by tests.
        watcher: is told of files that are there and of files that were deleted.
    """

    def __init__(
        self,
        root: Path,
        limits: Limits,
        free_bytes: Callable[[Path], int] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._root = root
        self._limits = limits
        self._watcher = watcher
        self._free_bytes = free_bytes or _free_bytes
        self._lock = threading.Lock()
        # Nothing is admitted before the first scan has shown what earlier runs left.
        self._estimate: int | None = None
        # Admitted, and perhaps not on the disk yet: writers have a queue, so a scan may miss it.
        self._in_flight = 0
        self._unseen_by_scan = 0
        self._free = 0
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="vllm_pd_ssd_budget", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; a scan is left unfinished. Idempotent."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def used_bytes(self) -> int | None:
        """Upper estimate of what the folder takes; None before the first scan."""
        return self._estimate

    def admit(self, files: int, file_bytes: int) -> bool:
        """Whether `files` new block files of `file_bytes` each may be written; if so they count from now on.

        Each admission is followed by `settle` with the same numbers.
        """
        size = _on_disk(files, file_bytes)
        with self._lock:
            if self._estimate is None:
                return False
            fits = self._estimate + size <= self._limits.budget_bytes and self._free - size >= self._limits.floor_bytes
            if fits:
                self._estimate += size
                self._in_flight += size
                self._unseen_by_scan += size
                self._free -= size
            if not fits or self._estimate > self._limits.budget_bytes * self._limits.high_water:
                self._wake.set()
        return fits

    def settle(self, files: int, file_bytes: int) -> None:
        """What was admitted is on the disk, or will never be: the next scan sees all there is of it."""
        with self._lock:
            self._in_flight -= _on_disk(files, file_bytes)

    def scan_and_evict(self) -> int:
        """One pass. Returns the bytes it freed."""
        with self._lock:
            self._unseen_by_scan = self._in_flight
        seen = self._scan()
        if seen is None:
            return 0
        free = self._free_bytes(self._root)
        wanted = bytes_to_free(seen.total_bytes, free, self._limits)
        freed = self._delete(seen.oldest, wanted)
        with self._lock:
            # What was written during the scan may or may not have been seen; counting it keeps this an upper bound.
            self._estimate = max(0, seen.total_bytes - freed) + self._unseen_by_scan
            self._free = free + freed - self._in_flight
        if freed:
            logger.info("SSD tier: freed %.2f GiB of %.2f GiB.", freed / GIB, seen.total_bytes / GIB)
        return freed

    def _work(self) -> None:
        next_scan, complaint = 0.0, ""
        while not self._stopping.is_set():
            try:
                free = self._free_bytes(self._root)
                with self._lock:
                    self._free = free - self._in_flight
                    low = free < self._limits.floor_bytes and bool(self._estimate)
                if low or self._wake.is_set() or time.monotonic() >= next_scan:
                    self._wake.clear()
                    self.scan_and_evict()
                    next_scan = time.monotonic() + self._limits.scan_every_s
                complaint = ""
            except OSError as e:
                # The disk is gone or read-only. The tier's own reads and writes fail as misses; keep looking.
                if complaint != str(e):
                    logger.warning("SSD tier: cannot check %s (%s).", self._root, e)
                complaint = str(e)
            # Even when woken at once, a full folder is scanned once per tick at most.
            if self._stopping.wait(self._limits.tick_s):
                return

    def _scan(self) -> Scan | None:
        """Walk the folder, giving way after every few entries; None when told to stop."""
        total, newest_first = 0, list[tuple[float, BlockFile]]()
        if self._watcher is not None:
            self._watcher.scan_begins()
        stale_before = time.time() - self._limits.stale_s
        for entries, (entry, info) in enumerate(_walk(self._root)):
            if entries % 128 == 127 and self._stopping.wait(0.001):
                return None
            total += info.st_blocks * 512
            name = entry.name
            if name.endswith(TEMPORARY_SUFFIX):
                if info.st_mtime < stale_before and _unlink(entry.path):
                    total -= info.st_blocks * 512
            elif name.endswith(BLOCK_SUFFIX):
                if self._watcher is not None:
                    self._watcher.found(entry.path)
                used_at = max(info.st_atime, info.st_mtime)
                item = (-used_at, BlockFile(used_at, entry.path, info.st_blocks * 512))
                if len(newest_first) < self._limits.victims_per_pass:
                    heapq.heappush(newest_first, item)
                else:
                    heapq.heappushpop(newest_first, item)
        if self._watcher is not None:
            self._watcher.scan_ended()
        return Scan(total, tuple(sorted(block for _, block in newest_first)))

    def _delete(self, candidates: tuple[BlockFile, ...], wanted: int) -> int:
        freed = 0
        for count, block in enumerate(candidates):
            if freed >= wanted or self._stopping.is_set():
                break
            if count % 128 == 127:
                self._stopping.wait(0.001)
            if _unlink(block.path):
                if self._watcher is not None:
                    self._watcher.deleted(block.path)
                freed += block.size
                freed += _remove_if_empty(Path(block.path).parent)
        return freed


def _on_disk(files: int, file_bytes: int) -> int:
    """Rounded up to whole disk blocks, plus the folder that a block file often has to itself."""
    return files * (-(-file_bytes // 4096) * 4096 + DIRECTORY_BYTES)


def _walk(root: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Every file and folder below `root`, without following links; what vanishes meanwhile is skipped."""
    pending = [str(root)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                listed = list(entries)
        except OSError:
            continue
        for entry in listed:
            try:
                info = entry.stat(follow_symlinks=False)
                is_folder = entry.is_dir(follow_symlinks=False)
            except OSError:
                continue
            if is_folder:
                pending.append(entry.path)
            elif entry.is_symlink():
                continue
            yield entry, info


def _unlink(path: str) -> bool:
    try:
        Path(path).unlink()
    except OSError:
        return False
    return True


def _remove_if_empty(folder: Path) -> int:
    """A writer that was about to use the folder fails one store, which is not kept; the next one makes it again."""
    try:
        folder.rmdir()
    except OSError:
        return 0
    return DIRECTORY_BYTES


def _free_bytes(path: Path) -> int:
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize
