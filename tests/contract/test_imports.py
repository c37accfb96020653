"""Who imports vLLM: one module. Who imports neither vLLM nor torch: everything a router host needs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contract.rooms import COMPAT, ROOMS
from tests.contract.source import SourceTree

OURS = SourceTree(ROOMS)
MODULES = [module for room in ROOMS for module in OURS.modules(room)]

ALLOWED = {"vllm.logger"}
"""Public and stable; importing it from vllm_compat would only hide who logs."""

LIGHT = [
    module
    for module in MODULES
    if module.startswith(("vllm_pd.router", "vllm_pd.state", "vllm_pd.graph", "vllm_pd.planner"))
    or module in ("vllm_pd", "vllm_pd.cli", "vllm_pd.errors", "vllm_pd.layered", "vllm_pd.settings", COMPAT)
]

REFUSE = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch"):
            raise ImportError(f"{name} is refused")

sys.meta_path.insert(0, Refuse())
failed = []
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as e:
        failed.append(f"{module}: {e}")
sys.exit("; ".join(failed) or 0)
"""


def imported(node: ast.AST) -> Iterator[str]:
    """Modules that run-time code imports; blocks under `if TYPE_CHECKING` are left out."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.orelse:
            yield from imported(statement)
        return
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))
    for child in ast.iter_child_nodes(node):
        yield from imported(child)


@pytest.mark.parametrize("module", [m for m in MODULES if m != COMPAT])
def test_module_takes_vllm_only_through_vllm_compat(module: str) -> None:
    taken = {name for name in imported(OURS.tree_of(module)) if name == "vllm" or name.startswith("vllm.")}
    assert taken <= ALLOWED


def test_vllm_compat_imports_nothing_of_vllm_before_it_is_asked() -> None:
    assert [name for name in imported(OURS.tree_of(COMPAT)) if name.startswith(("vllm.", "torch"))] == []


def test_light_modules_import_where_vllm_and_torch_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, *LIGHT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_scan_sees_imports_in_functions_and_not_those_for_type_checkers() -> None:
    source = """
if TYPE_CHECKING:
    import vllm.a
else:
    import vllm.b
def f():
    from vllm.c import d
    importlib.import_module("vllm.e")
"""
    assert list(imported(ast.parse(source))) == ["vllm.b", "vllm.c", "vllm.e"]
