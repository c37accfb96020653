"""Which blocks have a file on the SSD, told as changes: what earlier runs left, what is written, what is deleted.

Files may come and go by other hands: another server may use the same folder. So every scan of the folder, which the
budget makes anyway, is compared with what was said before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice

from vllm_pd.kv_offload.ssd_budget import BLOCK_SUFFIX
from vllm_pd.vllm_compat import make_offload_key

Key = bytes
"""vLLM's OffloadKey: block hash and KV cache group."""


class SsdInventory:
    """The files of one kind of block. Thread-safe: the budget's thread scans, the scheduler's writes and asks.

    Args:
        folder: where vLLM's file tier keeps these blocks; paths elsewhere are passed over.
    """

    def __init__(self, folder: str) -> None:
        self._prefix = folder.rstrip("/") + "/"
        self._lock = threading.Lock()
        self._there: set[Key] = set()
        self._changes: dict[Key, bool] = {}
        self._before_scan: set[Key] = set()

    def scan_begins(self) -> None:
        with self._lock:
            self._before_scan = set(self._there)

    def found(self, path: str) -> None:
        """A block file that a scan came across."""
        if (key := self._key(path)) is not None:
            self._before_scan.discard(key)
            self.written((key,))

    def scan_ended(self) -> None:
        """The folder was seen whole: what was there before it began and was not found is gone."""
        with self._lock:
            gone, self._before_scan = self._before_scan, set()
            for key in gone:
                self._drop(key)

    def deleted(self, path: str) -> None:
        if (key := self._key(path)) is not None:
            with self._lock:
                self._drop(key)

    def written(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if key not in self._there:
                    self._there.add(key)
                    self._changes[key] = True

    def take_changes(self, limit: int) -> tuple[list[Key], list[Key]]:
        """Up to `limit` blocks whose file came or went since this was last asked: (came, went)."""
        with self._lock:
            taken = dict(islice(self._changes.items(), limit))
            for key in taken:
                del self._changes[key]
        return [key for key, there in taken.items() if there], [key for key, there in taken.items() if not there]

    def _drop(self, key: Key) -> None:
        if key in self._there:
            self._there.remove(key)
            self._changes[key] = False

    def _key(self, path: str) -> Key | None:
        """`<folder>/<hhh>/<hh>_g<group>/<hash>.bin` as vLLM names it; None for any other file."""
        if not path.startswith(self._prefix) or not path.endswith(BLOCK_SUFFIX):
            return None
        # A scan asks this of every file in the engine's process: no path objects.
        folder, _, name = path.rpartition("/")
        _, mark, group = folder.rpartition("/")[2].rpartition("_g")
        try:
            key: Key = make_offload_key(bytes.fromhex(name.removesuffix(BLOCK_SUFFIX)), int(group) if mark else -1)
        except (ValueError, OverflowError):
            return None
        return key
