"""The wrapper with faults does what tests of the store rely on, and nothing else."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.block_io import UNIT, BlockIOConformance, Memory, failed, written
from tests.unit.kv_offload.faulty_io import FaultyIO
from vllm_pd.kv_offload.block_io.base import BlockIO
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO


@pytest.fixture
def faulty() -> Iterator[FaultyIO]:
    io = FaultyIO(ThreadIO())
    yield io
    io.close()


class TestWithoutFaults(BlockIOConformance):
    @pytest.fixture
    def io(self, faulty: FaultyIO) -> BlockIO:
        return faulty

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path


def test_the_chosen_operations_fail(faulty: FaultyIO, tmp_path: Path) -> None:
    file, _ = written(faulty, tmp_path / "a")
    memory = Memory(6)
    pieces = [memory.piece(file, 2 * at, at) for at in range(6)]
    fault = faulty.fail("read", skip=1, times=2, error=errno.ENOSPC)
    assert failed(faulty.read(pieces)) == [None, errno.ENOSPC, errno.ENOSPC, None, None, None]
    assert fault.hits == 2
    faulty.fail("sync")
    with pytest.raises(OSError):
        faulty.sync(file)
    faulty.sync(file)
    assert faulty.counts == {"open": 1, "read": 6, "write": 1, "sync": 2}


def test_a_short_operation_moves_half_and_says_so(faulty: FaultyIO, tmp_path: Path) -> None:
    file, data = written(faulty, tmp_path / "a")
    memory = Memory(8)
    faulty.cut_short("read")
    assert failed(faulty.read([memory.piece(file, 0, 0, 4), memory.piece(file, 8, 4, 4)])) == [errno.EIO, None]
    assert memory.view == data[: 2 * UNIT] + bytes(2 * UNIT) + data[8 * UNIT : 12 * UNIT]


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_flipped_bit_is_the_only_difference(faulty: FaultyIO, tmp_path: Path, op: str) -> None:
    file, data = written(faulty, tmp_path / "a")
    memory = Memory(2)
    faulty.flip_bit("read" if op == "read" else "write", skip=1, byte=5)
    if op == "write":
        content = memory.fill(3)
        assert failed(faulty.write([memory.piece(file, at, at) for at in range(2)])) == [None, None]
        assert bytes(memory.view) == content
    else:
        content = data[: 2 * UNIT]
    assert failed(faulty.read([memory.piece(file, at, at) for at in range(2)])) == [None, None]
    differing = [at for at, (is_, was) in enumerate(zip(memory.view, content, strict=True)) if is_ != was]
    assert differing == [UNIT + 5]


def test_a_hanging_operation_goes_on_when_released(faulty: FaultyIO, tmp_path: Path) -> None:
    file, data = written(faulty, tmp_path / "a")
    memory = Memory(1)
    fault = faulty.hang("read")
    results: list[OSError | None] = []
    reader = threading.Thread(target=lambda: results.extend(faulty.read([memory.piece(file, 3, 0)])))
    reader.start()
    assert fault.entered.wait(30)
    assert memory.unit(0) == bytes(UNIT) and results == []
    fault.release()
    reader.join(30)
    assert results == [None] and memory.unit(0) == data[3 * UNIT : 4 * UNIT]


@pytest.mark.parametrize("order", [None, random.Random(1)])
def test_a_crash_cuts_what_reaches_the_disk_at_that_byte(
    faulty: FaultyIO, tmp_path: Path, order: random.Random | None
) -> None:
    file, before = written(faulty, tmp_path / "a")
    memory = Memory(4)
    after = memory.fill(8)
    kept = UNIT + 100
    faulty.crash_after(kept, order)
    results = failed(faulty.write([memory.piece(file, at, at) for at in range(4)]))
    assert results.count(None) == 1 and faulty.crashed
    assert order is not None or results == [None, errno.EIO, errno.EIO, errno.EIO]
    on_disk = (tmp_path / "a").read_bytes()
    new = sum(is_ != was for is_, was in zip(on_disk, before, strict=True))
    # A random byte equals the one before it once in 256 times.
    assert 0.97 * kept < new <= kept
    assert all(is_ in pair for is_, *pair in zip(on_disk, before, after + before[len(after) :], strict=True))
    assert failed(faulty.write([memory.piece(file, 9, 0)])) == [errno.EIO]
    with pytest.raises(OSError, match="crashed"):
        faulty.sync(file)
    with pytest.raises(OSError, match="crashed"):
        faulty.open(tmp_path / "b", create_bytes=UNIT)
    assert (tmp_path / "a").read_bytes() == on_disk and not (tmp_path / "b").exists()
