"""A store's folder seen from outside, also while it is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, LIMIT_S, Rig, config, segment_paths
from tests.unit.kv_offload.segments.test_damage import flip
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.segments import check
from vllm_pd.kv_offload.segments.format import ALIGN


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name, count in (("model-a", 150), ("model-b", 10)):
        with Rig(config(root, name=name, about={"model": name.upper()})) as rig:
            rig.store_blocks(range(count))
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_folder_is_described_and_not_changed(filled: Path) -> None:
    before = contents(filled)
    found = check.stat(filled)
    assert contents(filled) == before
    assert [(n.name, n.blocks, n.about, n.pid) for n in found.namespaces] == [
        ("model-a", 150, {"model": "MODEL-A"}, None),
        ("model-b", 10, {"model": "MODEL-B"}, None),
    ]
    first = found.namespaces[0]
    files = segment_paths(filled / "model-a")
    assert (first.segments, first.sealed, first.bytes) == (len(files), len(files), sum(f.stat().st_size for f in files))
    assert first.block_bytes == BLOCK and first.problems == ()
    assert first.oldest is not None and first.newest is not None and first.oldest <= first.newest
    assert 0 < found.free_bytes < found.total_bytes


def test_every_block_of_a_sound_namespace_is_good_and_nothing_is_changed(filled: Path) -> None:
    before, seen = contents(filled), list[tuple[int, int]]()
    result = check.verify(filled, "model-a", lambda done, total: seen.append((done, total)))
    assert result.ok and result.good == 150 and contents(filled) == before
    assert seen[-1][0] == seen[-1][1] and len(seen) == len(segment_paths(filled / "model-a"))


def test_bad_blocks_and_files_are_found_and_named(filled: Path) -> None:
    first, second, third = segment_paths(filled / "model-a")[:3]
    flip(first, 2 * ALIGN + 3 * BLOCK)
    flip(second, 0)
    os.truncate(third, third.stat().st_size - 3 * ALIGN)
    before = contents(filled)
    result = check.verify(filled, "model-a")
    assert contents(filled) == before
    assert not result.ok and result.corrupt == 1
    assert any(str(first) in text and "1 blocks" in text for text in result.problems)
    os.utime(second, (1, 1))
    assert any(str(second) in text for text in check.verify(filled, "model-a").problems)
    assert any(str(second) in text for text in check.stat(filled).namespaces[0].problems)


def test_a_server_that_is_writing_is_described_verified_and_not_cleared(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(100))
        [found] = check.stat(tmp_path).namespaces
        assert found.pid == os.getpid() and found.blocks == 100 and found.sealed < found.segments
        result = check.verify(tmp_path, "model-a")
        assert (result.good, result.corrupt, result.problems) == (100, 0, ())
        cleared = check.clear(tmp_path, "model-a")
        assert cleared.segments == 0 and f"in use by process {os.getpid()}" in cleared.refused
        # Between two looks it is evicting and writing all the time.
        for first in range(1000, 2000, 50):
            rig.put(range(first, first + 50))
            result = check.verify(tmp_path, "model-a")
            assert (result.corrupt, result.unreadable, result.problems) == (0, 0, ())
            assert check.stat(tmp_path).namespaces[0].problems == ()
        assert rig.store.flush(LIMIT_S)
        has = rig.stored(range(2000))
        assert len(rig.get(has).ok) == len(has)


def test_blocks_that_were_being_written_at_a_crash_are_no_damage(tmp_path: Path) -> None:
    rig = Rig(config(tmp_path))
    rig.store_blocks(range(20))
    rig.disk.crash_after(ALIGN + 3 * BLOCK + 100)
    rig.put(range(100, 108))
    rig.store.flush(LIMIT_S)
    rig.close()
    result = check.verify(tmp_path, "model-a")
    assert result.ok and result.good == 23 and result.unfinished == 5


def test_a_namespace_that_nobody_uses_is_cleared_and_the_others_stay(filled: Path) -> None:
    files = segment_paths(filled / "model-a")
    size = sum(path.stat().st_size for path in files)
    result = check.clear(filled, "model-a")
    assert (result.segments, result.bytes, result.refused) == (len(files), size, "")
    assert check.namespaces(filled) == ["model-b"] and not (filled / "model-a").exists()


def test_files_of_others_survive_a_clearing(filled: Path) -> None:
    (filled / "model-a" / "notes.txt").write_text("mine")
    check.clear(filled, "model-a")
    assert [path.name for path in (filled / "model-a").iterdir()] == ["notes.txt"]


def test_an_unknown_namespace_or_folder_is_an_error_that_helps(filled: Path) -> None:
    with pytest.raises(SettingsError, match=r"no namespace 'model-aa' .did you mean 'model-a'"):
        check.verify(filled, "model-aa")
    with pytest.raises(SettingsError, match="cannot be read"):
        check.stat(filled / "absent")
    with pytest.raises(SettingsError, match="no namespace"):
        check.clear(filled, "../root")
