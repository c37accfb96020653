"""The Python files of a vLLM release, from its wheel: downloaded once without dependencies, never installed or run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from vllm_pd.errors import PDError

CACHE = Path(__file__).parents[2] / ".cache" / "contract"

RETRIES = 3
SOCKET_TIMEOUT_S = 30
DOWNLOAD_DEADLINE_S = 1200
"""A wheel has several hundred megabytes."""

# The sources are the same for every machine, so the wheel for the commonest one is taken wherever this runs.
_PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(17, 41)), "manylinux2014_x86_64", "manylinux1_x86_64"]
_ABIS = ("abi3", "cp312", "none")


class WheelUnavailable(PDError):
    """The release cannot be had; the message says why and what to do instead."""


def source_of(version: str, cache: Path = CACHE) -> Path:
    """Folder that holds the `vllm` package of this release, from the cache or downloaded into it.

    Raises:
        WheelUnavailable: no such version, no network, or no room on the disk.
    """
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+!-]*", version):
        raise WheelUnavailable(f"{version!r} is not a version of vLLM; write it like 0.33.0.")
    folder = cache / version
    if (folder / "vllm" / "__init__.py").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=cache))
    try:
        unpack(_download(version, work), work / "source")
        _publish(work / "source", folder)
    except (OSError, zipfile.BadZipFile) as e:
        raise WheelUnavailable(
            f"The wheel of vLLM {version} cannot be unpacked into {cache} ({e}); free some disk space and try again."
        ) from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def unpack(wheel: Path, into: Path) -> None:
    """Write the .py files of the `vllm` package below `into`; names that lead elsewhere are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if path.suffix == ".py" and path.parts[0] == "vllm" and ".." not in path.parts:
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    if not (into / "vllm" / "__init__.py").is_file():
        raise zipfile.BadZipFile(f"{wheel.name} holds no package vllm")


def _download(version: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--no-cache-dir"]
    command += ["--retries", str(RETRIES), "--timeout", str(SOCKET_TIMEOUT_S), "--dest", str(into)]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    for abi in _ABIS:
        command += ["--abi", abi]
    print(f"Downloading the wheel of vLLM {version} (several hundred MB, once) ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise _unavailable(version, f"it took longer than {DOWNLOAD_DEADLINE_S} s") from e
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1] if errors else f"pip ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
        raise _unavailable(version, reason)
    return wheels[0]


def _unavailable(version: str, reason: str) -> WheelUnavailable:
    return WheelUnavailable(
        f"The wheel of vLLM {version} cannot be downloaded ({reason}); check the version and the network, or unpack "
        "the wheel elsewhere and give its folder with --source."
    )


def _publish(source: Path, folder: Path) -> None:
    try:
        source.rename(folder)
    except OSError:
        # Another run has put the same files there meanwhile, or an interrupted one left a part.
        if not (folder / "vllm" / "__init__.py").is_file():
            shutil.rmtree(folder)
            source.rename(folder)
