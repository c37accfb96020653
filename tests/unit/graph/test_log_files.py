"""Logs that do not grow for ever, and are read while they are written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_pd.graph.log_files import Follower, chosen, cut


def test_a_log_that_is_too_long_begins_anew_and_keeps_one_older_part(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    (tmp_path / "short.log").write_text("x")
    with log.open("ab") as writer:
        writer.write(b"old\n" * 100)
        writer.flush()
        assert cut(tmp_path, longest=100) == ["decode-0.log"]
        writer.write(b"new\n")
    assert log.read_text() == "new\n"
    assert (tmp_path / "decode-0.log.1").read_text() == "old\n" * 100
    assert cut(tmp_path, longest=100) == []


def test_a_log_is_cut_also_when_the_disk_has_no_room_for_the_older_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    log = tmp_path / "decode-0.log"
    log.write_bytes(b"old\n" * 100)
    assert cut(tmp_path, longest=100) == ["decode-0.log"]
    assert log.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["decode-0.log"]


def test_a_follower_gets_whole_lines_also_of_a_log_that_was_cut(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    follower = Follower(log, "a")
    assert follower.more() == []
    log.write_text("one\ntwo\nthr")
    assert follower.last(1) == ["thr"]
    with log.open("a") as file:
        file.write("ee\nfour\n")
    assert follower.more() == ["ee", "four"]
    log.write_text("again\nun")
    assert follower.more() == ["again"]
    with log.open("a") as file:
        file.write("til\n")
    assert follower.more() == ["until"]


def test_logs_are_chosen_by_process_or_component(tmp_path: Path) -> None:
    for name in ("decode-0", "decode-1", "decode-big-0", "store"):
        (tmp_path / f"{name}.log").touch()
    assert [f.name for f in chosen(tmp_path, ["decode"])] == ["decode-0", "decode-1"]
    assert [f.name for f in chosen(tmp_path, ["store", "decode-1"])] == ["decode-1", "store"]
    assert len(chosen(tmp_path, [])) == 4
