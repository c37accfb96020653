"""Long runs of neighbours are read in one call with what comes after it, many small requests by `BlockIO`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import Rig, config, key, segment_paths
from vllm_pd.kv_offload.block_io.base import Piece
from vllm_pd.kv_offload.segments import Reason

BLOCK = 128 << 10


class Watched(Rig):
    """A rig that knows how many pieces were read by `BlockIO.read`."""

    pieces = 0

    def watch(self) -> None:
        read = self.disk.read

        def counted(pieces: list[Piece]) -> list[OSError | None]:
            self.pieces += len(pieces)
            return read(pieces)

        self.disk.read = counted  # type: ignore[assignment, method-assign]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Watched]:
    """16 blocks that are neighbours, and those of another prompt."""
    sizes = {"budget_bytes": 512 * BLOCK, "batch_bytes": 32 * BLOCK, "staging_bytes": 96 * BLOCK}
    with Watched(config(tmp_path, block_bytes=BLOCK, read_bytes=32 * BLOCK, **sizes)) as rig:
        rig.store_blocks(range(16))
        rig.store_blocks(range(16, 32))
        rig.watch()
        yield rig


def test_neighbours_are_read_without_asking_for_pythons_lock(rig: Watched) -> None:
    assert len(rig.get(range(16)).ok) == 16
    assert rig.pieces == 0


def test_blocks_that_lie_alone_are_in_flight_at_once(rig: Watched) -> None:
    alone = range(0, 32, 2)
    assert len(rig.get(alone).ok) == len(alone)
    assert rig.pieces == len(alone)


def test_what_may_not_be_read_so_is_read_by_block_io(rig: Watched) -> None:
    rig.disk.pread = 0
    assert len(rig.get(range(16)).ok) == 16
    assert rig.pieces > 0


def test_a_cut_file_costs_the_blocks_beyond_its_end_and_says_why(
    rig: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = segment_paths(rig.config.root)
    numbers = range(32)
    os.truncate(path, 24 * BLOCK)
    got = rig.get(numbers)
    assert set(got.failed.values()) == {Reason.READ_FAILED} and key(31) in got.failed
    assert len(got.ok) == 32 - len(got.failed) >= 16
    assert rig.stored(numbers) == [i for i in numbers if key(i) not in got.failed]
    assert "no more came" in caplog.text


def test_a_flipped_bit_in_a_long_run_costs_one_block(rig: Watched) -> None:
    rig.disk.flip_bit("read", byte=5 * BLOCK + 99)
    got = rig.get(range(16))
    assert got.failed == {key(5): Reason.CORRUPT} and len(got.ok) == 15
