"""The store's writes are ended at any moment: what is found afterwards is intact, and what was safe is there."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.unit.kv_offload.segments.power_cut import PowerCutDisk
from tests.unit.kv_offload.segments.rig import LIMIT_S, NAMESPACE, Rig, config, key, pinned, used
from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.base import Piece
from vllm_pd.kv_offload.segments import StoreConfig, folder
from vllm_pd.kv_offload.segments.adopt import Adoption
from vllm_pd.kv_offload.segments.batch import Batch
from vllm_pd.kv_offload.segments.counters import Complaints, Counters
from vllm_pd.kv_offload.segments.files import OpenFiles
from vllm_pd.kv_offload.segments.flight import IN_FLIGHT
from vllm_pd.kv_offload.segments.index import Index
from vllm_pd.kv_offload.segments.log import SegmentLog
from vllm_pd.kv_offload.segments.space import NoRoom

BLOCK = 4096
POINTS = 1000
PORTIONS = 10
BLOCKS = 120
"""Of one life, somewhat more than there is room for."""


def page(i: int) -> bytes:
    return i.to_bytes(8, "big") * (BLOCK // 8)


class Machine:
    """The write side of a store without threads, so that each operation of the disk is a moment to die at."""

    def __init__(self, settings: StoreConfig, disk: PowerCutDisk) -> None:
        self.config = settings
        self.disk = disk
        self.index = Index()
        self.files = OpenFiles(disk, 4)
        folder.make_folders(settings.root, settings.folder)
        (settings.folder / "lock").touch()
        self.found = folder.segment_files(settings.folder)
        self.counters = Counters()
        first_id = self.found[-1].id + 1 if self.found else 0
        self.log = SegmentLog(
            settings, disk, self.index, self.files, self.counters, Complaints(), first_id, lambda path: 1 << 40
        )
        size = Batch.bytes_for(settings.batch_blocks, settings.stride)
        # A batch stays in its memory until it has landed.
        self._memory = [AlignedMemory(size) for _ in range(IN_FLIGHT + 1)]
        self._turn = 0
        self._page = AlignedMemory(BLOCK)

    def recover(self) -> None:
        Adoption(self.config, self.disk, self.index, self.log, self.counters, Complaints(), pause=lambda: None).run(
            self.found
        )

    def append(self, numbers: list[int]) -> None:
        self._turn += 1
        batch = Batch(self._memory[self._turn % len(self._memory)].view, self.config.batch_blocks, self.config.stride)
        pages = np.frombuffer(b"".join(page(i) for i in numbers), np.uint8)
        addresses = np.array([pages.ctypes.data + n * BLOCK for n in range(len(numbers))], np.uint64)
        batch.add(NAMESPACE, [key(i) for i in numbers], addresses, BLOCK)
        self.log.land(IN_FLIGHT - 1)
        self.log.begin(batch, self._ended)

    def _ended(self, error: OSError | None) -> None:
        assert error is None or self.disk.off

    def bytes_of(self, i: int) -> bytes | None:
        """As a load finds them, without comparing the checksum; None if the block is not in the index."""
        group = pinned(self.index, i)
        if group is None:
            return None
        segment, [number] = group
        with self.files.lease(segment) as file:
            piece = Piece(file, segment.offset(number), self._page.address, BLOCK)
            assert self.disk.read([piece]) == [None]
        self.index.unpin([group])
        return bytes(self._page.view)

    def close(self) -> None:
        # What it still has under way ends, well or not.
        with suppress(OSError):
            self.log.sync()
        self.files.close_all()


def run_until_death(machine: Machine, rng: random.Random, numbers: range) -> set[int]:
    """Works until the power is off. Blocks that had been synced, or written where only the process dies."""
    safe: set[int] = set()
    todo = list(numbers)

    def there() -> set[int]:
        return {i for i in numbers if key(i) in machine.index}

    try:
        while todo and not machine.disk.off:
            count = rng.randint(1, machine.config.batch_blocks)
            part, todo = todo[:count], todo[count:]
            machine.append(part)
            machine.index.touch([key(i) for i in rng.sample(part, rng.randint(0, len(part)))])
            if rng.random() < 0.3:
                machine.log.sync()
            while machine.log.took_room and machine.log.make_room():
                pass
            if not machine.log.unsynced and not machine.disk.off:
                safe = there()
        if not todo:
            machine.log.finish()
            if not machine.disk.off:
                safe = there()
    except (OSError, NoRoom):
        pass
    # What left the index meanwhile was evicted on purpose.
    return there() if not machine.disk.loses else safe & there()


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_a_thousand_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    for point in range(portion, POINTS, PORTIONS):
        rng = random.Random(point)
        root = tmp_path / str(point)
        settings = config(root, block_bytes=BLOCK, budget_bytes=8 * 14 * BLOCK, batch_bytes=5 * BLOCK)
        numbers, safe = range(0), set[int]()
        # A second life over what the first one left, with an end of its own.
        for life in range(2):
            disk = PowerCutDisk(rng.randint(0, 120), rng, loses=point % 3 > 0)
            with monkeypatch.context() as patch:
                disk.take_over(patch)
                machine = Machine(settings, disk)
                machine.recover()
                left = {i for i in numbers if key(i) in machine.index}
                assert disk.off or safe <= left, f"point {point}: {sorted(safe - left)} were safe and are gone"
                numbers = range(1000 * life, 1000 * life + BLOCKS)
                safe = run_until_death(machine, rng, numbers)
                machine.close()
            disk.lose()
        checked = Machine(settings, PowerCutDisk(10**9, rng, loses=False))
        checked.recover()
        found = {
            i: checked.bytes_of(i) for i in [*range(BLOCKS), *range(1000, 1000 + BLOCKS)] if key(i) in checked.index
        }
        wrong = [i for i, data in found.items() if data != page(i)]
        assert not wrong, f"point {point}: {wrong} are promised and not what was stored"
        assert safe <= set(found), f"point {point}: {sorted(safe - set(found))} were safe and are gone"
        while checked.log.make_room():
            pass
        assert used(root) <= settings.budget_bytes
        checked.close()


def test_the_whole_store_dies_and_comes_back(tmp_path: Path) -> None:
    """With its threads, and the write that is under way cut at any byte."""
    for point in range(30):
        rng = random.Random(point)
        root = tmp_path / str(point)
        rig = Rig(config(root))
        rig.disk.crash_after(rng.randrange(300 * 8192), random.Random(point))
        safe: list[int] = []
        for first in range(0, 240, 12):
            rig.put(range(first, first + 12))
            if rng.random() < 0.7:
                rig.store.flush(LIMIT_S)
            if rig.disk.crashed:
                break
            rig.store.touch([key(i) for i in range(first, first + 3)])
            safe = rig.stored(range(240))
        safe = [i for i in safe if rig.store.contains(key(i))]
        rig.close()
        with Rig(config(root)) as again:
            has = again.stored(range(240))
            assert set(safe) <= set(has)
            assert len(again.get(has).ok) == len(has), "what is found is intact"
            again.store_blocks(range(500, 510))
            assert len(again.get(range(500, 510)).ok) == 10
