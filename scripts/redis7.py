"""Redis 7 for the tests, without root: Debian's or Ubuntu's packages, unpacked into `.cache/redis7`.

    python3 -m scripts.redis7

`make install` runs it. A `redis-server` on PATH is enough; where there is neither that nor apt, it says so, and the
tests on Redis are skipped with that reason. Standard library only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "redis7"
OLDEST = 7
# The program, and the libraries of it that a small system lacks.
PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
_REASON = "why-not.txt"
_WRAPPER = """#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$(echo "$here"/root/usr/lib/*-linux-gnu)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$here/root/usr/bin/redis-server" "$@"
"""
_DOWNLOAD_S = 120.0
_VERSION = re.compile(r"v=(\d+)\.")


class NoRedisError(Exception):
    """There is no Redis 7; the text says why, as the end of a sentence."""


def find(folder: Path = FOLDER) -> Path:
    """A `redis-server` of version 7 or newer: on PATH, or fetched before.

    Raises:
        NoRedisError: there is none.
    """
    on_path = shutil.which("redis-server")
    candidates = [Path(on_path)] if on_path else []
    for binary in [*candidates, folder / "redis-server"]:
        if major_version(binary) >= OLDEST:
            return binary
    reason = folder / _REASON
    raise NoRedisError(reason.read_text() if reason.exists() else "nobody has fetched it; run `make install`")


def major_version(binary: Path) -> int:
    """Of a `redis-server`; 0 when it does not run."""
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(done.stdout)
    return int(found[1]) if found and done.returncode == 0 else 0


def fetch(folder: Path = FOLDER) -> Path:
    """Unpack the packages into `folder`. What it needs of apt's state it keeps there too.

    Raises:
        NoRedisError: it cannot be done here; the reason is kept for `find`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        binary = _fetch(folder)
    except NoRedisError as e:
        (folder / _REASON).write_text(str(e))
        raise
    (folder / _REASON).unlink(missing_ok=True)
    return binary


def _fetch(folder: Path) -> Path:
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NoRedisError(f"this machine has no {program} to fetch Debian's packages with")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        packages = Path(work, "packages")
        packages.mkdir()
        try:
            _apt(["download", *PACKAGES], packages)
        except NoRedisError:
            # No list of packages yet, or an old one. It is fetched into a folder of ours: root is not needed.
            state = _own_state(Path(work))
            _apt([*state, "update"], packages)
            _apt([*state, "download", *PACKAGES], packages)
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        for package in sorted(packages.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(root)], packages)
    binary = folder / "redis-server"
    binary.write_text(_WRAPPER)
    binary.chmod(0o755)
    version = major_version(binary)
    if version < OLDEST:
        trouble = f"is of version {version}" if version else "does not run here"
        raise NoRedisError(f"the redis-server of this system's packages {trouble}")
    return binary


def _own_state(work: Path) -> list[str]:
    """Options for an apt that keeps lists and cache in `work`."""
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    return ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]


def _apt(arguments: Sequence[str], cwd: Path) -> None:
    _run(["apt-get", "-q", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=20", *arguments], cwd)


def _run(command: Sequence[str], cwd: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoRedisError(f"{command[0]} did not end within {_DOWNLOAD_S:g} s") from None
    except OSError as e:
        raise NoRedisError(f"{command[0]} could not be started ({e})") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.startswith("E: ")] or done.stderr.splitlines()
        raise NoRedisError(f"{command[0]} failed: {words[-1].removeprefix('E: ') if words else done.returncode}")


def main(folder: Path = FOLDER) -> int:
    """Find or fetch; ends with 0 either way, since only some tests need it."""
    try:
        binary = find(folder)
    except NoRedisError:
        try:
            binary = fetch(folder)
        except NoRedisError as e:
            print(f"Redis 7 is not here: {e}. The tests on it will be skipped.")
            return 0
    print(f"Redis 7: {binary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
