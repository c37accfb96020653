"""What a failing, slow or lying disk does to a server: right bytes or a miss, the right count, one plain sentence."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.kv_offload.engine import Request, key
from tests.unit.kv_offload.faulty_io import FaultyIO
from tests.unit.kv_offload.tiered import CHUNKS, Engine, blocks, segments, until
from vllm_pd.kv_offload import ssd_tier, tier_breaker

pytestmark = pytest.mark.vllm

Start = Callable[..., Engine]


def stored(engine: Engine, numbers: list[int]) -> torch.Tensor:
    """These blocks are on the SSD and not in host memory; returns the cache as it was."""
    original = engine.cache.clone()
    request = engine.request("stored")
    for first in range(0, len(numbers), CHUNKS):
        part = numbers[first : first + CHUNKS]
        engine.store(request, part, part)
    request.finish()
    engine.forget_memory()
    assert engine.held(numbers) == [True] * len(numbers)
    return original


def ask(engine: Engine, name: str, numbers: list[int]) -> tuple[Request, list[str]]:
    """A new request looks up these blocks, all in one step, and again until it is told."""
    request = engine.request(name)
    for number in numbers:
        engine.manager.lookup(key(number), request.context)
    request.step()
    return request, engine.found(request, numbers)


def check_loaded(engine: Engine, request: Request, numbers: list[int], original: torch.Tensor) -> None:
    engine.load(request, numbers, [40 + n for n in range(len(numbers))])
    for place, number in enumerate(numbers):
        assert torch.equal(engine.cache[40 + place], original[number])


def sentences(caplog: pytest.LogCaptureFixture, beginning: str = "vllm-pd: the SSD tier in") -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(beginning)]


@pytest.mark.parametrize(
    ("lay", "reason"),
    [
        (lambda disk: disk.fail("read"), "read_failed"),
        (lambda disk: disk.cut_short("read"), "read_failed"),
        (lambda disk: disk.flip_bit("read", byte=100), "corrupt"),
    ],
    ids=["error", "short", "bit-flip"],
)
def test_a_bad_read_is_a_miss_that_leaves_the_index_and_is_told(
    start: Start, disk: FaultyIO, lay: Callable[[FaultyIO], object], reason: str
) -> None:
    engine = start(events=True)
    original = stored(engine, [1, 2, 3])
    list(engine.events())
    # One block at a time, so that it is the second that is hit.
    request, found = ask(engine, "a", [1])
    assert found == ["HIT"]
    lay(disk)
    request, found = ask(engine, "b", [2])
    assert found == ["MISS"]
    assert engine.metric("loads_failed_blocks", reason) == 1
    assert engine.held([1, 2, 3]) == [True, False, True]
    assert (True, {key(2)}) in engine.told + engine.events()
    # The others are served, and so is this one when it has been computed and stored again.
    engine.store(request, [2], [2])
    request.finish()
    engine.forget_memory()
    request, found = ask(engine, "c", [1, 2, 3])
    assert found == ["HIT"] * 3
    check_loaded(engine, request, [1, 2, 3], original)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "deleted", "unreadable"])
def test_damaged_files_are_misses(start: Start, tmp_path: Path, damage: str) -> None:
    """As it happens behind the server's back. What was opened before it was deleted may still be read."""
    engine = start()
    original = stored(engine, [1, 2])
    for path in segments(tmp_path):
        raw = bytearray(path.read_bytes())
        if damage == "flipped":
            for at in range(8192, len(raw), 4096):
                raw[at] ^= 1
            path.write_bytes(raw)
        elif damage == "truncated":
            path.write_bytes(raw[:8192])
        elif damage == "emptied":
            path.write_bytes(b"")
        elif damage == "deleted":
            path.unlink()
        else:
            path.chmod(0)
    request, found = ask(engine, "a", [1, 2])
    assert "RETRY" not in found
    hits = [number for number, one in zip([1, 2], found, strict=True) if one == "HIT"]
    if damage in ("flipped", "truncated", "emptied"):
        assert hits == []
        assert engine.held([1, 2]) == [False, False]
    check_loaded(engine, request, hits, original)


