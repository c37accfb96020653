"""Blocks of former weights, and of another version of an adapter, are never served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.kv_offload.engine import PATIENCE_S, key
from tests.unit.kv_offload.tiered import Engine, blocks, segments
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload import ssd_tier
from vllm_pd.kv_offload.adapter_versions import VERSION_BYTES, AdapterVersions, without_version
from vllm_pd.kv_offload.ssd_config import ROOT_NAME

pytestmark = pytest.mark.vllm

Start = Callable[..., Engine]


def stored(engine: Engine, name: str, numbers: list[int]) -> None:
    request = engine.request(name)
    engine.store(request, numbers, numbers)
    request.finish()


def test_after_a_change_of_weights_the_tier_begins_anew_and_the_files_wait_for_the_weights_they_are_of(
    start: Start, tmp_path: Path
) -> None:
    engine = start(events=True)
    stored(engine, "a", [1, 2])
    old = {path.parent for path in segments(tmp_path)}
    assert engine.tier.weights_changed("reload_weights")
    engine.reset()
    assert engine.held([1, 2]) == [False, False]
    assert engine.found(engine.request("b"), [1, 2]) == ["MISS", "MISS"]
    stored(engine, "c", [2, 3])
    assert engine.held([1, 2, 3]) == [False, True, True]
    new = {path.parent for path in segments(tmp_path)} - old
    assert len(new) == 1
    engine.stop()
    assert not any(folder.exists() for folder in new), "no other server has these weights"
    again = start()
    again.request("d").settle()
    assert again.held([1, 2, 3]) == [True, True, False]


@pytest.mark.parametrize("running", [True, False])
def test_after_a_change_of_weights_nothing_is_stored_or_served_until_all_caches_were_reset(
    start: Start, running: bool
) -> None:
    engine = start()
    stored(engine, "a", [1])
    request = engine.request("b") if running else None
    engine.tier.weights_changed("update_weights")
    assert engine.held([1]) == [False]
    # It may have found the former weights' blocks on the device, and go on from there.
    request = request or engine.request("b")
    assert engine.found(request, [9]) == ["MISS"]
    engine.store(request, [5], [5])
    assert engine.metric("refused_blocks", "outdated") == 1
    # What it holds stays, and is offered from its first block.
    engine.reset(done=False)
    engine.store(request, [5], [5])
    assert engine.metric("refused_blocks", "outdated") == 2
    request.finish()
    engine.reset()
    assert engine.held([1, 5]) == [False, False]
    stored(engine, "c", [6])
    assert engine.held([6]) == [True]


def test_weights_that_change_right_after_a_reset_leave_the_tier_in_use(start: Start) -> None:
    """As of an engine that was paused or put to sleep, both of which reset its caches."""
    engine = start()
    stored(engine, "a", [1])
    engine.reset()
    assert engine.held([1]) == [True]
    assert [engine.tier.weights_changed(name) for name in ("wake", "reload_weights")] == [True, False]
    stored(engine, "b", [2])
    assert engine.held([1, 2]) == [False, True]


def test_a_new_store_without_blocks_is_no_proof_that_the_caches_above_have_none(start: Start) -> None:
    engine = start()
    stored(engine, "a", [1])
    engine.tier.weights_changed("first")
    engine.reset()
    # Computed, and held by the device alone.
    engine.request("b").finish()
    assert engine.tier.weights_changed("second")
    stored(engine, "c", [2])
    assert engine.held([2]) == [False]


def test_nothing_is_stored_late_while_the_weights_may_have_changed_under_running_requests(start: Start) -> None:
    engine = start(ssd={"writes_per_day": 0})
    stored(engine, "a", [1, 2])
    running = engine.request("running")
    for name, number, changed in (("b", 1, True), ("c", 2, False)):
        again = engine.request(name)
        assert engine.found(again, [number]) == ["HIT"], "in host memory"
        again.finish()
        if changed:
            # Block 1 waits to be fetched from host memory now.
            engine.tier.weights_changed("update_weights")
        running.step()
        running.settle()
    assert engine.tier.store.flush(PATIENCE_S)
    assert engine.metric("written_blocks") == 0


def test_files_of_the_former_weights_stay_when_the_tier_cannot_begin_anew(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unusable(*_: object) -> None:
        raise SettingsError("the disk is gone")

    engine = start()
    stored(engine, "a", [1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(ssd_tier, "open_place", unusable)
        engine.tier.weights_changed("reload_weights")
        assert engine.found(engine.request("b"), [1]) == ["HIT"], "in host memory, which is vLLM's to reset"
        engine.reset()
    engine.stop()
    again = start()
    again.request("d").settle()
    assert again.held([1, 2]) == [True, True]


def test_a_folder_that_somebody_else_removed_does_not_fail_a_shutdown(start: Start, tmp_path: Path) -> None:
    engine = start()
    stored(engine, "a", [1])
    engine.tier.weights_changed("reload_weights")
    engine.reset()
    stored(engine, "b", [2])
    shutil.rmtree(tmp_path / ROOT_NAME)
    engine.stop()


def test_several_calls_of_one_change_begin_anew_once(start: Start, tmp_path: Path) -> None:
    engine = start()
    stored(engine, "a", [1])
    changed = [engine.tier.weights_changed(name) for name in ("start_weight_update", "update_weights", "finish")]
    assert changed == [True, False, False]
    engine.reset()
    stored(engine, "b", [2])
    assert engine.tier.weights_changed("start_weight_update")
    assert engine.held([2]) == [False]


def test_another_version_of_an_adapter_does_not_find_the_blocks(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    first = AdapterVersions().of(adapter(folder))
    engine = start(events=True)
    engine.tier.has_adapter("a", first)
    request = engine.request("a")
    engine.store(request, [1], [1])
    request.finish()
    engine.forget_memory()
    (folder / "adapter_model.safetensors").write_bytes(b"another")
    second = AdapterVersions().of(adapter(folder))
    assert second != first
    for name, version, found in (("b", second, "MISS"), ("c", None, "MISS"), ("d", first, "HIT")):
        if version is not None:
            engine.tier.has_adapter(name, version)
        request = engine.request(name)
        assert engine.tier.holds(key(1), request.context) == (found == "HIT"), "what the cost gate is told"
        assert engine.found(request, [1]) == [found], name


def test_blocks_of_adapters_are_told_by_vllms_keys(start: Start) -> None:
    engine = start(events=True)
    engine.tier.has_adapter("a", b"v" * VERSION_BYTES)
    request = engine.request("a")
    request.store(engine.worker, next(engine.jobs), [1], blocks([1]))
    request.settle(each=lambda: engine.told.extend(engine.events()))
    assert engine.told == [(False, {key(1)})]
    assert without_version(key(1)) == key(1)


def test_an_adapters_version_is_that_of_its_first_request_until_it_is_loaded_anew(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"one")
    versions = AdapterVersions()
    first = versions.of(adapter(tmp_path))
    (tmp_path / "weights").write_bytes(b"another")
    assert versions.of(adapter(tmp_path)) == first, "the engine still has what it loaded"
    assert versions.of(adapter(tmp_path, load_inplace=True)) != first
    assert versions.of(adapter(tmp_path, lora_int_id=2)) != first


def adapter(path: Path, **changes: Any) -> Any:
    return SimpleNamespace(**{"lora_int_id": 1, "lora_path": str(path), "load_inplace": False, **changes})
