"""The check of our own code against a vLLM, on made-up rooms and a made-up vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.rooms import check_rooms, optional_news
from tests.contract.source import SourceTree

BASE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

@dataclass
class Parallel:
    rank: int

@dataclass
class Config:
    parallel: Parallel

class Worker(ABC):
    size: int

    def __init__(self, config: Config): ...

    @abstractmethod
    def load(self, job, spec): ...

    def shutdown(self): ...
"""

OURS = """
from vllm.base import Config, Worker

class Ours(Worker):
    def load(self, job, spec): ...

    def rank(self, config: Config) -> int:
        self.shutdown()
        return config.parallel.rank + self.size
"""


def check(tmp_path: Path, base: str = BASE, ours: str = OURS) -> list[str]:
    tree, rooms = build(tmp_path, base, ours)
    return [v.sentence for found in check_rooms(tree, "vLLM 9.9", rooms).values() for v in found]


def build(tmp_path: Path, base: str, ours: str) -> tuple[SourceTree, dict[str, Path]]:
    for name, text in {"vllm/__init__.py": "", "vllm/base.py": base, "room/__init__.py": ours}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return SourceTree({"vllm": tmp_path / "vllm", "room": tmp_path / "room"}), {"room": tmp_path / "room"}


def test_class_that_fits_its_base_holds(tmp_path: Path) -> None:
    assert check(tmp_path) == []


def test_new_abstract_method_is_a_violation(tmp_path: Path) -> None:
    base = BASE + "\n    @abstractmethod\n    def wait(self): ...\n"
    assert check(tmp_path, base) == [
        "room.Ours does not define wait, which is abstract in vllm.base.Worker of vLLM 9.9; "
        "vllm-pd supports vLLM 0.32 or 0.33."
    ]


def test_new_optional_parameter_that_our_override_refuses_is_a_violation(tmp_path: Path) -> None:
    base = BASE.replace("def load(self, job, spec)", "def load(self, job, spec, fast=False)")
    [sentence] = check(tmp_path, base)
    assert "room.Ours.load overrides vllm.base.Worker.load and takes (job, spec) where vLLM may give" in sentence


@pytest.mark.parametrize("ours", ["job, spec, fast=False", "job, spec, **more", "*args, **more"])
def test_override_that_takes_the_new_parameter_holds(tmp_path: Path, ours: str) -> None:
    base = BASE.replace("def load(self, job, spec)", "def load(self, job, spec, fast=False)")
    assert check(tmp_path, base, OURS.replace("def load(self, job, spec)", f"def load(self, {ours})")) == []


@pytest.mark.parametrize(
    ("old", "new", "used"),
    [
        ("    rank: int", "    place: int", "config.parallel.rank"),
        ("    parallel: Parallel", "    layout: Parallel", "config.parallel"),
        ("    size: int", "    length: int", "self.size"),
        ("def shutdown(self)", "def stop(self)", "self.shutdown"),
    ],
)
def test_renamed_field_or_method_is_found_where_we_use_it(tmp_path: Path, old: str, new: str, used: str) -> None:
    found = check(tmp_path, BASE.replace(old, new))
    assert any(f"uses {used}, which in vLLM 9.9 does not exist" in sentence for sentence in found)


def test_call_that_no_longer_fits_is_found(tmp_path: Path) -> None:
    [sentence] = check(tmp_path, BASE.replace("def shutdown(self)", "def shutdown(self, timeout)"))
    assert "room.Ours.rank uses self.shutdown, which in vLLM 9.9 requires timeout too" in sentence


def test_new_method_with_a_default_is_only_news(tmp_path: Path) -> None:
    old, rooms = build(tmp_path / "old", BASE, OURS)
    new, _ = build(tmp_path / "new", BASE + "\n    def lock(self): ...\n", OURS)
    assert optional_news(new, old, rooms) == {"vllm.base.Worker": ["lock"]}