def test_a_load_that_hangs_is_late_and_nothing_touches_the_memory_that_it_was_for(start: Start, disk: FaultyIO) -> None:
    engine = start(ssd={"load_deadline_s": 0.2})
    stored(engine, [1])
    fault = disk.hang("read")
    request, found = ask(engine, "a", [1])
    assert found == ["MISS"]
    assert engine.metric("loads_failed_blocks", "late") == 1
    # Its slot in host memory goes to other blocks, and then the disk wakes up.
    engine.store(request, [20, 21, 22, 23], [20, 21, 22, 23])
    there = bytes(engine.manager.primary_tier.get_kv_memoryview().cast("B"))
    fault.release()
    until(lambda: engine.tier.store.stats().queued_load_bytes == 0, "the load never ended")
    assert bytes(engine.manager.primary_tier.get_kv_memoryview().cast("B")) == there
    # A block that was late is still stored; another request may try it, the one that failed does not.
    assert engine.held([1]) == [True]
    assert engine.found(request, [1]) == ["MISS"]
    _, found = ask(engine, "b", [1])
    assert found == ["HIT"]


def test_a_reset_while_a_load_hangs_is_not_held_up_for_long_and_reuses_no_memory_under_it(
    start: Start, disk: FaultyIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_tier, "_DRAIN_S", 0.2)
    engine = start()
    stored(engine, [1])
    fault = disk.hang("read")
    request = engine.request("a")
    assert engine.manager.lookup(key(1), request.context).name == "HIT_PENDING"
    request.step()
    assert fault.entered.wait(10)
    engine.manager.reset_cache()
    engine.store(request, [20, 21, 22, 23], [20, 21, 22, 23])
    there = bytes(engine.manager.primary_tier.get_kv_memoryview().cast("B"))
    fault.release()
    until(lambda: disk.counts["read"] > 0 and not engine.tier.store.stats().queued_load_bytes, "the load never ended")
    assert bytes(engine.manager.primary_tier.get_kv_memoryview().cast("B")) == there


def test_a_disk_that_keeps_failing_is_left_alone_and_used_again_when_it_works(
    start: Start, disk: FaultyIO, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tier_breaker, "FIRST_PAUSE_S", 0.02)
    engine = start()
    numbers = list(range(12))
    original = stored(engine, numbers)
    fault = disk.fail("read", times=None)
    for number in range(tier_breaker.FAILURES_TO_OPEN):
        _, found = ask(engine, f"failing {number}", [number])
        assert found == ["MISS"]
    assert engine.metric("off", "load") == 1 and engine.metric("switched_off", "load") == 1
    # While it is off nothing is asked of it for a request, and nothing is lost.
    reads = disk.counts["read"]
    _, found = ask(engine, "while off", [10])
    assert found == ["MISS"] and engine.metric("lookups_off") >= 1
    assert engine.held([10]) == [False] and engine.tier.store.contains(key(10))
    assert disk.counts["read"] - reads <= 3, "only trials read"
    [sentence] = sentences(caplog)
    assert "is not used for now: reads fail" in sentence and "Prompts are computed instead" in sentence

    fault.release()
    idle = engine.request("idle")
    until(lambda: idle.step() is None and engine.metric("off", "load") == 0 and not engine.manager._jobs, "still off")
    assert engine.metric("probes", "load", "fine") == 1
    assert "is used again after" in sentences(caplog)[-1] and len(sentences(caplog)) == 2
    request, found = ask(engine, "after", [10, 11])
    assert found == ["HIT", "HIT"]
    check_loaded(engine, request, [10, 11], original)


