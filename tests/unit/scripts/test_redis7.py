"""Redis 7 is found, or the reason why there is none is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import redis7
from scripts.debian_packages import REASON
from scripts.redis7 import NoRedisError, fetch, find, major_version


def program(path: Path, says: str, status: int = 0) -> Path:
    """A program that prints `says`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, empty but for a shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_the_version_is_read(tmp_path: Path) -> None:
    assert major_version(program(tmp_path / "a", "Redis server v=7.0.15 sha=0 bits=64")) == 7
    assert major_version(program(tmp_path / "b", "Redis server v=7.0.15", status=127)) == 0
    assert major_version(tmp_path / "none") == 0


def test_a_server_on_path_is_enough_if_it_is_new_enough(path: Path, tmp_path: Path) -> None:
    fetched = program(tmp_path / "cache" / "redis-server", "Redis server v=7.0.15")
    program(path / "redis-server", "Redis server v=6.0.16")
    assert find(tmp_path / "cache") == fetched
    fetched.unlink()
    with pytest.raises(NoRedisError, match="make install"):
        find(tmp_path / "cache")
    newer = program(path / "redis-server", "Redis server v=8.2.0")
    assert find(tmp_path / "cache") == newer


def test_without_apt_the_reason_is_said_and_kept(path: Path, tmp_path: Path) -> None:
    with pytest.raises(NoRedisError, match="no apt-get"):
        fetch(tmp_path / "cache")
    with pytest.raises(NoRedisError, match="no apt-get"):
        find(tmp_path / "cache")


def test_what_apt_answers_is_the_reason(path: Path, tmp_path: Path) -> None:
    program(path / "dpkg-deb", "")
    apt = path / "apt-get"
    apt.write_text("#!/bin/sh\necho 'W: careful' >&2\necho 'E: Unable to locate package redis-server' >&2\nexit 100\n")
    apt.chmod(0o755)
    with pytest.raises(NoRedisError, match=r"^apt-get failed: Unable to locate package redis-server$"):
        fetch(tmp_path / "cache")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [REASON]


def test_a_machine_without_it_goes_on(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert redis7.main(tmp_path) == 0
    assert "Redis 7 is not here: this machine has no apt-get" in capsys.readouterr().out
