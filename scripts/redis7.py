"""Redis 7 for the tests, without root: Debian's or Ubuntu's packages, unpacked into `.cache/redis7`.

    python3 -m scripts.redis7

`make install` runs it. A `redis-server` on PATH is enough; where there is neither that nor apt, it says so, and the
tests on Redis are skipped with that reason. Standard library only.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from scripts.debian_packages import PackagesError, provide, reason_kept, unpack, version_of, why_not

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "redis7"
OLDEST = 7
# The program, and the libraries of it that a small system lacks.
PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")
_WRAPPER = """#!/bin/sh
here=$(dirname "$0")
LD_LIBRARY_PATH="$(echo "$here"/root/usr/lib/*-linux-gnu)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$here/root/usr/bin/redis-server" "$@"
"""
_VERSION = re.compile(r"v=(\d+)\.")


class NoRedisError(PackagesError):
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
    raise NoRedisError(why_not(folder))


def major_version(binary: Path) -> int:
    """Of a `redis-server`; 0 when it does not run."""
    found = _VERSION.search(version_of(binary) or "")
    return int(found[1]) if found else 0


def fetch(folder: Path = FOLDER) -> Path:
    """Unpack the packages into `folder`. What it needs of apt's state it keeps there too.

    Raises:
        NoRedisError: it cannot be done here; the reason is kept for `find`.
    """
    with reason_kept(folder):
        return _fetch(folder)


def _fetch(folder: Path) -> Path:
    try:
        unpack(PACKAGES, folder)
    except PackagesError as e:
        raise NoRedisError(str(e)) from None
    binary = folder / "redis-server"
    binary.write_text(_WRAPPER)
    binary.chmod(0o755)
    version = major_version(binary)
    if version < OLDEST:
        trouble = f"is of version {version}" if version else "does not run here"
        raise NoRedisError(f"the redis-server of this system's packages {trouble}")
    return binary


def main(folder: Path = FOLDER) -> int:
    """Find or fetch; ends with 0 either way."""
    return provide("Redis 7", lambda: find(folder), lambda: fetch(folder))


if __name__ == "__main__":
    sys.exit(main())
