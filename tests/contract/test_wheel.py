"""Unpacking a wheel takes its Python files and nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.contract.wheel import WheelUnavailable, source_of, unpack


def make_wheel(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "x = 1\n")
    return path


def test_only_python_files_of_the_package_are_written(tmp_path: Path) -> None:
    names = ["vllm/__init__.py", "vllm/a/b.py", "vllm/_C.abi3.so", "other/c.py", "vllm/../../escaped.py", "/vllm/d.py"]
    unpack(make_wheel(tmp_path / "w.whl", names), tmp_path / "out" / "source")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert written == {"source/vllm/__init__.py", "source/vllm/a/b.py"}


def test_wheel_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zipfile.BadZipFile, match="holds no package vllm"):
        unpack(make_wheel(tmp_path / "w.whl", ["other/c.py"]), tmp_path / "out")


def test_cached_release_needs_no_download(tmp_path: Path) -> None:
    (tmp_path / "0.99.0" / "vllm").mkdir(parents=True)
    (tmp_path / "0.99.0" / "vllm" / "__init__.py").touch()
    assert source_of("0.99.0", tmp_path) == tmp_path / "0.99.0"


@pytest.mark.parametrize("version", ["", "../0.33.0", "latest", "--index-url=x", "0.33.0 x"])
def test_text_that_is_no_version_is_refused_before_anything_is_fetched(tmp_path: Path, version: str) -> None:
    with pytest.raises(WheelUnavailable, match="is not a version of vLLM"):
        source_of(version, tmp_path)
