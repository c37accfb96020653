"""Memory and files that O_DIRECT accepts.

O_DIRECT wants addresses, offsets and lengths in multiples of the device's sector. 4096 covers every common device and
file system, and it is what blocks are padded to on the disk. A file system that wants more, or refuses O_DIRECT, is
used through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from pathlib import Path

from vllm_pd.kv_offload.block_io.base import OpenFile

ALIGNMENT = 4096

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
"""They hold files in memory. Linux lets tmpfs take O_DIRECT since 6.6, but it bypasses nothing there."""


class AlignedMemory:
    """Zeroed anonymous memory, page-aligned, in this process only; given back when the last view of it is gone.

    Attributes:
        address: of the first byte.
        view: all of it.
    """

    __slots__ = ("_map", "address", "view")

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The kernel pins every page of a direct transfer; huge ones are 512 times fewer. A hint: may be refused.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def touch(self) -> None:
        """Have all its pages now, before the first use and not in it: zeroes it, without Python's lock."""
        ctypes.memset(self.address, 0, len(self.view))


class Buffer:
    """One buffer of a `StagingPool`; `view` has exactly the pool's `buffer_bytes`."""

    __slots__ = ("_pool", "address", "view")

    def __init__(self, pool: StagingPool, address: int, view: memoryview) -> None:
        self._pool = pool
        self.address = address
        self.view = view

    def give_back(self) -> None:
        """The next `take` may have it. Only once, and only when no I/O touches it any more."""
        self._pool._give_back(self)


class StagingPool:
    """A fixed number of aligned buffers of equal size, cut from one mapping: the bound of what I/O holds in memory.

    A buffer under an I/O that hangs is simply not given back: the pool gets smaller, and nobody reuses the memory under
    the device's hands. Thread-safe.

    Args:
        count: how many.
        buffer_bytes: size of each; rounded up to the alignment.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        if count < 1 or buffer_bytes < 1:
            raise ValueError("a staging pool needs at least one buffer of at least one byte")
        self.count = count
        self.buffer_bytes = round_up(buffer_bytes)
        self._memory = AlignedMemory(count * self.buffer_bytes)
        self._free: deque[Buffer] = deque()
        for start in range(0, count * self.buffer_bytes, self.buffer_bytes):
            view = self._memory.view[start : start + self.buffer_bytes]
            self._free.append(Buffer(self, self._memory.address + start, view))
        self._changed = threading.Condition()

    def touch(self) -> None:
        """As `AlignedMemory.touch`: before the first `take`."""
        self._memory.touch()

    def take(self, timeout_s: float) -> Buffer | None:
        """A buffer with any contents, or None if none came free in time. 0 does not wait."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout_s):
                return None
            # The last one given back is the one most likely still in the processor's cache.
            return self._free.pop()

    def _give_back(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()


def round_up(size: int, to: int = ALIGNMENT) -> int:
    """The smallest multiple of `to` that is not below `size`."""
    return -(-size // to) * to


def open_file(path: Path, *, create_bytes: int | None) -> OpenFile:
    """What every backend's `BlockIO.open` does: create or open, reserve, turn O_DIRECT on where it works.

    Raises:
        OSError: as `BlockIO.open`.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    if create_bytes is not None:
        flags |= os.O_CREAT | os.O_EXCL
    fd = os.open(path, flags, 0o600)
    try:
        if create_bytes:
            # Before O_DIRECT: where the file system has no fallocate, glibc writes single bytes instead.
            os.posix_fallocate(fd, 0, create_bytes)
        direct = turn_direct_on(fd)
    except BaseException:
        os.close(fd)
        if create_bytes is not None:
            path.unlink()
        raise
    return OpenFile(path, fd, alignment=ALIGNMENT if direct else 1, direct=direct)


def turn_direct_on(fd: int) -> bool:
    """Sets O_DIRECT on a descriptor and says whether transfers in multiples of `ALIGNMENT` work and bypass the cache.

    A file system may accept the flag and refuse the transfer (a larger sector, FUSE), so one is tried: a read, which
    changes nothing.

    Raises:
        OSError: the disk failed.
    """
    if file_system(os.fstat(fd).st_dev) in MEMORY_FILE_SYSTEMS:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    try:
        os.preadv(fd, [AlignedMemory(ALIGNMENT).view], 0)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


def file_system(device: int) -> str:
    """Type of the mounted file system with this `st_dev` ("ext4", "tmpfs"), "" where the kernel does not tell."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw (proc(5)); the optional fields vary in number.
        if line.split(maxsplit=3)[2] == number:
            return line.partition(" - ")[2].split(maxsplit=1)[0]
    return ""
