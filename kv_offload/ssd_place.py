"""Opens the store of one namespace: checks the place, and chooses what moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_pd.kv_offload.block_io.base import BlockIO
from vllm_pd.kv_offload.block_io.choose import choose
from vllm_pd.kv_offload.segments import SegmentStore, StoreConfig
from vllm_pd.kv_offload.segments.folder import segment_files, unusable
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.kv_offload.ssd_namespace import Namespace


@dataclass(frozen=True, slots=True)
class Place:
    """A started store and what belongs to it.

    Attributes:
        folder: its namespace's.
        found_bytes: size of the segment files that were there.
    """

    store: SegmentStore
    io: BlockIO
    folder: Path
    found_bytes: int

    def close(self, timeout_s: float) -> None:
        """End the store, then what it moves bytes with. Idempotent."""
        self.store.close(timeout_s)
        self.io.close()


def open_place(ssd: SsdConfig, named: Namespace, block_bytes: int) -> Place:
    """Open the store of a namespace, or begin one.

    Args:
        block_bytes: of a block in memory and on the disk.

    Raises:
        SettingsError: the folder cannot be used, or another process uses it.
    """
    ssd.check_place()
    folder = ssd.root / named.name
    try:
        ssd.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        floor_bytes = ssd.floor()
        found = sum(file.size for file in segment_files(folder)) if folder.exists() else 0
        io = choose(ssd.backend, ssd.root)
    except OSError as e:
        raise unusable(ssd.root, e) from None
    try:
        config = StoreConfig(
            root=ssd.root,
            name=named.name,
            namespace=named.digest,
            block_bytes=block_bytes,
            budget_bytes=ssd.budget_bytes,
            floor_bytes=floor_bytes,
            max_segment_bytes=ssd.segment_bytes,
            readers=ssd.readers,
            about=named.about,
        )
        store = SegmentStore(config, io)
        store.start()
    except BaseException:
        io.close()
        raise
    return Place(store, io, folder, found)
