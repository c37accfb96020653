"""The checker on small made-up packages: what it accepts, and the sentence it gives for what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.checker import check, parse_member
from tests.contract.shapes import Missing, Thing
from tests.contract.source import SourceTree, SourceView
from vllm_pd.vllm_compat.internal import Internal

WHY = "the test uses it"
TAIL = f", which vllm-pd needs ({WHY}); vllm-pd supports vLLM 0.32 or 0.33."


def view_of(folder: Path, files: dict[str, str]) -> SourceView:
    for name, text in {"vllm/__init__.py": "", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceView(SourceTree({"vllm": folder / "vllm"}), "vLLM 9.9")


def sentences(view: SourceView, *members: str, module: str = "vllm.engine", name: str = "Engine") -> list[str]:
    return [v.sentence for v in check(Internal(name, module, name, members, WHY), view)]


ENGINE = """
from abc import ABC, abstractmethod

class Base(ABC):
    limit: int = 3

    def __init__(self, config, *, tracing=False):
        self.config = config

    @property
    def size(self): ...

    @classmethod
    def make(cls, args): ...

    @staticmethod
    def add_flags(parser): ...

class Engine(Base):
    def run(self, request, budget, priority=0):
        self.last: int = request
"""


def test_a_class_with_everything_that_is_used_holds_inherited_members_included(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": ENGINE})
    used = ("limit", "config", "size", "last", "__init__(config)", "make(args)", "add_flags(parser)")
    assert sentences(view, *used, "run(request, budget)", "run(request, budget, priority)") == []


def test_missing_module_is_named(tmp_path: Path) -> None:
    view = view_of(tmp_path, {})
    assert sentences(view) == [f"vLLM 9.9 has no module vllm.engine, where vllm-pd expects Engine{TAIL}"]


def test_missing_class_is_named(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "class Motor: ..."})
    assert sentences(view, "run(a)") == [f"vLLM 9.9 has no Engine in vllm.engine{TAIL}"]


def test_renamed_parameter_is_shown_with_the_new_signature(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": ENGINE})
    assert sentences(view, "run(request, limit)") == [
        "vllm.engine.Engine.run of vLLM 9.9 takes (request, budget, priority=...) where vllm-pd uses (request, limit)"
        + TAIL
    ]


def test_new_required_parameter_is_named(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "class Engine:\n  def run(self, a, b, *, c, d=1): ..."})
    assert sentences(view, "run(a)") == [
        f"vllm.engine.Engine.run of vLLM 9.9 requires b, c too, which vllm-pd does not give{TAIL}"
    ]


def test_parameter_that_became_keyword_only_does_not_hold(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "class Engine:\n  def run(self, a, *, b=1): ..."})
    [sentence] = sentences(view, "run(a, b)")
    assert "takes (a, *, b=...) where vllm-pd uses (a, b)" in sentence


def test_attribute_gone_and_method_gone_are_told_apart(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "class Engine: ..."})
    assert sentences(view, "limit", "run(a)") == [
        f"vllm.engine.Engine of vLLM 9.9 has no attribute limit{TAIL}",
        f"vllm.engine.Engine of vLLM 9.9 has no method run{TAIL}",
    ]


def test_method_that_became_an_attribute_does_not_hold(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "class Engine:\n  @property\n  def run(self): ..."})
    assert sentences(view, "run()") == [f"vllm.engine.Engine.run of vLLM 9.9 is not a method any more{TAIL}"]


@pytest.mark.parametrize(
    "reexport",
    [
        "from vllm.core.motor import Engine",
        "from .core.motor import Engine",
        "from vllm.core import *",
        "import vllm.core.motor as m\nEngine = m.Engine",
        "try:\n    from vllm.core.motor import Engine\nexcept ImportError:\n    Engine = None",
    ],
)
def test_class_moved_and_re_exported_holds(tmp_path: Path, reexport: str) -> None:
    core = {"vllm/core/__init__.py": "from .motor import Engine", "vllm/core/motor.py": ENGINE}
    view = view_of(tmp_path, {"vllm/engine.py": reexport, **core})
    assert sentences(view, "run(request, budget)", "config") == []


def test_submodule_counts_as_a_name_of_its_package(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine/__init__.py": "", "vllm/engine/loop.py": "def load(): ..."})
    assert sentences(view, "load()", name="loop") == []
    assert sentences(view, "load(a)", name="loop") != []


@pytest.mark.parametrize(
    "source",
    [
        "__all__ = ['Engine']\ndef __getattr__(name):\n  if name in __all__: return 1",
        "TABLE = {'Engine': 'a.b'}\ndef __getattr__(name):\n  if name in TABLE: return 1",
        "def __getattr__(name):\n  if name == 'Engine': return 1",
        "Engine: int",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  Engine: int",
    ],
)
def test_lazily_provided_name_holds(tmp_path: Path, source: str) -> None:
    assert sentences(view_of(tmp_path, {"vllm/engine.py": source})) == []


def test_name_that_a_lazy_module_does_not_offer_is_missing(tmp_path: Path) -> None:
    source = "def __getattr__(name):\n  if name == 'Motor': return 1\n  raise AttributeError('Engine')"
    view = view_of(tmp_path, {"vllm/engine.py": source})
    assert view.find("vllm.engine", "Engine") is Missing.NAME


def test_members_of_an_object_are_those_of_its_annotation(tmp_path: Path) -> None:
    source = ENGINE + "\nif True:\n    current: 'Engine'\n"
    view = view_of(tmp_path, {"vllm/engine.py": source})
    assert sentences(view, "size", "run(request, budget)", name="current") == []
    assert sentences(view, "speed", name="current") != []


def test_constructor_of_a_dataclass_follows_its_fields(tmp_path: Path) -> None:
    source = """
from dataclasses import dataclass, field
from typing import ClassVar

@dataclass
class Base:
    kind: ClassVar[str]
    a: int

@dataclass(frozen=True)
class Engine(Base):
    b: int
    c: list = field(default_factory=list)
    d: int = field(init=False)
    e: int = field(kw_only=True)
"""
    view = view_of(tmp_path, {"vllm/engine.py": source})
    assert sentences(view, "a", "b", "d") == []
    [sentence] = sentences(view, "__init__(a, b)")
    assert "requires e too" in sentence


def test_base_that_imports_in_a_circle_ends_in_a_sentence(tmp_path: Path) -> None:
    view = view_of(
        tmp_path, {"vllm/engine.py": "from vllm.other import Engine", "vllm/other.py": "from vllm.engine import Engine"}
    )
    assert sentences(view) == [f"vLLM 9.9 has no Engine in vllm.engine{TAIL}"]


def test_nothing_is_run_when_source_is_read(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"vllm/engine.py": "raise SystemExit\nclass Engine: ..."})
    assert isinstance(view.find("vllm.engine", "Engine"), Thing)


def test_table_entry_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a name"):
        parse_member("run(a=1)")
