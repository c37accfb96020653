"""A disk that does not answer: the user goes on, and memory that was given back is never touched."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, LIMIT_S, Rig, config, content, key, until
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import Reason

pytestmark = pytest.mark.usefixtures("way")


def test_a_load_ends_by_its_deadline_and_its_targets_are_not_touched_afterwards(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(4))
        read = rig.disk.hang("read")
        ticket, targets = rig.begin_get(range(4), deadline_s=0.05)
        got = rig.wait(ticket)
        assert got.failed == {key(i): Reason.LATE for i in range(4)} and not got.ok
        assert got.seconds >= 0.05
        assert rig.store.stats().loads_failed == {Reason.LATE: 4}
        for target in targets:
            target[:] = b"n" * BLOCK
        read.release()
        # The reader that hung is free again, and has thrown away what it read.
        until(lambda: all(s.pins == 0 for s in rig.store._index.segments()), "the end of the read")
        assert all(bytes(target) == b"n" * BLOCK for target in targets)
        assert len(rig.get(range(4)).ok) == 4, "late blocks stay stored"


def test_the_other_readers_go_on(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(8))
        read = rig.disk.hang("read")
        late, _ = rig.begin_get([0], deadline_s=LIMIT_S)
        assert read.entered.wait(LIMIT_S)
        assert len(rig.get(range(1, 8)).ok) == 7
        read.release()
        assert rig.wait(late).ok == (key(0),)


def test_loads_that_wait_for_hung_readers_end_too_and_pin_nothing(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(40))
        read = rig.disk.hang("read", times=None)
        tickets = [rig.begin_get(range(40), deadline_s=0.05)[0] for _ in range(20)]
        assert {why for t in tickets for why in rig.wait(t).failed.values()} == {Reason.LATE}
        assert rig.store.stats().queued_load_bytes == 0
        assert sum(s.pins for s in rig.store._index.segments()) <= 2 * 16, "only what two readers are at"
        read.release()
        until(lambda: all(s.pins == 0 for s in rig.store._index.segments()), "the end of the reads")


def test_a_hung_write_holds_up_neither_loads_nor_the_user(tmp_path: Path) -> None:
    with Rig(config(tmp_path, put_wait_s=0.05)) as rig:
        rig.store_blocks(range(8))
        write = rig.disk.hang("write")
        for i in range(100, 200, 10):
            rig.begin_put(range(i, i + 10))
        assert write.entered.wait(LIMIT_S)
        assert len(rig.get(range(8)).ok) == 8
        assert rig.store.drain(LIMIT_S), "puts end without the disk"
        write.release()


def test_draining_cuts_short_what_does_not_end(tmp_path: Path) -> None:
    with Rig(config(tmp_path, put_wait_s=0.2)) as rig:
        rig.store_blocks(range(4))
        write, read = rig.disk.hang("write"), rig.disk.hang("read", times=None)
        load, targets = rig.begin_get(range(4), deadline_s=LIMIT_S)
        puts = [rig.begin_put(range(i, i + 10)) for i in range(100, 200, 10)]
        assert not rig.store.drain(0.05)
        ended = {result.ticket: result for result in rig.store.finished()}
        assert set(ended) == {load, *puts}
        assert set(ended[load].failed.values()) == {Reason.LATE}
        for target in targets:
            target[:] = b"n" * BLOCK
        write.release()
        read.release()
        assert rig.store.flush(LIMIT_S)
        assert all(bytes(target) == b"n" * BLOCK for target in targets)
        assert rig.store.drain(LIMIT_S)


def test_closing_does_not_wait_for_a_hung_disk_and_keeps_the_folder_locked(tmp_path: Path) -> None:
    rig = Rig(config(tmp_path))
    rig.store_blocks(range(4))
    write = rig.disk.hang("write")
    rig.put([10])
    assert write.entered.wait(LIMIT_S)
    rig.store.close(0.1)
    with pytest.raises(SettingsError, match="in use by process"):
        Rig(config(tmp_path))
    write.release()
    until(lambda: not any("ssd_write" in thread.name for thread in threading.enumerate()), "the writer's end")
    rig.disk.close()
    rig.store._lock.release()  # type: ignore[union-attr]


def test_a_load_that_is_under_way_at_the_end_is_told_so(tmp_path: Path) -> None:
    rig = Rig(config(tmp_path))
    rig.store_blocks(range(4))
    read = rig.disk.hang("read")
    ticket, _ = rig.begin_get([0], deadline_s=LIMIT_S)
    assert read.entered.wait(LIMIT_S)
    closing = threading.Thread(target=rig.store.close, args=(LIMIT_S,))
    closing.start()
    assert rig.wait(ticket).failed == {key(0): Reason.CLOSED}
    read.release()
    closing.join(LIMIT_S)
    rig.disk.close()
    with Rig(config(tmp_path)) as again:
        assert again.get([0]).ok and content(0)
