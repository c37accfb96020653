"""Programs of Debian's or Ubuntu's packages without root: downloaded by apt, unpacked into a folder.

Nothing is installed. What apt needs of its own state is kept in the folder too, and why it could not be done. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REASON = "why-not.txt"
_DOWNLOAD_S = 120.0
_VERSION_S = 60.0


class PackagesError(Exception):
    """They cannot be had here; the text says why, as the end of a sentence."""


def provide(what: str, find: Callable[[], Path], fetch: Callable[[], Path]) -> int:
    """Find or fetch, and say where it is or why it is not here; returns 0 either way, since only some tests need it."""
    try:
        found = find()
    except PackagesError:
        try:
            found = fetch()
        except PackagesError as e:
            print(f"{what} is not here: {e}. The tests on it will be skipped.")
            return 0
    print(f"{what}: {found}")
    return 0


@contextlib.contextmanager
def reason_kept(folder: Path) -> Iterator[None]:
    """While something is fetched into the folder, which is made: why it failed is kept there for `why_not`."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except PackagesError as e:
        (folder / REASON).write_text(str(e))
        raise
    (folder / REASON).unlink(missing_ok=True)


def why_not(folder: Path) -> str:
    """Why there is nothing in the folder, as the end of a sentence."""
    reason = folder / REASON
    return reason.read_text() if reason.exists() else "nobody has fetched it; run `make install`"


def version_of(program: Path) -> str | None:
    """What it says of its version; None when it does not run here."""
    try:
        done = subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def unpack(packages: Sequence[str], folder: Path) -> Path:
    """Unpack them into a new `folder`/root and return that.

    Raises:
        PackagesError: there is no apt, or it does not find or reach them.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise PackagesError(f"this machine has no {program} to fetch Debian's packages with")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        downloaded = Path(work, "packages")
        downloaded.mkdir()
        try:
            _apt(["download", *packages], downloaded)
        except PackagesError:
            # No list of packages yet, or an old one. It is fetched into a folder of ours: root is not needed.
            state = _own_state(Path(work))
            _apt([*state, "update"], downloaded)
            _apt([*state, "download", *packages], downloaded)
        root = folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        for package in sorted(downloaded.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(package), str(root)], downloaded)
    return root


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
        raise PackagesError(f"{command[0]} did not end within {_DOWNLOAD_S:g} s") from None
    except OSError as e:
        raise PackagesError(f"{command[0]} could not be started ({e})") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.startswith("E: ")] or done.stderr.splitlines()
        raise PackagesError(f"{command[0]} failed: {words[-1].removeprefix('E: ') if words else done.returncode}")