def test_a_disk_that_takes_no_writes_goes_on_to_serve_what_it_holds(
    start: Start, disk: FaultyIO, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    original = stored(engine, [1, 2])
    fault = disk.fail("write", times=None, error=errno.EROFS)
    request = engine.request("a")
    engine.store(request, [5, 6], [5, 6])
    engine.store(request, [7, 8], [7, 8])
    request.finish()
    assert engine.held([5, 6, 7, 8]) == [False] * 4
    lost = engine.metric("lost_blocks", "write_failed")
    assert lost + engine.metric("refused_blocks", "write_failed") == 4 and lost > 0
    assert len(sentences(caplog, "SSD tier: nothing is stored for now: ")) == 1
    assert engine.metric("off", "store") == 1
    request, found = ask(engine, "b", [1, 2])
    assert found == ["HIT", "HIT"]
    check_loaded(engine, request, [1, 2], original)
    fault.release()


def test_a_full_disk_refuses_writes_and_serves_on(
    start: Start, disk: FaultyIO, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(ssd={"segment_mib": 0.0625})
    original = stored(engine, [1, 2])
    fault = disk.fail("open", times=None, error=errno.ENOSPC)
    request = engine.request("a")
    for first in range(20, 60, CHUNKS):
        engine.store(request, [first + n for n in range(CHUNKS)], list(range(CHUNKS)))
    request.finish()
    refused = engine.metric("refused_blocks", "no_space") + engine.metric("lost_blocks", "no_space")
    assert refused > 0
    assert len(sentences(caplog, "SSD tier: nothing is stored for now: ")) == 1
    fault.release()
    request, found = ask(engine, "b", [1, 2])
    assert found == ["HIT", "HIT"]
    check_loaded(engine, request, [1, 2], original)


def test_a_slow_disk_does_not_hold_host_memory(start: Start, disk: FaultyIO) -> None:
    """A write that hangs keeps its staging memory; the slots of host memory come free all the same."""
    engine = start()
    fault = disk.hang("write")
    request = engine.request("a")
    for first in (0, 4, 8):
        assert request.store(engine.worker, next(engine.jobs), [first, first + 1], blocks([0, 1]))
        until(lambda: request.step() is None and not engine.manager._jobs, "a job never ended")
    fault.release()
    request.settle()


def test_stopping_a_server_whose_disk_hangs_ends(start: Start, disk: FaultyIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_tier, "_CLOSE_S", 0.3)
    engine = start()
    request = engine.request("a")
    fault = disk.hang("write")
    request.store(engine.worker, next(engine.jobs), [1], blocks([0]))
    request.step()
    assert fault.entered.wait(10)
    engine.stop()
    fault.release()


def test_a_block_that_failed_for_a_request_is_not_promised_to_it_again(start: Start, disk: FaultyIO) -> None:
    engine = start(ssd={"load_deadline_s": 0.05})
    first = engine.request("a")
    engine.store(first, [1], [0])
    first.finish()
    engine.forget_memory()
    late, other = engine.request("b"), engine.request("c")
    assert engine.tier.holds(key(1), late.context)
    read = disk.hang("read")
    assert engine.found(late, [1]) == ["MISS"]
    read.release()
    assert [engine.tier.holds(key(1), request.context) for request in (late, other)] == [False, True]


def test_an_idle_engine_steps_on_until_its_metrics_show_what_was_written_after_its_last_step(
    start: Start, disk: FaultyIO
) -> None:
    engine = start()
    fault = disk.hang("write")
    request = engine.request("a")
    request.store(engine.worker, next(engine.jobs), [1], blocks([1]))
    until(lambda: request.step() is None and not engine.manager._jobs, "a job never ended")
    assert engine.shown("staged_bytes") > 0
    fault.release()
    until(lambda: engine.tier.store.stats().staged_bytes == 0, "the write never ends")
    assert engine.shown("written_blocks") == 0
    request.settle()
    assert engine.shown("written_blocks") == engine.shown("blocks") == 1
    assert engine.shown("staged_bytes") == 0
    assert not engine.manager.has_pending_work()
