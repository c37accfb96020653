"""What is made of the answer of vLLM's parser, without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.graph import check_serve
from vllm_pd.graph.check_serve import check_serve as checked

COMMANDS = {"decode": ["m", "--max-modle-len", "1"]}


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of the interpreter; vLLM seems to be installed."""
    path = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(check_serve, "find_spec", lambda name: object())
    return path


def write(parser: Path, text: str) -> None:
    parser.write_text(f"#!/bin/sh\ncat > {parser}.asked\n{text}\n")
    parser.chmod(0o755)


def test_what_vllm_does_not_take_is_an_error(parser: Path) -> None:
    write(parser, """echo '{"version": "9.9", "problems": {"decode": "hold what is no option: --x"}}'""")
    with pytest.raises(SettingsError, match=r"args of decode hold what is no option: --x; vLLM 9\.9 does not"):
        checked(COMMANDS)
    assert Path(f"{parser}.asked").read_text() == '{"decode": ["m", "--max-modle-len", "1"]}'


def test_what_it_takes_is_said_to_be_checked(parser: Path) -> None:
    write(parser, """echo noise >&2; echo '{"version": "9.9", "problems": {}}'""")
    assert checked(COMMANDS) == "What workers are told was checked against the options of vLLM 9.9."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "echo 'ImportError: libcuda is missing' >&2; exit 1",
            "vLLM cannot be asked: ImportError: libcuda is missing.",
        ),
        ("echo '[]'", "vLLM cannot be asked: it said nothing."),
        ("exec sleep 60", "vLLM was not loaded within 1 s."),
    ],
)
def test_a_vllm_that_cannot_be_asked_is_said_to_be_not_checked(parser: Path, text: str, why: str) -> None:
    write(parser, text)
    said = checked(COMMANDS, deadline_s=1.0 if "sleep" in text else 60.0)
    assert said == f"What workers are told was not checked against vLLM's options: {why}"


def test_without_vllm_it_is_said_that_nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_serve, "find_spec", lambda name: None)
    assert "was not checked against vLLM's options: vLLM is not installed here." in checked(COMMANDS)
