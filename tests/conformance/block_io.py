"""What every `BlockIO` must do. A test module subclasses it; `io` and `folder` are fixtures."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import stat
import threading
from pathlib import Path

import pytest

from vllm_pd.kv_offload.block_io.aligned import ALIGNMENT, AlignedMemory
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile, Piece

UNIT = ALIGNMENT
PREAD = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ssize_t)
"""ssize_t pread(int fd, void *memory, size_t length, off_t offset)"""
FILE_BYTES = 256 * UNIT


class Memory(AlignedMemory):
    """Aligned memory in units, and what is in it."""

    def __init__(self, units: int) -> None:
        super().__init__(units * UNIT)

    def piece(self, file: OpenFile, unit: int, at: int, units: int = 1) -> Piece:
        """Unit number `unit` of the file and the `units - 1` after it, at unit number `at` of this memory."""
        return Piece(file, unit * UNIT, self.address + at * UNIT, units * UNIT)

    def fill(self, seed: int) -> bytes:
        """Random contents, also returned."""
        data = random.Random(seed).randbytes(len(self.view))
        self.view[:] = data
        return data

    def unit(self, at: int, units: int = 1) -> bytes:
        return bytes(self.view[at * UNIT : (at + units) * UNIT])


def written(io: BlockIO, path: Path, seed: int = 1) -> tuple[OpenFile, bytes]:
    """A new file of `FILE_BYTES` random bytes."""
    file = io.open(path, create_bytes=FILE_BYTES)
    memory = Memory(FILE_BYTES // UNIT)
    data = memory.fill(seed)
    assert io.write([memory.piece(file, 0, 0, FILE_BYTES // UNIT)]) == [None]
    return file, data


def failed(results: list[OSError | None]) -> list[int | None]:
    """The errno of each entry."""
    return [None if result is None else result.errno for result in results]


class BlockIOConformance:
    """Inherit where there are fixtures `io` and `folder`."""

    def test_a_new_file_is_private_and_all_of_it_is_reserved(self, io: BlockIO, folder: Path) -> None:
        file = io.open(folder / "new", create_bytes=FILE_BYTES)
        info = (folder / "new").stat()
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_size == FILE_BYTES
        assert info.st_blocks * 512 >= FILE_BYTES
        assert file.path == folder / "new"
        assert ALIGNMENT % file.alignment == 0
        file.close()

    def test_a_file_is_created_once_and_opened_only_if_it_exists(self, io: BlockIO, folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            io.open(folder / "a")
        io.open(folder / "a", create_bytes=FILE_BYTES).close()
        with pytest.raises(FileExistsError):
            io.open(folder / "a", create_bytes=FILE_BYTES)
        io.open(folder / "a").close()

    def test_a_file_that_does_not_fit_is_refused_and_leaves_nothing(self, io: BlockIO, folder: Path) -> None:
        with pytest.raises(OSError) as raised:
            io.open(folder / "huge", create_bytes=1 << 46)
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert not (folder / "huge").exists()

    def test_what_was_written_is_read_back_by_another_opening(self, io: BlockIO, folder: Path) -> None:
        file, data = written(io, folder / "a")
        io.sync(file)
        file.close()
        again = io.open(folder / "a")
        memory = Memory(FILE_BYTES // UNIT)
        assert io.read([memory.piece(again, 0, 0, FILE_BYTES // UNIT)]) == [None]
        assert memory.view == data
        again.close()
        assert (folder / "a").read_bytes() == data

    @pytest.mark.parametrize("units", [1, 4, 16])
    def test_scattered_pieces_of_several_files_keep_their_places(self, io: BlockIO, folder: Path, units: int) -> None:
        chance = random.Random(units)
        files = [io.open(folder / name, create_bytes=FILE_BYTES) for name in "abc"]
        places = [(file, unit) for file in files for unit in range(0, FILE_BYTES // UNIT, units)]
        source, target = Memory(len(places) * units), Memory(len(places) * units)
        data = source.fill(units)
        # Some neighbours in the file are neighbours in memory, most are not.
        chance.shuffle(places)
        places[: len(places) // 2] = sorted(places[: len(places) // 2], key=lambda p: (files.index(p[0]), p[1]))
        pieces = [source.piece(file, unit, at * units, units) for at, (file, unit) in enumerate(places)]
        assert failed(io.write(pieces)) == [None] * len(pieces)
        order = list(range(len(places)))
        chance.shuffle(order)
        results = io.read([target.piece(*places[at], at * units, units) for at in order])
        assert failed(results) == [None] * len(places)
        assert target.view == data
        for file in files:
            file.close()

    def test_one_place_can_be_read_into_two(self, io: BlockIO, folder: Path) -> None:
        file, data = written(io, folder / "a")
        memory = Memory(4)
        assert failed(io.read([memory.piece(file, 7, at) for at in (0, 2)])) == [None, None]
        assert memory.unit(0) == memory.unit(2) == data[7 * UNIT : 8 * UNIT]
        assert memory.unit(1) == bytes(UNIT)
        file.close()

    def test_a_batch_may_be_long_or_empty(self, io: BlockIO, folder: Path) -> None:
        assert io.read([]) == io.write([]) == []
        file, data = written(io, folder / "a")
        count = 1500
        memory = Memory(count)
        units = [(at * 7919) % (FILE_BYTES // UNIT) for at in range(count)]
        assert failed(io.read([memory.piece(file, unit, at) for at, unit in enumerate(units)])) == [None] * count
        assert all(memory.unit(at) == data[unit * UNIT : (unit + 1) * UNIT] for at, unit in enumerate(units))
        file.close()

    def test_a_truncated_file_is_an_error_where_bytes_are_missing_and_only_there(
        self, io: BlockIO, folder: Path
    ) -> None:
        file, data = written(io, folder / "a")
        os.truncate(folder / "a", 100 * UNIT + 100)
        memory = Memory(12)
        pieces = [memory.piece(file, unit, at) for at, unit in enumerate((97, 98, 99, 100, 101, 3, 255, 5))]
        # Neighbours of good ones, so that they are merged with them: 99 is whole, 100 is torn, 101 is gone.
        pieces.append(memory.piece(file, 98, 8, 4))
        results = failed(io.read(pieces))
        assert results == [None, None, None, errno.EIO, errno.EIO, None, errno.EIO, None, errno.EIO]
        for at, unit in ((0, 97), (1, 98), (2, 99), (5, 3), (7, 5)):
            assert memory.unit(at) == data[unit * UNIT : (unit + 1) * UNIT]
        file.close()

    def test_a_read_beyond_the_end_is_an_error_that_names_the_file(self, io: BlockIO, folder: Path) -> None:
        file, _ = written(io, folder / "a")
        memory = Memory(4)
        for pieces in (
            [memory.piece(file, 1000, 0)],
            [memory.piece(file, unit, at) for at, unit in enumerate((256, 1000, 5000))],
        ):
            for result in io.read(pieces):
                assert result is not None and result.errno == errno.EIO
                assert str(folder / "a") in str(result) and "0 of 4096 bytes" in str(result)
        file.close()

    def test_after_a_failed_batch_the_next_one_is_right(self, io: BlockIO, folder: Path) -> None:
        file, data = written(io, folder / "a")
        memory = Memory(32)
        for _ in range(5):
            bad = [memory.piece(file, 1000 + at, at) for at in range(16)]
            good = [memory.piece(file, 2 * at, 16 + at) for at in range(16)]
            assert failed(io.read(bad + good)) == [errno.EIO] * 16 + [None] * 16
            memory.view[:] = bytes(len(memory.view))
            assert failed(io.read(good)) == [None] * 16
            assert all(memory.unit(16 + at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in range(16))
        file.close()

    def test_a_closed_file_is_an_error_for_its_pieces_and_no_others(self, io: BlockIO, folder: Path) -> None:
        closed, _ = written(io, folder / "a")
        other, data = written(io, folder / "b", seed=2)
        closed.close()
        closed.close()
        memory = Memory(8)
        pieces = [memory.piece(file, 2 * at, at) for at, file in enumerate([closed, other] * 4)]
        assert failed(io.read(pieces)) == [errno.EBADF, None] * 4
        assert all(memory.unit(at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in (1, 3, 5, 7))
        assert failed(io.write(pieces)) == [errno.EBADF, None] * 4
        with pytest.raises(OSError) as raised:
            io.sync(closed)
        assert raised.value.errno == errno.EBADF
        other.close()

    def test_a_descriptor_that_somebody_closed_is_an_error(self, io: BlockIO, folder: Path) -> None:
        file, _ = written(io, folder / "a")
        # A number so high that nothing else in this process is given it in the meantime.
        fd = fcntl.fcntl(file.acquire(), fcntl.F_DUPFD, 700)
        gone = OpenFile(folder / "a", fd, alignment=file.alignment, direct=file.direct)
        os.close(fd)
        memory = Memory(4)
        assert failed(io.read([memory.piece(gone, 2 * at, at) for at in range(4)])) == [errno.EBADF] * 4
        file.release()
        file.close()

    def test_a_file_closed_during_reads_never_gives_bytes_of_the_next_file(self, io: BlockIO, folder: Path) -> None:
        right = {}
        for name in "ab":
            file, right[name] = written(io, folder / name, seed=ord(name))
            file.close()
        current = {"file": io.open(folder / "a"), "name": "a"}
        wrong: list[str] = []
        stop = threading.Event()

        def read() -> None:
            memory = Memory(16)
            while not stop.is_set():
                file, name = current["file"], current["name"]
                assert isinstance(file, OpenFile)
                if file.path.name != name:
                    continue
                results = io.read([memory.piece(file, 2 * at, at) for at in range(16)])
                for at, result in enumerate(results):
                    if result is None and memory.unit(at) != right[file.path.name][2 * at * UNIT : (2 * at + 1) * UNIT]:
                        wrong.append(file.path.name)
                    elif result is not None and result.errno != errno.EBADF:
                        wrong.append(repr(result))

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(60):
            before = current["file"]
            name = "ba"[turn % 2]
            current.update(file=io.open(folder / name), name=name)
            assert isinstance(before, OpenFile)
            before.close()
        stop.set()
        for reader in readers:
            reader.join(30)
        assert not wrong
        assert isinstance(current["file"], OpenFile)
        current["file"].close()

    def test_a_write_that_the_kernel_refuses_is_an_error_of_that_piece(self, io: BlockIO, folder: Path) -> None:
        good, data = written(io, folder / "a")
        written(io, folder / "b")[0].close()
        # A descriptor that is open for reading only refuses every write, whoever asks: a real error of the kernel's.
        flags = os.O_RDONLY | (os.O_DIRECT if good.direct else 0)
        bad = OpenFile(folder / "b", os.open(folder / "b", flags), alignment=good.alignment, direct=good.direct)
        memory = Memory(8)
        content = memory.fill(9)
        pieces = [memory.piece(file, 2 * at, at) for at, file in enumerate([good, bad] * 4)]
        assert failed(io.write(pieces)) == [None, errno.EBADF] * 4
        on_disk = (folder / "a").read_bytes()
        for at in range(0, 8, 2):
            assert on_disk[2 * at * UNIT : (2 * at + 1) * UNIT] == content[at * UNIT : (at + 1) * UNIT]
            assert on_disk[(2 * at + 1) * UNIT : (2 * at + 2) * UNIT] == data[(2 * at + 1) * UNIT : (2 * at + 2) * UNIT]
        assert failed(io.read(pieces)) == [None] * 8
        good.close()
        bad.close()

    def test_a_misaligned_piece_is_an_error_of_its_own_where_alignment_matters(self, io: BlockIO, folder: Path) -> None:
        file, data = written(io, folder / "a")
        memory = Memory(8)
        pieces = [memory.piece(file, 2 * at, at) for at in range(4)]
        pieces.insert(2, Piece(file, 33, memory.address + 5 * UNIT, 100))
        results = failed(io.read(pieces))
        assert results == [None, None, errno.EINVAL if file.direct else None, None, None]
        assert all(memory.unit(at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in range(4))
        file.close()

    def test_a_deleted_file_can_be_read_until_it_is_closed(self, io: BlockIO, folder: Path) -> None:
        file, data = written(io, folder / "a")
        (folder / "a").unlink()
        memory = Memory(4)
        assert failed(io.read([memory.piece(file, 3 * at, at) for at in range(4)])) == [None] * 4
        assert all(memory.unit(at) == data[3 * at * UNIT : (3 * at + 1) * UNIT] for at in range(4))
        file.close()

    def test_many_threads_move_their_own_bytes_at_once(self, io: BlockIO, folder: Path) -> None:
        threads, units = 8, 32
        file = io.open(folder / "a", create_bytes=threads * units * UNIT)
        wrong: list[object] = []

        def work(number: int) -> None:
            source, target = Memory(units), Memory(units)
            for turn in range(10):
                data = source.fill(number * 1000 + turn)
                # Every second unit of memory is swapped with its neighbour, so that nothing can be merged.
                at = [unit ^ 1 for unit in range(units)]
                base = number * units
                results = io.write([source.piece(file, base + unit, at[unit]) for unit in range(units)])
                results += io.read([target.piece(file, base + unit, at[unit]) for unit in range(units)])
                if any(results) or target.view != data:
                    wrong.append((number, turn, [result for result in results if result]))

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert not any(worker.is_alive() for worker in workers)
        assert not wrong
        file.close()

    def test_machine_code_reads_the_same_by_the_function_it_is_given(self, io: BlockIO, folder: Path) -> None:
        if not io.pread:
            pytest.skip("everything goes through `read`")
        file, data = written(io, folder / "a")
        memory, pread = Memory(4), PREAD(io.pread)
        fd = file.acquire()
        try:
            assert pread(fd, memory.address, 3 * UNIT, 5 * UNIT) == 3 * UNIT
            assert memory.unit(0, 3) == data[5 * UNIT : 8 * UNIT]
            assert pread(fd, memory.address, UNIT, FILE_BYTES) == 0
            assert pread(-1, memory.address, UNIT, 0) == -1
        finally:
            file.release()
            file.close()

    def test_after_close_nothing_is_moved(self, io: BlockIO, folder: Path) -> None:
        file, _ = written(io, folder / "a")
        memory = Memory(4)
        pieces = [memory.piece(file, 2 * at, at) for at in range(4)]
        assert failed(io.read(pieces)) == [None] * 4
        io.close()
        io.close()
        memory.view[:] = bytes(len(memory.view))
        assert failed(io.read(pieces)) == failed(io.write(pieces)) == [errno.EBADF] * 4
        assert memory.view == bytes(len(memory.view))
        file.close()
