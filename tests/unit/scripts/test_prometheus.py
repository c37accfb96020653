"""Prometheus is found where it is named, on PATH or where it was fetched to; or why there is none is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import prometheus
from scripts.prometheus import VARIABLE, NoPrometheusError, Programs, fetch, find
from tests.unit.scripts.test_redis7 import path, program

__all__ = ["path"]


def programs(folder: Path) -> Programs:
    return Programs(program(folder / "prometheus", "prometheus, version 2"), program(folder / "promtool", "promtool"))


def test_the_named_one_comes_before_path_and_path_before_the_fetched_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    cache = tmp_path / "cache"
    fetched = programs(cache / "root" / "usr" / "bin")
    assert find(cache) == fetched
    on_path = programs(path)
    assert find(cache) == on_path
    named = programs(tmp_path / "named")
    monkeypatch.setenv(VARIABLE, str(named.prometheus))
    assert find(cache) == named


def test_a_wrong_name_is_an_error_even_where_there_is_another_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(path)
    lonely = program(tmp_path / "prometheus", "prometheus, version 2")
    monkeypatch.setenv(VARIABLE, str(lonely))
    with pytest.raises(NoPrometheusError, match="does not run with a promtool beside it"):
        find(tmp_path / "cache")


def test_without_apt_the_reason_is_said_and_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NoPrometheusError, match="make install"):
        find(tmp_path / "cache")
    with pytest.raises(NoPrometheusError, match="no apt-get"):
        fetch(tmp_path / "cache")
    with pytest.raises(NoPrometheusError, match="no apt-get"):
        find(tmp_path / "cache")
    assert prometheus.main(tmp_path / "cache") == 0
    assert "Prometheus is not here: this machine has no apt-get" in capsys.readouterr().out
