"""What the disk gives: O_DIRECT through Linux' asynchronous I/O, with no format, index, checksum or Python per request.

Requests are laid out in memory before the clock starts; the loop only hands them on and counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Sequence

import numpy as np

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory

READ, WRITE = 0, 1
IN_FLIGHT_BYTES = 32 << 20
MOST_IN_FLIGHT = 256

# linux/aio_abi.h, as it is on little-endian machines; 64 bytes.
_IOCB = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("rw_flags", "u4"),
        ("opcode", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("buffer", "u8"),
        ("bytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags", "u4"),
        ("event_fd", "u4"),
    ]
)
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("result2", "i8")])

# io_setup, io_destroy, io_submit, io_getevents (asm/unistd.h)
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}


class RawQueue:
    """The kernel's queue, made once: opening and closing it takes longer than many a transfer."""

    def __init__(self) -> None:
        self._setup, self._destroy, self._submit, self._wait = _CALLS[platform.machine()]
        self._context = ctypes.c_ulong(0)
        _call(self._setup, ctypes.c_uint(MOST_IN_FLIGHT), ctypes.byref(self._context))

    def move(self, fd: int, opcode: int, memory: AlignedMemory, size: int, order: Sequence[int]) -> float:
        """Move units of `size` bytes between a file and the same offsets of memory.

        Args:
            fd: open with O_DIRECT.
            order: numbers of the units, in the order in which they are begun.

        Returns:
            Seconds.

        Raises:
            OSError: a request failed or was short.
        """
        requests = np.zeros(len(order), _IOCB)
        requests["opcode"], requests["fd"], requests["bytes"] = opcode, fd, size
        requests["offset"] = np.asarray(order, np.int64) * size
        requests["buffer"] = requests["offset"].astype(np.uint64) + np.uint64(memory.address)
        pointers = requests.ctypes.data + np.arange(len(order), dtype=np.uint64) * np.uint64(_IOCB.itemsize)
        depth = max(4, min(MOST_IN_FLIGHT, IN_FLIGHT_BYTES // size, len(order)))
        events = np.zeros(depth, _EVENT)
        began = time.perf_counter()
        given = done = 0
        while done < len(order):
            room = min(depth - (given - done), len(order) - given)
            if room:
                given += _call(self._submit, self._context, ctypes.c_long(room), _at(pointers.ctypes.data + 8 * given))
            # Waiting for several at once keeps the calls few, and the queue half full at least.
            least = max(1, min(depth // 2, given - done))
            count = _call(
                self._wait, self._context, ctypes.c_long(least), ctypes.c_long(depth), _at(events.ctypes.data), None
            )
            if (events["result"][:count] != size).any():
                raise OSError(f"a raw request of {size} bytes moved {events['result'][:count].min()}")
            done += count
        return time.perf_counter() - began

    def close(self) -> None:
        _call(self._destroy, self._context)


def _at(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
