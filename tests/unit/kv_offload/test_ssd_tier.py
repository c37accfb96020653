"""The SSD tier with real files, vLLM's tiering manager above it and the DRAM worker beside it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.unit.kv_offload.engine import key
from tests.unit.kv_offload.segments.rig import used
from tests.unit.kv_offload.tiered import BUDGET, CHUNKS, MIB, PAGE, Engine, blocks, segments, until
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import ssd_metrics, ssd_tier
from vllm_pd.kv_offload.spec import PDTieringOffloadingSpec
from vllm_pd.kv_offload.ssd_config import ROOT_NAME

pytestmark = pytest.mark.vllm

Start = Callable[..., Engine]


def test_blocks_driven_out_of_memory_come_back_from_the_ssd(start: Start) -> None:
    engine = start()
    original = engine.cache.clone()
    first = engine.request("a")
    engine.store(first, [1, 2, 3, 4], [0, 1, 2, 3])
    engine.store(first, [5, 6, 7, 8], [4, 5, 6, 7])
    first.finish()
    engine.cache.zero_()
    second = engine.request("b")
    assert engine.found(second, [1, 2]) == ["HIT", "HIT"]
    engine.load(second, [1, 2], [10, 11])
    assert torch.equal(engine.cache[10:12], original[:2])
    assert engine.metric("read_blocks") == 2 and engine.metric("written_blocks") == 8
    assert engine.metric("read_bytes") == 2 * PAGE and engine.metric("budget_bytes") == BUDGET


def test_blocks_survive_a_restart(start: Start) -> None:
    engine = start()
    original = engine.cache.clone()
    request = engine.request("a")
    engine.store(request, [1, 2], [3, 4])
    request.finish()
    engine.stop()
    again = start()
    request = again.request("b")
    request.settle()
    assert again.found(request, [1, 2, 3]) == ["HIT", "HIT", "MISS"]
    again.load(request, [1, 2], [0, 1])
    assert torch.equal(again.cache[:2], original[3:5])
    assert again.metric("recovered_blocks") == 2


def test_the_answer_to_a_lookup_is_final_and_a_block_that_is_being_written_is_a_miss(start: Start) -> None:
    engine = start()
    request = engine.request("a")
    assert engine.manager.lookup(key(1), request.context).name == "MISS"
    engine.store(request, [1], [0])
    engine.forget_memory()
    assert engine.manager.lookup(key(1), request.context).name == "HIT_PENDING"


def test_a_block_evicted_between_lookup_and_load_is_a_miss_and_the_blocks_before_it_are_kept(start: Start) -> None:
    engine = start()
    original = engine.cache.clone()
    request = engine.request("a")
    engine.store(request, [1, 2, 3], [0, 1, 2])
    request.finish()
    engine.forget_memory()
    request = engine.request("b")
    found = [engine.manager.lookup(key(number), request.context).name for number in (1, 2, 3)]
    assert found == ["HIT_PENDING"] * 3
    evict(engine, 2)
    request.step()
    assert engine.found(request, [1, 2, 3]) == ["HIT", "MISS", "HIT"]
    engine.load(request, [1], [9])
    assert torch.equal(engine.cache[9], original[0])
    assert engine.metric("loads_failed_blocks", "absent") == 1
    # The request computes what is missing and stores it, and the next request finds all of it.
    engine.store(request, [2], [1])
    request.finish()
    engine.forget_memory()
    assert engine.found(engine.request("c"), [1, 2, 3]) == ["HIT", "HIT", "HIT"]


def test_a_block_is_loaded_once_for_two_requests(start: Start) -> None:
    engine = start()
    request = engine.request("a")
    engine.store(request, [1], [0])
    request.finish()
    engine.forget_memory()
    first, second = engine.request("b"), engine.request("c")
    for request in (first, second):
        assert engine.manager.lookup(key(1), request.context).name == "HIT_PENDING"
    first.settle()
    assert engine.found(first, [1]) == engine.found(second, [1]) == ["HIT"]
    assert engine.metric("read_blocks") == 1


def test_a_prompt_larger_than_host_memory_gets_a_part_and_goes_on(start: Start) -> None:
    """Each block that comes drives out one that came before: without a limit it would be loaded for ever."""
    engine = start()
    numbers = list(range(3 * CHUNKS))
    request = engine.request("a")
    for number in numbers:
        engine.store(request, [number], [number])
    request.finish()
    request = engine.request("b")
    for _ in range(50):
        for number in numbers:
            if engine.manager.lookup(key(number), request.context).name == "MISS":
                break
        request.step()
        request.settle()
    assert engine.metric("read_blocks") <= 2 * CHUNKS
    found = [engine.manager.lookup(key(number), request.context).name for number in numbers]
    assert "HIT_PENDING" not in found and "RETRY" not in found


def test_the_files_never_take_more_than_the_budget_and_old_blocks_give_way(start: Start, tmp_path: Path) -> None:
    at_once = 64
    engine = start(chunks=at_once, ssd={"writes_per_day": 1e9})
    request = engine.request("a")
    last = 2 * BUDGET // PAGE
    for first in range(0, last, at_once):
        engine.store(request, [first + n for n in range(at_once)], list(range(at_once)))
        assert used(tmp_path) <= BUDGET
    request.finish()
    assert engine.held([0, last - 1]) == [False, True]
    assert engine.metric("evicted_blocks") > 0 and engine.metric("used_bytes") <= BUDGET


def test_what_is_seen_for_the_first_time_is_not_written_and_is_when_it_comes_again(start: Start) -> None:
    engine = start(ssd={"writes_per_day": 0})
    first = engine.request("a")
    engine.store(first, [1, 2], [0, 1])
    first.finish()
    first.settle()
    assert engine.held([1, 2]) == [False, False]
    assert engine.metric("refused_blocks", "first_time") == 2
    # The second request finds them in host memory, and vLLM does not offer them again.
    second = engine.request("b")
    assert engine.found(second, [1, 3]) == ["HIT", "MISS"]
    second.finish()
    second.settle()
    assert engine.held([1, 2, 3]) == [True, False, False]
    assert engine.metric("written_blocks") == 1
    # A block that has left host memory meanwhile is offered by vLLM when it has been computed again.
    engine.forget_memory()
    third = engine.request("c")
    engine.store(third, [2], [5])
    third.finish()
    assert engine.held([2]) == [True]


def test_others_cannot_read_the_files(start: Start, tmp_path: Path) -> None:
    engine = start()
    engine.store(engine.request("a"), [1], [0])
    assert stat.S_IMODE((tmp_path / ROOT_NAME).stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in segments(tmp_path)} == {0o600}


def test_a_second_server_on_the_same_folder_is_told_what_to_do(start: Start) -> None:
    start()
    with pytest.raises(SettingsError, match=rf"in use by process {os.getpid()}; .*another --pd-ssd-path"):
        start()


def test_data_parallel_engines_share_a_path_without_getting_into_each_others_way(start: Start, tmp_path: Path) -> None:
    ranks = [start(parallel={"data_parallel_index": rank, "data_parallel_size": 2}) for rank in (0, 1)]
    for rank, engine in enumerate(ranks):
        engine.store(engine.request("a"), [rank], [0])
    assert [engine.held([0, 1]) for engine in ranks] == [[True, False], [False, True]]
    assert len({path.parent for path in segments(tmp_path)}) == 2
    ranks[1].stop()
    again = start(parallel={"data_parallel_index": 1, "data_parallel_size": 2})
    again.request("b").settle()
    assert again.held([0, 1]) == [False, True]


def test_a_budget_larger_than_the_disk_is_refused(start: Start) -> None:
    with pytest.raises(SettingsError, match=r"does not fit the file system .* lower --pd-ssd-gib"):
        start(ssd={"gib": 1 << 30})


def test_a_path_that_is_no_folder_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / ROOT_NAME).write_text("in the way")
    with pytest.raises(SettingsError, match="give --pd-ssd-path a folder that this user can write"):
        start()


def test_what_is_on_the_ssd_is_told_as_it_comes_and_goes_and_from_the_start_by_an_idle_engine(start: Start) -> None:
    first = start(events=True)
    request = first.request("a")
    assert request.store(first.worker, next(first.jobs), [1, 2, 3, 4], blocks([0, 1, 2, 3]))
    assert first.events() == [], "nothing is told before it is written"
    first.settle()
    told = first.told
    assert told == [(False, {key(1), key(2), key(3), key(4)})]
    first.stop()

    again = start(events=True)
    assert again.manager.has_pending_work(), "an idle engine steps until what was found is told"
    again.settle()
    assert again.told == [(False, {key(1), key(2), key(3), key(4)})]
    assert not again.manager.has_pending_work()
    evict(again, 2)
    assert again.manager.has_pending_work()
    assert again.events() == [(True, {key(2)})]


def test_a_step_tells_a_bounded_number_of_blocks(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_tier, "_EVENTS_PER_STEP", 3)
    engine = start(events=True)
    request = engine.request("a")

    def store(number: int) -> bool:
        request.step()
        return request.store(engine.worker, next(engine.jobs), [number], blocks([0]))

    for number in range(8):
        # Host memory has room for four: one leaves it when the SSD has taken it over.
        until(partial(store, number), "room in host memory")
    request.step()
    # An engine waits for a slow disk for a while only.
    assert engine.tier.store.flush(30)
    engine.settle()
    assert all(len(keys) <= 3 for _, keys in engine.told)
    assert set().union(*(keys for _, keys in engine.told)) == {key(n) for n in range(8)}


def test_without_kv_events_nothing_is_told(start: Start) -> None:
    engine = start()
    request = engine.request("a")
    engine.store(request, [1], [0])
    request.finish()
    assert engine.events() == []
    assert not engine.manager.has_pending_work()


def test_every_metric_that_is_shown_is_described(start: Start) -> None:
    engine = start()
    described = PDTieringOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "ssd": {}})
    assert described.keys() >= ssd_metrics.definitions().keys()
    engine.store(engine.request("a"), [1], [0])
    for name, values in engine.manager.get_stats().data["data"].items():
        assert {len(labels) for labels in values} == {len(described[name].labelnames)}, name


def test_a_reset_of_the_caches_keeps_what_is_on_the_ssd(start: Start) -> None:
    engine = start()
    original = engine.cache.clone()
    request = engine.request("a")
    engine.store(request, [1, 2], [0, 1])
    request.finish()
    waiting = engine.request("b")
    engine.forget_memory()
    assert engine.manager.lookup(key(1), waiting.context).name == "HIT_PENDING"
    waiting.step()
    engine.manager.reset_cache()
    assert engine.found(waiting, [1, 2]) == ["HIT", "HIT"]
    engine.load(waiting, [1, 2], [20, 21])
    assert torch.equal(engine.cache[20:22], original[:2])


def test_large_segments_are_made_no_larger_than_the_budget_allows(start: Start, tmp_path: Path) -> None:
    engine = start(ssd={"segment_mib": 1})
    engine.store(engine.request("a"), [1], [0])
    assert all(path.stat().st_size <= MIB for path in segments(tmp_path))


def evict(engine: Engine, number: int) -> None:
    """As the store does, without its segment."""
    index = engine.tier.store._index
    [(segment, [place])] = index.locate([key(number)]).groups
    index.forget([(segment, place)])
    index.unpin([(segment, [place])])
