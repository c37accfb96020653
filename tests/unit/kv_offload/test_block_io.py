"""Every way of moving blocks, on a disk with O_DIRECT and in memory without, and the choice between them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.conformance.block_io import UNIT, BlockIOConformance, Memory, failed, written
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.block_io import aligned, choose, nixl_io
from vllm_pd.kv_offload.block_io.aligned import ALIGNMENT, StagingPool, file_system
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile
from vllm_pd.kv_offload.block_io.choose import IOBackend
from vllm_pd.kv_offload.block_io.merge import Request
from vllm_pd.kv_offload.block_io.nixl_agent import QUEUE, NixlAgent
from vllm_pd.kv_offload.block_io.nixl_io import NixlIO
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO, transfer

SHM = Path("/dev/shm")


def nixl_missing() -> bool:
    try:
        metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return True
    return False


needs_nixl = pytest.mark.skipif(nixl_missing(), reason="NIXL is not installed")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory."""
    path = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir=SHM))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "disk":
        return tmp_path
    where: Path = request.getfixturevalue("shm")
    return where


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a file system with O_DIRECT."""
    file = aligned.open_file(tmp_path / "probe", create_bytes=ALIGNMENT)
    file.close()
    (tmp_path / "probe").unlink()
    if not file.direct:
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    return tmp_path


class TestThreads(BlockIOConformance):
    @pytest.fixture
    def io(self) -> Iterator[BlockIO]:
        io = ThreadIO()
        yield io
        io.close()


class TestOneThread(BlockIOConformance):
    """The caller alone, and one helper: what a batch needs does not depend on how many there are."""

    @pytest.fixture
    def io(self) -> Iterator[BlockIO]:
        io = ThreadIO(threads=1)
        yield io
        io.close()


@needs_nixl
class TestNixl(BlockIOConformance):
    @pytest.fixture
    def io(self) -> Iterator[BlockIO]:
        io = NixlIO()
        yield io
        io.close()


def requests_of(memory: Memory, file: OpenFile, units: Sequence[int]) -> list[Request]:
    return [
        Request(file, unit * UNIT, UNIT, [at], [(memory.address + at * UNIT, UNIT)]) for at, unit in enumerate(units)
    ]


@needs_nixl
class TestNixlAgent:
    """What this project relies on in NIXL, shown of the one that is installed."""

    @pytest.fixture
    def agent(self) -> Iterator[NixlAgent]:
        agent = NixlAgent()
        yield agent
        agent.close()

    @pytest.mark.parametrize("bad", [200, 5000])
    @pytest.mark.parametrize("at", [0, 100, 899])
    def test_a_short_read_is_a_failure_and_nothing_is_under_way_then(
        self, agent: NixlAgent, disk: Path, bad: int, at: int
    ) -> None:
        io = ThreadIO()
        file, data = written(io, disk / "a")
        os.truncate(disk / "a", 200 * UNIT + 100)
        fds = {file: file.acquire()}
        memory, other = Memory(900), Memory(200)
        units = [unit % 200 for unit in range(900)]
        units[at] = bad
        assert not agent.transfer("READ", requests_of(memory, file, units), fds)
        before = bytes(memory.view)
        # The agent can go on, and what it had not begun of the failed batch does not come with the next one.
        assert agent.usable
        assert agent.transfer("READ", requests_of(other, file, range(200)), fds)
        assert other.view == data[: 200 * UNIT]
        assert memory.view == before
        file.release()
        file.close()
        io.close()

    def test_a_closed_descriptor_is_a_failure(self, agent: NixlAgent, disk: Path) -> None:
        io = ThreadIO()
        file, _ = written(io, disk / "a")
        memory = Memory(4)
        fd = os.dup(file.acquire())
        os.close(fd)
        assert not agent.transfer("READ", requests_of(memory, file, range(4)), {file: fd})
        file.release()
        file.close()
        io.close()

    def test_a_queue_that_overflows_is_a_failure_and_is_not_used_again(self, agent: NixlAgent, disk: Path) -> None:
        io = ThreadIO()
        file, _ = written(io, disk / "a")
        memory = Memory(QUEUE + 1)
        units = [at % 256 for at in range(QUEUE + 1)]
        fds = {file: file.acquire()}
        assert agent.transfer("READ", requests_of(memory, file, units[:QUEUE]), fds)
        assert not agent.transfer("READ", requests_of(memory, file, units), fds)
        assert not agent.usable
        file.release()
        file.close()
        io.close()

    def test_it_starts_no_thread(self) -> None:
        tasks = Path("/proc/self/task")
        NixlAgent().close()
        before = len(list(tasks.iterdir()))
        agent = NixlAgent()
        assert len(list(tasks.iterdir())) == before
        agent.close()


@needs_nixl
class TestNixlFallsBack:
    def test_where_the_kernel_gives_no_further_queue(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        io = NixlIO()
        file, data = written(io, disk / "a")

        def refused() -> NixlAgent:
            raise OSError(errno.EIO, "no queue")

        io._idle.clear()
        monkeypatch.setattr(nixl_io, "NixlAgent", refused)
        memory = Memory(8)
        for _ in range(2):
            memory.view[:] = bytes(len(memory.view))
            assert failed(io.read([memory.piece(file, 2 * at, at) for at in range(8)])) == [None] * 8
            assert all(memory.unit(at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in range(8))
        assert [record.message for record in caplog.records if "fs.aio-max-nr" in record.message] == [
            "The kernel may be out of queues for asynchronous I/O (no queue); some of it goes through threads, which "
            "is slower. Raise the sysctl fs.aio-max-nr."
        ]
        file.close()
        io.close()

    def test_when_a_transfer_breaks_its_agent(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        io = NixlIO()
        file, data = written(io, disk / "a")
        broken = io._idle[0]

        def breaks(*_: object) -> bool:
            broken.close()
            return False

        monkeypatch.setattr(broken, "transfer", breaks)
        memory = Memory(8)
        pieces = [memory.piece(file, 2 * at, at) for at in range(8)]
        assert failed(io.read(pieces)) == [None] * 8
        assert broken not in io._idle
        memory.view[:] = bytes(len(memory.view))
        assert failed(io.read(pieces)) == [None] * 8
        assert len(io._idle) == 1
        assert all(memory.unit(at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in range(8))
        file.close()
        io.close()


@needs_nixl
@pytest.mark.parametrize(("length", "through_nixl"), [(UNIT, True), (nixl_io.LONG_BYTES, False)])
def test_nixl_gets_many_small_requests_and_threads_get_long_ones(
    disk: Path, monkeypatch: pytest.MonkeyPatch, length: int, through_nixl: bool
) -> None:
    """Also those that neighbours make together."""
    io, count, each = NixlIO(), 4, length // UNIT
    file = io.open(disk / "a", create_bytes=2 * count * length)
    taken: list[str] = []
    for operation, plain in (("READ", "read"), ("WRITE", "write")):
        own = getattr(io._plain, plain)
        monkeypatch.setattr(io._plain, plain, lambda pieces, own=own, op=operation: taken.append(op) or own(pieces))
    memory = Memory(count * each)
    data = os.urandom(len(memory.view))
    memory.view[:] = data
    # Gaps between the requests, none between the pieces of each.
    places = [(2 * request * each + unit, request * each + unit) for request in range(count) for unit in range(each)]
    pieces = [memory.piece(file, place, at) for place, at in places]
    assert failed(io.write(pieces)) == [None] * len(pieces)
    memory.view[:] = bytes(len(data))
    assert failed(io.read(pieces)) == [None] * len(pieces)
    assert memory.view == data
    assert taken == ([] if through_nixl else ["WRITE", "READ"])
    file.close()
    io.close()


class TestTransfer:
    """The loop over a system call that moves less than was asked for."""

    def test_it_goes_on_until_all_is_moved(self, tmp_path: Path) -> None:
        io = ThreadIO()
        file, data = written(io, tmp_path / "a")
        calls: list[tuple[int, int]] = []

        def some(fd: int, views: list[memoryview], offset: int) -> int:
            """As preadv, but at most two units a call."""
            calls.append((offset, sum(map(len, views))))
            left, cut = 2 * UNIT, []
            for view in views:
                cut.append(view[:left])
                left -= len(cut[-1])
            return os.preadv(fd, cut, offset)

        memory = Memory(8)
        ranges = [(memory.address, 3 * UNIT), (memory.address + 4 * UNIT, 2 * UNIT)]
        assert transfer(file, 10 * UNIT, ranges, some, "read") is None
        assert calls == [(10 * UNIT, 5 * UNIT), (12 * UNIT, 3 * UNIT), (14 * UNIT, UNIT)]
        assert memory.unit(0, 3) + memory.unit(4, 2) == data[10 * UNIT : 15 * UNIT]
        assert memory.unit(3) == memory.unit(6) == bytes(UNIT)
        file.close()

    def test_a_write_that_stops_is_an_error(self, tmp_path: Path) -> None:
        file, _ = written(ThreadIO(), tmp_path / "a")
        moved = iter([UNIT, 0])
        error = transfer(file, 0, [(Memory(4).address, 4 * UNIT)], lambda *_: next(moved), "wrote")
        assert error is not None and error.errno == errno.EIO
        assert "wrote 4096 of 16384 bytes at offset 0" in str(error)
        file.close()


class TestChoice:
    @needs_nixl
    def test_auto_is_nixl_on_a_disk(self, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            io = choose.choose(IOBackend.AUTO, disk)
        assert io.name == "nixl-posix"
        assert [r.message for r in caplog.records if "Block files" in r.message] == [
            f"Block files in {disk} are read and written with NIXL (POSIX backend, O_DIRECT)."
        ]
        assert list(disk.iterdir()) == []
        io.close()

    def test_auto_is_threads_where_there_is_no_o_direct(self, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            io = choose.choose(IOBackend.AUTO, shm)
        assert io.name == "threads"
        assert [r.message for r in caplog.records if "Block files" in r.message] == [
            f"Block files in {shm} are read and written with threads: the file system does not support O_DIRECT."
        ]
        assert list(shm.iterdir()) == []
        io.close()

    def test_asking_for_nixl_where_it_cannot_work_is_an_error_with_the_reason(self, shm: Path) -> None:
        with pytest.raises(SettingsError, match=r"does not support O_DIRECT; use auto or threads\.$"):
            choose.choose(IOBackend.NIXL, shm)

    @pytest.mark.parametrize(
        ("version", "reason"),
        [("1.4.1", r"NIXL 1\.4 takes a short read for a success, 1\.5 or newer is needed"), (None, "not installed")],
    )
    def test_auto_is_threads_with_an_old_nixl_or_none(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str
    ) -> None:
        def installed(_: str) -> str:
            if version is None:
                raise metadata.PackageNotFoundError("nixl")
            return version

        monkeypatch.setattr(choose.metadata, "version", installed)
        io = choose.choose(IOBackend.AUTO, disk)
        assert io.name == "threads"
        io.close()
        with pytest.raises(SettingsError, match=reason):
            choose.choose(IOBackend.NIXL, disk)

    @needs_nixl
    def test_auto_is_threads_where_a_probe_gives_other_bytes(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choose.NixlAgent, "transfer", lambda *_: True)
        io = choose.choose(IOBackend.AUTO, disk)
        assert io.name == "threads"
        assert list(disk.iterdir()) == []
        io.close()

    def test_threads_need_no_probe(self, tmp_path: Path) -> None:
        io = choose.choose(IOBackend.THREADS, tmp_path / "does not exist")
        assert io.name == "threads"
        io.close()

    def test_an_unknown_name_is_an_error_that_names_the_nearest(self) -> None:
        assert IOBackend.parse("threads", "ssd.io") is IOBackend.THREADS
        with pytest.raises(
            SettingsError, match=r"^ssd\.io must be one of auto, nixl, threads, got 'thread' .*'threads'"
        ):
            IOBackend.parse("thread", "ssd.io")


class TestDirect:
    def test_a_file_system_that_refuses_o_direct_is_used_through_the_cache(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.preadv

        def refuses(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EINVAL, "larger sector")

        monkeypatch.setattr(aligned.os, "preadv", refuses)
        file = aligned.open_file(disk / "a", create_bytes=16 * UNIT)
        monkeypatch.setattr(aligned.os, "preadv", real)
        assert not file.direct
        assert file.alignment == 1
        fd = file.acquire()
        assert os.pwrite(fd, b"odd", 5) == 3
        file.release()
        file.close()

    def test_a_failing_disk_is_not_taken_for_one_that_refuses(
        self, disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.EIO, "bad sector")

        monkeypatch.setattr(aligned.os, "preadv", fails)
        with pytest.raises(OSError, match="bad sector"):
            aligned.open_file(disk / "a", create_bytes=16 * UNIT)
        assert not (disk / "a").exists()

    def test_memory_is_known_for_what_it_is(self, shm: Path) -> None:
        assert file_system(shm.stat().st_dev) == "tmpfs"
        assert file_system(os.makedev(4000, 1)) == ""


class TestStagingPool:
    def test_buffers_are_aligned_separate_and_of_equal_size(self) -> None:
        pool = StagingPool(3, 5000)
        buffers = [pool.take(0) for _ in range(3)]
        assert pool.take(0) is None
        addresses = [buffer.address for buffer in buffers if buffer is not None]
        assert len({*addresses}) == 3
        assert all(address % ALIGNMENT == 0 for address in addresses)
        assert pool.buffer_bytes == 8192
        for number, buffer in enumerate(buffers):
            assert buffer is not None and len(buffer.view) == 8192
            buffer.view[:] = bytes([number + 1]) * 8192
        assert all(set(buffer.view) == {number + 1} for number, buffer in enumerate(buffers) if buffer is not None)

    def test_a_buffer_that_is_not_given_back_is_not_given_out_again(self) -> None:
        pool = StagingPool(2, ALIGNMENT)
        hung = pool.take(0)
        assert hung is not None
        for _ in range(5):
            other = pool.take(0)
            assert other is not None and other.address != hung.address
            assert pool.take(0.001) is None
            other.give_back()

    def test_who_waits_gets_what_another_thread_gives_back(self) -> None:
        pool = StagingPool(1, ALIGNMENT)
        first = pool.take(0)
        assert first is not None
        got: list[object] = []
        waiter = threading.Thread(target=lambda: got.append(pool.take(30)))
        waiter.start()
        first.give_back()
        waiter.join(30)
        assert got == [first]

    @pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0)])
    def test_an_empty_pool_is_refused(self, count: int, size: int) -> None:
        with pytest.raises(ValueError, match="at least one"):
            StagingPool(count, size)


def test_helpers_that_hang_do_not_stop_another_batch(tmp_path: Path) -> None:
    """A batch whose file hangs takes every helper; the caller of the next batch does it alone."""
    io = ThreadIO(threads=2)
    file, data = written(io, tmp_path / "a")
    release, inside = threading.Event(), threading.Semaphore(0)

    def hang(fd: int, views: list[memoryview], offset: int) -> int:
        inside.release()
        release.wait(30)
        return os.preadv(fd, views, offset)

    memory = Memory(16)
    pieces = [memory.piece(file, 2 * at, at) for at in range(8)]
    stuck = threading.Thread(target=lambda: io._run(pieces, hang, "read"))
    stuck.start()
    for _ in range(3):
        assert inside.acquire(timeout=30)
    assert failed(io.read([memory.piece(file, 2 * at, 8 + at) for at in range(8)])) == [None] * 8
    assert all(memory.unit(8 + at) == data[2 * at * UNIT : (2 * at + 1) * UNIT] for at in range(8))
    release.set()
    stuck.join(30)
    assert not stuck.is_alive()
    file.close()
    io.close()
