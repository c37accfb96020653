"""What vllm-pd uses of vLLM is there: in the installed one, and in the sources of the next one if they are at hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.accelerators import ACCELERATORS
from tests.contract.checker import check, check_all
from tests.contract.installed import InstalledView
from tests.contract.rooms import REPOSITORY, check_rooms, tree_with
from tests.contract.source import SourceTree, SourceView
from tests.contract.wheel import CACHE
from vllm_pd import vllm_compat
from vllm_pd.vllm_compat import INTERNALS
from vllm_pd.vllm_compat.internal import Internal

pytestmark = pytest.mark.vllm

NEXT = "0.33.0"


@pytest.fixture(scope="module")
def installed_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def installed_tree(installed_folder: Path) -> SourceTree:
    """Read by several tests, and the reading takes longest."""
    return tree_with(installed_folder)


@pytest.mark.parametrize("entry", INTERNALS, ids=lambda entry: entry.alias)
def test_installed_vllm_has_what_is_used(entry: Internal, installed_folder: Path) -> None:
    assert [v.sentence for v in check(entry, InstalledView())] == []


def test_every_internal_can_be_imported_by_its_alias(installed_folder: Path) -> None:
    for entry in INTERNALS:
        getattr(vllm_compat, entry.alias)


def test_source_of_the_installed_vllm_holds_as_its_objects_do(installed_tree: SourceTree) -> None:
    view = SourceView(installed_tree, "the installed vLLM")
    assert [v.sentence for found in check_all((*INTERNALS, *ACCELERATORS), view).values() for v in found] == []


def test_our_classes_and_calls_fit_the_installed_vllm(installed_tree: SourceTree) -> None:
    found = check_rooms(installed_tree, "the installed vLLM")
    assert any("PDConnector" in subject for subject in found)
    assert [v.sentence for violations in found.values() for v in violations] == []


def test_command_reports_the_installed_source_as_json(installed_folder: Path) -> None:
    done = _command("--source", str(installed_folder.parent), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["holds"]) == (0, True)
    assert set(report["internals"]) == {entry.alias for entry in (*INTERNALS, *ACCELERATORS)}


def test_command_says_what_is_wrong_with_a_folder_that_holds_no_vllm(tmp_path: Path) -> None:
    done = _command("--source", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("give the folder into which a wheel was unpacked.")


def test_command_fails_for_a_vllm_that_lacks_everything(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    done = _command("--source", str(tmp_path))
    assert done.returncode == 1
    assert f"violation  EngineArgs: vLLM in {tmp_path} has no module vllm.engine.arg_utils" in done.stdout


@pytest.mark.skipif(
    not (CACHE / NEXT).is_dir(), reason=f"the sources of vLLM {NEXT} are not cached: make test-contract VLLM={NEXT}"
)
def test_next_vllm_has_what_is_used() -> None:
    _assert_release_holds(NEXT)


@pytest.mark.slow
def test_next_vllm_is_downloaded_and_has_what_is_used() -> None:
    _assert_release_holds(NEXT)


def _assert_release_holds(version: str) -> None:
    done = _command("--vllm", version)
    violations = [line for line in done.stdout.splitlines() if line.startswith("violation")]
    assert violations == []
    assert done.returncode == 0, done.stderr


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.contract", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
