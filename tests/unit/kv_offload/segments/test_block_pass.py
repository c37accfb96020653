"""Blocks are read, summed and copied in one call, and never where the gate is closed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_pd.kv_offload.block_io.aligned import AlignedMemory
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO
from vllm_pd.kv_offload.segments import block_pass, checksum
from vllm_pd.kv_offload.segments.block_pass import DONE, IN_MEMORY, REFUSED, UNREAD, Runs
from vllm_pd.kv_offload.segments.gate import Gate, _compiled

PAGE = 4096
PREAD = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ssize_t)
KEYS = [b"one", b"two", b"three"]
SEEDS = checksum.seeds(b"n" * 32, KEYS)


def memory(pages: int) -> NDArray[np.uint8]:
    """Zeros that begin where a page does, as all memory of the store does."""
    return np.frombuffer(AlignedMemory(pages * PAGE).view, np.uint8)


def three_blocks() -> NDArray[np.uint8]:
    found = memory(3)
    found[:] = np.random.default_rng(1).integers(0, 256, len(found))
    return found


def targets(size: int, shift: int = 0) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64]]:
    """Memory for three blocks, and its addresses."""
    blocks = [memory(2)[shift:] for _ in KEYS]
    return blocks, np.array([block.ctypes.data for block in blocks], np.uint64)


def enter(gate: Gate) -> None:
    _compiled()(gate.address, 1)


def leave(gate: Gate) -> None:
    _compiled()(gate.address, -1)


@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("size", [PAGE, PAGE - 100], ids=["whole pages", "padded"])
def test_what_is_in_memory_is_summed_and_copied_and_what_has_no_source_is_left_alone(size: int, shift: int) -> None:
    source, (blocks, addresses) = three_blocks(), targets(size, shift)
    wanted = checksum.sums(source.ctypes.data, PAGE, SEEDS)
    sources = checksum.addresses(source.ctypes.data, PAGE, 3)
    sources[2] = 0
    sums, states = block_pass.run(sources, addresses, PAGE, size, SEEDS, padded_sources=True)
    assert states.tolist() == [DONE, DONE, UNREAD]
    assert sums[:2].tolist() == wanted[:2].tolist()
    for i in range(2):
        assert blocks[i][:size].tobytes() == source[i * PAGE :][:size].tobytes()
    assert not any(block[size:].any() for block in blocks) and not blocks[2].any()


def test_nothing_is_written_behind_a_closed_gate() -> None:
    source, (blocks, addresses) = three_blocks(), targets(PAGE)
    opened, closed = Gate(), Gate()
    assert closed.close()
    gates = np.array([opened.address, closed.address, opened.address], np.uint64)
    sources = checksum.addresses(source.ctypes.data, PAGE, 3)
    _, states = block_pass.run(sources, addresses, PAGE, PAGE, SEEDS, padded_sources=True, gates=gates)
    assert states.tolist() == [DONE, REFUSED, DONE]
    assert not blocks[1].any() and blocks[2].tobytes()[:PAGE] == source[2 * PAGE :].tobytes()
    assert opened.close(), "who entered has left"


def test_a_gate_is_closed_once_nobody_is_inside() -> None:
    gate = Gate()
    enter(gate)
    enter(gate)
    assert not gate.close()
    leave(gate)
    assert not gate.close()
    leave(gate)
    assert gate.close() and gate.close()


@pytest.fixture
def file(tmp_path: Path) -> int:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(PAGE) + three_blocks().tobytes())
    return os.open(path, os.O_RDONLY)


def test_runs_are_read_one_after_the_other_to_the_same_place(file: int) -> None:
    buffer, (blocks, addresses) = memory(2), targets(PAGE)
    base = buffer.ctypes.data
    runs = Runs(np.array([file, file], np.int32), np.array([2 * PAGE, PAGE]), np.array([2, 1]))
    sources = np.array([base, base + PAGE, base], np.uint64)
    sums, states = block_pass.run(
        sources, addresses, PAGE, PAGE, SEEDS, padded_sources=True, runs=runs, pread=ThreadIO.pread
    )
    assert states.tolist() == [DONE] * 3
    for block, number in zip(blocks, (1, 2, 0), strict=True):
        assert block[:PAGE].tobytes() == three_blocks()[number * PAGE :][:PAGE].tobytes()
    assert sums.tolist() == [
        int(checksum.sums(block.ctypes.data, PAGE, SEEDS[i : i + 1])[0]) for i, block in enumerate(blocks)
    ]


@pytest.mark.parametrize("fault", ["beyond the end", "no such descriptor", "not open"])
def test_a_run_that_cannot_be_read_is_unread_and_the_others_are_not_lost(file: int, fault: str) -> None:
    buffer, (blocks, addresses) = memory(2), targets(PAGE)
    base = buffer.ctypes.data
    fd = {"beyond the end": file, "no such descriptor": 1 << 20, "not open": -2}[fault]
    runs = Runs(np.array([fd, file], np.int32), np.array([3 * PAGE, PAGE]), np.array([2, 1]))
    sources = np.array([base, base + PAGE, base], np.uint64)
    _, states = block_pass.run(
        sources, addresses, PAGE, PAGE, SEEDS, padded_sources=True, runs=runs, pread=ThreadIO.pread
    )
    assert states.tolist() == [UNREAD, UNREAD, DONE]
    assert not blocks[0].any() and not blocks[1].any()


def test_a_read_goes_on_where_less_came_than_was_asked_for(file: int) -> None:
    asked: list[tuple[int, int]] = []

    @PREAD
    def page_by_page(fd: int, address: int, length: int, offset: int) -> int:
        asked.append((length, offset))
        return os.preadv(fd, [(ctypes.c_ubyte * PAGE).from_address(address)], offset)

    buffer, (blocks, addresses) = memory(3), targets(PAGE)
    runs = Runs(np.array([file], np.int32), np.array([PAGE]), np.array([3]))
    _, states = block_pass.run(
        checksum.addresses(buffer.ctypes.data, PAGE, 3),
        addresses,
        PAGE,
        PAGE,
        SEEDS,
        padded_sources=True,
        runs=runs,
        pread=ctypes.cast(page_by_page, ctypes.c_void_p).value or 0,
    )
    assert states.tolist() == [DONE] * 3 and len(asked) == 3
    assert b"".join(block.tobytes()[:PAGE] for block in blocks) == three_blocks().tobytes()


def test_what_is_in_memory_and_what_is_not_go_together(file: int) -> None:
    buffer, (blocks, addresses) = three_blocks(), targets(PAGE)
    runs = Runs(np.array([IN_MEMORY, file], np.int32), np.array([0, PAGE]), np.array([2, 1]))
    sources = checksum.addresses(buffer.ctypes.data, PAGE, 3)
    _, states = block_pass.run(
        sources, addresses, PAGE, PAGE, SEEDS, padded_sources=True, runs=runs, pread=ThreadIO.pread
    )
    assert states.tolist() == [DONE] * 3
    assert blocks[2][:PAGE].tobytes() == three_blocks()[:PAGE].tobytes()


class Long:
    """A block that is longer than a request, as a file, and what reads it piece by piece."""

    def __init__(self, path: Path) -> None:
        self.stride = 6 * PAGE
        self.content = np.random.default_rng(2).bytes(self.stride)
        path.write_bytes(self.content)
        self.fd = os.open(path, os.O_RDONLY)
        self.buffer, self.target = memory(6), memory(6)
        self.gate = Gate()
        self.asked: list[int] = []
        self.before_read: Callable[[int], int | None] = lambda offset: None

    def run(self) -> tuple[int, int]:
        """Its sum and its state."""

        @PREAD
        def pread(fd: int, address: int, length: int, offset: int) -> int:
            self.asked.append(length)
            if (answer := self.before_read(offset)) is not None:
                return answer
            return os.preadv(fd, [(ctypes.c_ubyte * length).from_address(address)], offset)

        sums, states = block_pass.run(
            np.array([self.buffer.ctypes.data], np.uint64),
            np.array([self.target.ctypes.data], np.uint64),
            self.stride,
            self.stride,
            SEEDS[:1],
            padded_sources=True,
            gates=np.array([self.gate.address], np.uint64),
            runs=Runs(np.array([self.fd], np.int32), np.array([0]), np.array([1])),
            pread=ctypes.cast(pread, ctypes.c_void_p).value or 0,
            request=4 * PAGE,
        )
        return int(sums[0]), int(states[0])


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Long]:
    found = Long(tmp_path / "block")
    yield found
    os.close(found.fd)


def test_a_long_block_is_read_in_pieces_and_its_sum_is_that_of_the_whole(long: Long) -> None:
    wanted = memory(6)
    wanted[:] = np.frombuffer(long.content, np.uint8)
    found, state = long.run()
    assert (state, long.asked) == (DONE, [4 * PAGE, 2 * PAGE])
    assert found == int(checksum.sums(wanted.ctypes.data, long.stride, SEEDS[:1])[0])
    assert long.target.tobytes() == long.content
    assert not long.buffer[4 * PAGE :].any(), "each piece comes to the same place"
    assert long.gate.close(), "who entered has left"


def test_a_long_block_is_left_alone_from_the_moment_on_when_its_gate_is_closed(long: Long) -> None:
    def close_before_the_second_piece(offset: int) -> None:
        if offset:
            assert long.gate.close(), "nobody is inside while a piece is read"

    long.before_read = close_before_the_second_piece
    _, state = long.run()
    assert state == REFUSED
    assert not long.target[4 * PAGE :].any()


@pytest.mark.parametrize("answer", [-1, 0, 100], ids=["error", "end of file", "part of a sector"])
def test_a_long_block_whose_later_piece_cannot_be_read_is_unread(long: Long, answer: int) -> None:
    long.before_read = lambda offset: answer if offset else None
    _, state = long.run()
    assert state == UNREAD and long.gate.close()
