"""One process for each namespace: an advisory lock on a file, held for life. The kernel ends it with the process."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

LOCK_NAME = "lock"

_TRY_S = 0.05


class FolderLock:
    """An exclusive lock on a folder. Taken by `take`, given back by `release`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, folder: Path, timeout_s: float = 0.0, name: str = LOCK_NAME) -> FolderLock | None:
        """Lock `folder`, which exists; None if another process has it for longer than `timeout_s`.

        Raises:
            OSError: the lock file cannot be made.
        """
        path = folder / name
        deadline = time.monotonic() + timeout_s
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
            except OSError:
                os.close(fd)
                raise
            else:
                # Between our open and our lock the holder may have removed the file with its folder: then this is a
                # lock on nothing, and another process can have one on a new file of that name.
                if _is_at(fd, path):
                    # In place and of one length, so that who looks meanwhile reads a whole number. The lock holds
                    # without it: on a full disk there may be no room even for this.
                    with suppress(OSError):
                        os.pwrite(fd, f"{os.getpid():<19}\n".encode(), 0)
                    return cls(path, fd)
                os.close(fd)
                continue
            if time.monotonic() >= deadline:
                return None
            time.sleep(_TRY_S)

    def release(self, *, remove: bool = False) -> None:
        """Idempotent.

        Args:
            remove: the folder is being removed: take the lock file away first, so that nobody waits for it.
        """
        if self._fd < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        os.close(fd)


def holder(folder: Path) -> int | None:
    """Pid of the process that holds the lock of `folder`; None when nobody does. 0 when it cannot be told who.

    Looking takes a shared lock for an instant. A server that starts in that instant tries again.
    """
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    except OSError:
        return 0
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
