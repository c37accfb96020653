"""Looks at the folder of a store from outside, also while a server uses it: sizes, contents, and clearing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import folder, recovery
from vllm_pd.kv_offload.segments.config import BATCH_BYTES, MIB, SYNC_BYTES
from vllm_pd.kv_offload.segments.folder import SegmentFile
from vllm_pd.kv_offload.segments.format import FormatError
from vllm_pd.kv_offload.segments.lock import FolderLock, holder
from vllm_pd.layered import nearest

_PORTION_BYTES = 8 * MIB
_JUST_MADE_S = 5.0


@dataclass(frozen=True, slots=True)
class NamespaceStat:
    """One namespace.

    Attributes:
        name: of its folder.
        about: what its server wrote about it (model, dtype, ...); empty when it wrote nothing.
        pid: the process that uses it; None when nobody does.
        segments: files; `sealed` of them are finished.
        bytes: of those files.
        blocks: that a server would find at start; keys that occur twice are counted once.
        block_bytes: 0 when there is no readable segment.
        oldest, newest: when a segment was begun, seconds since 1970; None without segments.
        problems: one sentence per file that cannot be used.
    """

    name: str
    about: Mapping[str, str]
    pid: int | None
    segments: int
    sealed: int
    bytes: int
    blocks: int
    block_bytes: int
    oldest: float | None
    newest: float | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FolderStat:
    """All namespaces under a root, largest first, and the file system they are on."""

    root: Path
    namespaces: tuple[NamespaceStat, ...]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What reading every block of a namespace showed.

    Attributes:
        good: blocks whose checksum is right.
        corrupt: blocks whose checksum is wrong: a server would find them missing.
        unreadable: blocks that could not be read.
        unfinished: blocks near the end of a segment without footer that are not whole: a server is writing them, or
            died while it did. Says nothing bad.
        vanished: segments that a server evicted meanwhile.
        problems: one sentence per file that cannot be used or has bad blocks.
    """

    name: str
    good: int
    corrupt: int
    unreadable: int
    unfinished: int
    vanished: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.corrupt or self.unreadable or self.problems)


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What was removed of a namespace, or why nothing was: `refused` is a sentence naming the process that uses it."""

    name: str
    segments: int
    bytes: int
    refused: str


def namespaces(root: Path) -> list[str]:
    """Names of the namespaces under `root`: folders that a store made.

    Raises:
        SettingsError: `root` is not a folder or cannot be read.
    """
    try:
        return [path.name for path in folder.namespace_folders(root)]
    except OSError as e:
        raise SettingsError(f"{root} cannot be read ({e.strerror}); name a folder that --pd-ssd-path made.") from None


def stat(root: Path) -> FolderStat:
    """Sizes and counts, from headers and footers; block contents are not read. Changes nothing.

    Raises:
        SettingsError: `root` is not a folder or cannot be read.
    """
    found = [_stat(root / name) for name in namespaces(root)]
    info = os.statvfs(root)
    by_size = sorted(found, key=lambda namespace: (-namespace.bytes, namespace.name))
    return FolderStat(root, tuple(by_size), info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize)


def verify(root: Path, name: str, progress: Callable[[int, int], None] | None = None) -> VerifyResult:
    """Read every block and compare its checksum. Changes nothing; a server that uses the folder is not disturbed.

    Args:
        progress: called with bytes done and bytes in all, after each segment.

    Raises:
        SettingsError: no such namespace.
    """
    path = _namespace(root, name)
    files = _files(path)
    total, done = sum(file.size for file in files), 0
    good = corrupt = unreadable = unfinished = vanished = 0
    problems = []
    for file in files:
        try:
            with _opened(file) as read:
                found = recovery.read_segment(read, file.size)
                wrong: list[int] = []
                count = 0
                try:
                    for number, whole in recovery.intact(read, found, 0, _PORTION_BYTES):
                        count += 1
                        if not whole:
                            wrong.append(number)
                except OSError as e:
                    unreadable += len(found.entries.keys) - count
                    problems.append(f"{file.path} cannot be read ({e.strerror}).")
            # What a server is writing just now, or was writing when it died, need not be whole: the next start looks.
            tail = recovery.tail_start(found, SYNC_BYTES + BATCH_BYTES)
            torn = 0 if found.sealed else sum(number >= tail for number in wrong)
            good, unfinished, corrupt = good + count - len(wrong), unfinished + torn, corrupt + len(wrong) - torn
            if len(wrong) > torn:
                problems.append(f"{file.path} has {len(wrong) - torn} blocks that are not what was stored.")
        except FileNotFoundError:
            vanished += 1
        except (FormatError, OSError) as e:
            problems += _problem(file, e)
        done += file.size
        if progress is not None:
            progress(done, total)
    return VerifyResult(name, good, corrupt, unreadable, unfinished, vanished, tuple(problems))


def clear(root: Path, name: str) -> ClearResult:
    """Remove a namespace, unless a process uses it.

    Raises:
        SettingsError: no such namespace, or a file cannot be removed.
    """
    path = _namespace(root, name)
    try:
        lock = FolderLock.take(path)
        if lock is None:
            pid = holder(path)
            who = f"process {pid}" if pid else "a process"
            return ClearResult(name, 0, 0, f"{path} is in use by {who}; stop it first.")
        try:
            removed = folder.segment_files(path)
            for file in removed:
                folder.remove_file(file.path)
            folder.remove_namespace(path, lock)
        finally:
            lock.release()
    except OSError as e:
        raise SettingsError(f"{path} cannot be cleared ({e.strerror}); do it as the user that it belongs to.") from None
    return ClearResult(name, len(removed), sum(file.size for file in removed), "")


def _stat(path: Path) -> NamespaceStat:
    files = _files(path)
    keys: set[bytes] = set()
    sealed = block_bytes = 0
    times, problems = [], []
    for file in files:
        try:
            with _opened(file) as read:
                found = recovery.read_segment(read, file.size)
        except FileNotFoundError:
            continue
        except (FormatError, OSError) as e:
            problems += _problem(file, e)
            continue
        keys.update(found.entries.keys)
        sealed += found.sealed
        block_bytes = found.header.block_bytes
        times.append(found.header.created)
    return NamespaceStat(
        path.name,
        folder.read_about(path),
        holder(path),
        len(files),
        sealed,
        sum(file.size for file in files),
        len(keys),
        block_bytes,
        min(times, default=None),
        max(times, default=None),
        tuple(problems),
    )


def _namespace(root: Path, name: str) -> Path:
    known = namespaces(root)
    if name not in known:
        raise SettingsError(f"{root} has no namespace {name!r}{nearest(name, known)}.")
    return root / name


def _files(path: Path) -> tuple[SegmentFile, ...]:
    try:
        return folder.segment_files(path)
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise SettingsError(f"{path} cannot be read ({e.strerror}); look at it as the user it belongs to.") from None


@contextmanager
def _opened(file: SegmentFile) -> Iterator[recovery.Read]:
    """Reads of a file through the page cache, which is left as it was found.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(offset: int, length: int) -> memoryview:
        raw = bytearray()
        while len(raw) < length:
            part = os.pread(fd, length - len(raw), offset + len(raw))
            if not part:
                raise OSError(errno.EIO, "the file is shorter than it was")
            raw += part
        # A verification reads a whole disk once; what servers have in the cache is worth more.
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        return memoryview(raw)

    try:
        yield read
    finally:
        os.close(fd)


def _problem(file: SegmentFile, error: FormatError | OSError) -> list[str]:
    """One sentence; none for a file that is just being made or was just removed."""
    if isinstance(error, FormatError):
        return [f"{file.path} {error}."] if _still_there(file) else []
    return [f"{file.path} cannot be read ({error.strerror})."]


def _still_there(file: SegmentFile) -> bool:
    """It exists and is not so new that its first page may be on its way."""
    try:
        return time.time() - file.path.stat().st_mtime > _JUST_MADE_S
    except OSError:
        return False
