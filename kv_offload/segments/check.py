"""Looks at the folder of a store from outside, also while a server uses it: sizes, contents, and clearing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import folder, recovery
from vllm_pd.kv_offload.segments.config import MIB
from vllm_pd.kv_offload.segments.folder import SegmentFile
from vllm_pd.kv_offload.segments.format import FormatError
from vllm_pd.kv_offload.segments.lock import FolderLock, holder
from vllm_pd.layered import nearest

_PORTION_BYTES = 8 * MIB
_JUST_MADE_S = 5.0

_Seen = TypeVar("_Seen")


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
        unfinished: blocks of a segment without footer that are not whole: a server is writing them, or died while it
            did. Says nothing bad.
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
    files = _files(_namespace(root, name))
    total, done, vanished = sum(file.size for file in files), 0, 0
    seen, problems = list[_Contents](), list[str]()
    for file in files:
        try:
            contents = _look(file, _contents)
            if contents is None:
                vanished += 1
            else:
                seen.append(contents)
                problems += [f"{file.path} {text}." for text in contents.problems]
        except (FormatError, OSError) as e:
            problems += _problem(file, e)
        done += file.size
        if progress is not None:
            progress(done, total)
    return VerifyResult(
        name,
        good=sum(contents.good for contents in seen),
        corrupt=sum(contents.corrupt for contents in seen),
        unreadable=sum(contents.unreadable for contents in seen),
        unfinished=sum(contents.unfinished for contents in seen),
        vanished=vanished,
        problems=tuple(problems),
    )


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
            found = _look(file, recovery.read_segment)
        except (FormatError, OSError) as e:
            problems += _problem(file, e)
            continue
        if found is None:
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


@dataclass(frozen=True, slots=True)
class _Contents:
    """Of one segment: numbers of blocks as in `VerifyResult`, and what is wrong, to go on after its name."""

    good: int
    corrupt: int
    unreadable: int
    unfinished: int
    problems: tuple[str, ...]


def _contents(read: recovery.Read, size: int) -> _Contents:
    found = recovery.read_segment(read, size)
    wrong, seen, problems = 0, 0, list[str]()
    try:
        for _, whole in recovery.intact(read, found, _PORTION_BYTES):
            seen += 1
            wrong += not whole
    except OSError as e:
        if e.errno == errno.ENODATA:
            raise
        problems.append(f"cannot be read ({e.strerror})")
    # What a server is writing just now, or was writing when it died, need not be whole: the next start looks.
    corrupt, unfinished = (wrong, 0) if found.sealed else (0, wrong)
    if corrupt:
        problems.append(f"has {corrupt} blocks that are not what was stored")
    return _Contents(seen - wrong, corrupt, len(found.entries.keys) - seen, unfinished, tuple(problems))


def _look(file: SegmentFile, what: Callable[[recovery.Read, int], _Seen]) -> _Seen | None:
    """What `what` makes of a file, read through the page cache; None if there is no such file any more.

    A server may finish the file meanwhile, which makes it shorter: then it is looked at once more.

    Raises:
        FormatError, OSError: as `what`, or it cannot be opened.
    """
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        try:
            return what(_reader(fd), size)
        except (FormatError, OSError):
            if (now := os.fstat(fd).st_size) == size:
                raise
            return what(_reader(fd), now)
    finally:
        os.close(fd)


def _reader(fd: int) -> recovery.Read:
    def read(offset: int, length: int) -> memoryview:
        raw = bytearray()
        while len(raw) < length:
            part = os.pread(fd, length - len(raw), offset + len(raw))
            if not part:
                raise OSError(errno.ENODATA, "it ends too early")
            raw += part
        # A verification reads a whole disk once; what servers have in the cache is worth more.
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        return memoryview(raw)

    return read


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
