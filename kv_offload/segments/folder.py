"""The folders on the disk: names of segment files, what they take, making and removing them.

ROOT/                      0700; budget and floor are for all below
  .budget                  locked for an instant while a process looks whether there is room and takes it
  NAME/                    0700, a namespace
    lock                   held by the process that uses it
    about.json             what it is, for people
    segment-000000000007.kv
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments.lock import LOCK_NAME, FolderLock, holder

ABOUT_NAME = "about.json"
BUDGET_LOCK = ".budget"
TEMPORARY_SUFFIX = ".tmp"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that say that there is no room for more."""

_SEGMENT = re.compile(r"segment-(\d{12,19})\.kv")


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file with the name of a segment; `written` is its modification time, seconds since 1970."""

    id: int
    path: Path
    size: int
    written: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What the folder of one namespace holds."""

    path: Path
    files: tuple[SegmentFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def segment_name(segment_id: int) -> str:
    return f"segment-{segment_id:012d}.kv"


def make_folders(root: Path, folder: Path) -> None:
    """Both private to this user.

    Raises:
        SettingsError: they cannot be made.
    """
    try:
        for path in (root, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
    except OSError as e:
        raise unusable(folder, e) from None


def unusable(folder: Path, error: OSError) -> SettingsError:
    """What to tell a user whose folder does not do."""
    if error.errno in FULL:
        remedy = "free some space there, or give --pd-ssd-path a folder on another disk"
    else:
        remedy = "give --pd-ssd-path a folder that this user can write"
    return SettingsError(f"The SSD tier cannot use {folder} ({error.strerror}); {remedy}.")


def lock_namespace(root: Path, folder: Path, timeout_s: float) -> FolderLock:
    """Make both folders and lock `folder`.

    Raises:
        SettingsError: they cannot be made, or another process uses this namespace; says what to do.
    """
    make_folders(root, folder)
    try:
        lock = FolderLock.take(folder, timeout_s)
    except FileNotFoundError:
        # Another process, short of space, saw an unused and empty namespace and removed it.
        return lock_namespace(root, folder, timeout_s)
    except OSError as e:
        raise unusable(folder, e) from None
    if lock is None:
        pid = holder(folder)
        who = f"process {pid}" if pid else "another process"
        raise SettingsError(
            f"The SSD tier's folder {folder} is in use by {who}; stop it, or give this server another --pd-ssd-path."
        )
    return lock


def segment_files(folder: Path) -> tuple[SegmentFile, ...]:
    """Files with a segment's name, oldest first. What vanishes meanwhile is passed over.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _SEGMENT.fullmatch(entry.name)
            if match is None:
                continue
            try:
                info = entry.stat(follow_symlinks=False)
                if not entry.is_file(follow_symlinks=False):
                    continue
            except OSError:
                continue
            found.append(SegmentFile(int(match[1]), Path(entry.path), info.st_size, info.st_mtime))
    return tuple(sorted(found, key=lambda file: file.id))


def namespace_folders(root: Path) -> Iterator[Path]:
    """Folders under `root` that a store made: they have its lock file.

    Raises:
        OSError: `root` cannot be read.
    """
    with os.scandir(root) as entries:
        listed = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in listed:
        if (root / name / LOCK_NAME).is_file():
            yield root / name


def usages(root: Path) -> list[Usage]:
    """All namespaces under `root`.

    Raises:
        OSError: `root` cannot be read.
    """
    found = []
    for folder in namespace_folders(root):
        try:
            found.append(Usage(folder, segment_files(folder)))
        except OSError:
            continue
    return found


def free_bytes(path: Path) -> int:
    """That this user may still take of the file system.

    Raises:
        OSError: it does not answer.
    """
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def cut_file(path: Path, size: int) -> None:
    """Let a file end at `size`.

    Raises:
        OSError: it does not.
    """
    os.truncate(path, size)


def remove_file(path: Path) -> None:
    """Remove a file that may be gone already.

    Raises:
        OSError: it is still there.
    """
    path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Names of files in it survive a power cut from now on.

    Raises:
        OSError: the disk failed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temporary(folder: Path) -> None:
    """What a process that died left half done, besides segments. The namespace is locked by the caller."""
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def write_about(folder: Path, about: Mapping[str, str]) -> None:
    """For people; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    temporary = folder / (ABOUT_NAME + TEMPORARY_SUFFIX)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(dict(about), file, indent=1, sort_keys=True)
    temporary.replace(folder / ABOUT_NAME)


def read_about(folder: Path) -> dict[str, str]:
    """Empty where there is nothing to read."""
    try:
        raw = json.loads((folder / ABOUT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in raw.items()} if isinstance(raw, dict) else {}


def remove_oldest_foreign(root: Path, own: Path) -> int:
    """Remove the oldest segment of the namespaces that no process uses; returns its bytes, 0 where there is none.

    A namespace that is emptied goes with its folder. Nobody can begin to use it meanwhile: it is locked here.
    """
    unused: list[tuple[float, Usage, FolderLock]] = []
    try:
        for path in namespace_folders(root):
            if path == own:
                continue
            with suppress(OSError):
                lock = FolderLock.take(path)
                if lock is not None:
                    # Looked at only now: until then a process may have used it and stored something.
                    files = _locked_files(path, lock)
                    unused.append((files[0].written if files else 0.0, Usage(path, files), lock))
        removed = 0
        for _, usage, lock in sorted(unused, key=lambda item: item[0]):
            left = len(usage.files)
            if left and not removed:
                removed = _remove(usage.files[0])
                left -= bool(removed)
            if not left:
                remove_namespace(usage.path, lock)
        return removed
    finally:
        for _, _, lock in unused:
            lock.release()


def _locked_files(folder: Path, lock: FolderLock) -> tuple[SegmentFile, ...]:
    """As `segment_files`; on an error the lock is given back."""
    try:
        return segment_files(folder)
    except OSError:
        lock.release()
        raise


def remove_namespace(folder: Path, lock: FolderLock) -> None:
    """Remove a folder without segments, which the caller has locked. What others put there stays, and so does it."""
    remove_temporary(folder)
    (folder / ABOUT_NAME).unlink(missing_ok=True)
    lock.release(remove=True)
    with suppress(OSError):
        folder.rmdir()


def _remove(file: SegmentFile) -> int:
    try:
        file.path.unlink()
    except OSError:
        return 0
    return file.size
