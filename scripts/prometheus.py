"""Prometheus for the tests, without root: Debian's or Ubuntu's package, unpacked into `.cache/prometheus`.

    python3 -m scripts.prometheus

`make install` runs it. VLLM_PD_TEST_PROMETHEUS names another `prometheus`, with `promtool` in the same folder; both on
PATH do as well. Where there is none of it and no apt, it says so, and the tests on Prometheus are skipped with that
reason. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.debian_packages import PackagesError, unpack

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "prometheus"
VARIABLE = "VLLM_PD_TEST_PROMETHEUS"
_REASON = "why-not.txt"


class NoPrometheusError(Exception):
    """There is no Prometheus; the text says why, as the end of a sentence."""


@dataclass(frozen=True)
class Programs:
    """Of one release."""

    prometheus: Path
    promtool: Path

    def run(self) -> bool:
        """Whether both start here."""
        return all(_starts(program) for program in (self.prometheus, self.promtool))


def find(folder: Path = FOLDER) -> Programs:
    """Those that are named, those on PATH, or those fetched before.

    Raises:
        NoPrometheusError: there are none.
    """
    if named := os.environ.get(VARIABLE):
        programs = _beside(Path(named))
        if not programs.run():
            raise NoPrometheusError(f"{VARIABLE} names {named}, which does not run with a promtool beside it")
        return programs
    on_path = [shutil.which(name) for name in ("prometheus", "promtool")]
    candidates = [Programs(*map(Path, filter(None, on_path)))] if all(on_path) else []
    for programs in [*candidates, _beside(folder / "root" / "usr" / "bin" / "prometheus")]:
        if programs.run():
            return programs
    reason = folder / _REASON
    raise NoPrometheusError(reason.read_text() if reason.exists() else "nobody has fetched it; run `make install`")


def fetch(folder: Path = FOLDER) -> Programs:
    """Unpack the package into `folder`.

    Raises:
        NoPrometheusError: it cannot be done here; the reason is kept for `find`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        programs = _beside(unpack(["prometheus"], folder) / "usr" / "bin" / "prometheus")
        if not programs.run():
            raise PackagesError("the prometheus of this system's packages does not run here")
    except PackagesError as e:
        (folder / _REASON).write_text(str(e))
        raise NoPrometheusError(str(e)) from None
    (folder / _REASON).unlink(missing_ok=True)
    return programs


def _beside(prometheus: Path) -> Programs:
    return Programs(prometheus, prometheus.with_name("promtool"))


def _starts(program: Path) -> bool:
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def main(folder: Path = FOLDER) -> int:
    """Find or fetch; ends with 0 either way, since only some tests need it."""
    try:
        programs = find(folder)
    except NoPrometheusError:
        try:
            programs = fetch(folder)
        except NoPrometheusError as e:
            print(f"Prometheus is not here: {e}. The tests on it will be skipped.")
            return 0
    print(f"Prometheus: {programs.prometheus}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
