"""Files that were cut, flipped, removed, swapped or made unreadable: misses, never wrong bytes, and said once."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import BLOCK, NAMESPACE, Rig, config, key, segment_paths, until
from vllm_pd.kv_offload.segments import Reason
from vllm_pd.kv_offload.segments.format import ALIGN

pytestmark = pytest.mark.usefixtures("way")

BLOCKS = 200


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A root with 200 blocks in a few finished segments."""
    with Rig(config(tmp_path)) as rig:
        rig.store_blocks(range(BLOCKS))
    return tmp_path


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def whole_blocks(rig: Rig) -> int:
    """Loads all it says it has; how many were right. `Rig.get` compares them."""
    has = rig.stored(range(BLOCKS))
    got = rig.get(has)
    assert set(got.failed.values()) <= {Reason.CORRUPT, Reason.READ_FAILED}
    assert rig.stored(range(BLOCKS)) == [i for i in has if key(i) not in got.failed], "bad blocks have left the index"
    return len(got.ok)


def test_a_corrupt_block_is_a_miss_and_leaves_the_index(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Rig(config(filled)) as rig:
        rig.store.take_changes(1000)
        flip(segment_paths(filled)[0], ALIGN + ALIGN + 3 * BLOCK + 5)
        flip(segment_paths(filled)[0], ALIGN + ALIGN + 4 * BLOCK + BLOCK - 1)
        with caplog.at_level(logging.WARNING):
            got = rig.get(range(BLOCKS))
        assert got.failed == {key(3): Reason.CORRUPT, key(4): Reason.CORRUPT}
        assert len(got.ok) == BLOCKS - 2
        assert rig.stored([3, 4]) == []
        assert sorted(rig.store.take_changes(1000)[1]) == sorted([key(3), key(4)])
        assert rig.store.stats().loads_failed == {Reason.CORRUPT: 2}
        assert len([r for r in caplog.records if "is not what was stored" in r.message]) == 1
        rig.store_blocks([3, 4])
        assert len(rig.get([3, 4]).ok) == 2, "stored anew"


def test_a_bit_that_flips_on_the_way_is_a_miss(filled: Path) -> None:
    with Rig(config(filled)) as rig:
        rig.disk.flip_bit("read", byte=17)
        assert list(rig.get([5]).failed.values()) == [Reason.CORRUPT]


@pytest.mark.parametrize("fault", ["fail", "cut_short"])
def test_a_failed_or_short_read_is_a_miss_of_those_blocks_alone(filled: Path, fault: str, way: str) -> None:
    with Rig(config(filled)) as rig:
        # Neighbours are read at once, here in two requests, and after an error one by one: the first one is bad. What
        # was read in one call with the rest is read by `BlockIO` first, which says what is wrong.
        getattr(rig.disk, fault)("read")
        getattr(rig.disk, fault)("read", skip=2, times=1 if way == "batched" else 2)
        got = rig.get(range(10))
        assert list(got.failed.values()) == [Reason.READ_FAILED] and len(got.ok) == 9
        assert len(rig.stored(range(10))) == 9


def test_a_write_that_lies_is_found_at_load(tmp_path: Path) -> None:
    with Rig(config(tmp_path)) as rig:
        rig.disk.flip_bit("write", skip=1, byte=ALIGN + 3 * BLOCK)
        rig.store_blocks(range(8))
        assert rig.get(range(8)).failed == {key(3): Reason.CORRUPT}


def cut_in_the_middle(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 11)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def flip_the_header(path: Path) -> None:
    flip(path, 40)


def flip_the_footer(path: Path) -> None:
    flip(path, path.stat().st_size - 2 * ALIGN + 9)


def flip_the_last_page(path: Path) -> None:
    flip(path, path.stat().st_size - ALIGN + 20)


def remove(path: Path) -> None:
    path.unlink()


def overwrite(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


DAMAGES: list[Callable[[Path], None]] = [
    cut_in_the_middle,
    cut_to_nothing,
    flip_the_header,
    flip_the_footer,
    flip_the_last_page,
    remove,
    overwrite,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_between_two_runs_costs_at_most_that_segment(filled: Path, damage: Callable[[Path], None]) -> None:
    damage(segment_paths(filled)[1])
    with Rig(config(filled)) as rig:
        left = whole_blocks(rig)
        assert left >= BLOCKS - 64
        if damage in (flip_the_footer, flip_the_last_page):
            assert left == BLOCKS, "the batches say what the footer said"
        rig.store_blocks([i for i in range(BLOCKS) if i not in set(rig.stored(range(BLOCKS)))])
        assert whole_blocks(rig) == BLOCKS
    with Rig(config(filled)) as rig:
        assert whole_blocks(rig) == BLOCKS


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_while_it_runs_is_never_served(filled: Path, damage: Callable[[Path], None]) -> None:
    # Files are closed and opened again all the time.
    with Rig(config(filled, open_files=1)) as rig:
        damage(segment_paths(filled)[1])
        assert whole_blocks(rig) >= BLOCKS - 64
        rig.store_blocks(range(1000, 1100))
        assert len(rig.get(range(1000, 1100)).ok) == 100


def test_swapped_segments_are_never_served_as_each_other(filled: Path) -> None:
    first, second = segment_paths(filled)[:2]
    with Rig(config(filled, open_files=1)) as rig:
        first.rename(filled / "x")
        second.rename(first)
        (filled / "x").rename(second)
        whole_blocks(rig)
    with Rig(config(filled)) as rig:
        whole_blocks(rig)
        assert rig.store.stats().rejected_segments_total == 2


def test_a_segment_of_another_namespace_is_not_read(filled: Path, tmp_path: Path) -> None:
    other = config(tmp_path, name="model-b", namespace=bytes(32))
    with Rig(other) as rig:
        rig.store_blocks(range(1000, 1010))
    [strange] = segment_paths(other.folder)
    shutil.copy(strange, config(filled).folder / "segment-000000000099.kv")
    with Rig(config(filled)) as rig:
        assert rig.stored(range(1000, 1010)) == [] and whole_blocks(rig) == BLOCKS
        assert rig.store.stats().rejected_segments_total == 1
    assert other.namespace != NAMESPACE


def test_blocks_of_another_size_are_not_read(filled: Path) -> None:
    with Rig(config(filled, block_bytes=BLOCK // 2)) as rig:
        assert rig.store.stats().blocks == 0 and segment_paths(filled) == []


def test_a_copy_of_a_segment_is_not_taken_for_another(filled: Path) -> None:
    first = segment_paths(filled)[0]
    shutil.copy(first, first.with_name("segment-000000000050.kv"))
    with Rig(config(filled)) as rig:
        assert whole_blocks(rig) == BLOCKS and rig.store.stats().rejected_segments_total == 1


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOENT])
def test_a_segment_that_cannot_be_opened_is_missed_as_a_whole(filled: Path, error: int) -> None:
    with Rig(config(filled)) as rig:
        rig.disk.fail("open", error=error)
        assert rig.get([0]).failed == {key(0): Reason.READ_FAILED}
        assert len(rig.stored(range(BLOCKS))) <= BLOCKS - 56
        whole_blocks(rig)


def test_a_segment_that_cannot_be_read_at_start_is_kept_and_given_up_first(filled: Path) -> None:
    rig = Rig(config(filled), start=False)
    rig.disk.fail("open", error=errno.EACCES)
    rig.store.start()
    with rig:
        assert rig.store.wait_recovered(30)
        newest = segment_paths(filled)[-1]
        assert newest.exists() and 0 < len(rig.stored(range(BLOCKS))) < BLOCKS
        rig.store_blocks(range(1000, 1400))
        until(lambda: not newest.exists(), "the eviction of the unreadable segment")


def test_other_files_in_the_folder_are_left_alone_except_what_is_temporary(filled: Path) -> None:
    folder = config(filled).folder
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-7.kv").write_text("mine")
    (folder / "segment-000000000001.kv.tmp").write_text("half")
    (folder / "about.json.tmp").write_text("half")
    with Rig(config(filled)) as rig:
        assert whole_blocks(rig) == BLOCKS
    assert sorted(path.name for path in folder.iterdir() if not path.name.endswith(".kv")) == [
        "about.json",
        "lock",
        "notes.txt",
    ]
    assert (folder / "segment-7.kv").read_text() == "mine"
