"""What is said of block files: each change once, and only what is still so when it is said."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm_pd.kv_offload.ssd_inventory import SsdInventory  # noqa: E402
from vllm_pd.vllm_compat import make_offload_key  # noqa: E402

FOLDER = "/ssd/model_1_r0"


def key(n: int, group: int = 0) -> bytes:
    made: bytes = make_offload_key(n.to_bytes(32, "big"), group)
    return made


def path(n: int, group: int = 0, folder: str = FOLDER) -> str:
    name = n.to_bytes(32, "big").hex()
    return f"{folder}/{name[:3]}/{name[3:5]}_g{group}/{name}.bin"


def test_each_change_is_said_once() -> None:
    inventory = SsdInventory(FOLDER)
    inventory.written([key(1), key(2, 3)])
    inventory.written([key(1)])
    assert inventory.take_changes(10) == ([key(1), key(2, 3)], [])
    inventory.deleted(path(2, 3))
    inventory.deleted(path(2, 3))
    inventory.deleted(path(9))
    assert inventory.take_changes(10) == ([], [key(2, 3)])
    assert inventory.take_changes(10) == ([], [])


def test_what_came_and_went_before_it_was_said_is_said_as_gone() -> None:
    inventory = SsdInventory(FOLDER)
    inventory.written([key(1)])
    inventory.deleted(path(1))
    assert inventory.take_changes(10) == ([], [key(1)])


def test_changes_are_said_in_bounded_portions() -> None:
    inventory = SsdInventory(FOLDER)
    inventory.written([key(n) for n in range(25)])
    portions = [len(inventory.take_changes(10)[0]) for _ in range(4)]
    assert portions == [10, 10, 5, 0]


def test_a_scan_finds_what_came_and_went_by_other_hands_and_spares_what_is_written_meanwhile() -> None:
    inventory = SsdInventory(FOLDER)
    inventory.written([key(1), key(2)])
    inventory.take_changes(10)
    inventory.scan_begins()
    inventory.found(path(1))
    inventory.written([key(3)])
    inventory.found(path(4))
    inventory.scan_ended()
    assert inventory.take_changes(10) == ([key(3), key(4)], [key(2)])


def test_a_scan_that_was_cut_short_removes_nothing() -> None:
    inventory = SsdInventory(FOLDER)
    inventory.written([key(1)])
    inventory.take_changes(10)
    inventory.scan_begins()
    inventory.scan_begins()
    inventory.found(path(1))
    inventory.scan_ended()
    assert inventory.take_changes(10) == ([], [])


@pytest.mark.parametrize(
    "other",
    [
        path(1, folder="/ssd/model_1_r1"),
        f"{FOLDER}/000/00_g0/no hash.bin",
        f"{FOLDER}/000/00/{'00' * 32}.bin",
        f"{FOLDER}/000/00_g-1/{'00' * 32}.bin",
        f"{FOLDER}/000/00_g0/{'00' * 32}.tmp",
        f"{FOLDER}/config.json",
    ],
)
def test_other_files_are_passed_over(other: str) -> None:
    inventory = SsdInventory(FOLDER)
    inventory.found(other)
    inventory.deleted(other)
    assert inventory.take_changes(10) == ([], [])
