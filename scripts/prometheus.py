"""Prometheus for the tests, without root: Debian's or Ubuntu's package, unpacked into `.cache/prometheus`.

    python3 -m scripts.prometheus

`make install` runs it. VLLM_PD_TEST_PROMETHEUS names another `prometheus`, with `promtool` in the same folder; both on
PATH do as well. Where there is none of it and no apt, it says so, and the tests on Prometheus are skipped with that
reason. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.debian_packages import PackagesError, provide, reason_kept, unpack, version_of, why_not

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "prometheus"
VARIABLE = "VLLM_PD_TEST_PROMETHEUS"


class NoPrometheusError(PackagesError):
    """There is no Prometheus; the text says why, as the end of a sentence."""


@dataclass(frozen=True)
class Programs:
    """Of one release."""

    prometheus: Path
    promtool: Path

    def run(self) -> bool:
        """Whether both start here."""
        return all(version_of(program) is not None for program in (self.prometheus, self.promtool))


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
    raise NoPrometheusError(why_not(folder))


def fetch(folder: Path = FOLDER) -> Programs:
    """Unpack the package into `folder`.

    Raises:
        NoPrometheusError: it cannot be done here; the reason is kept for `find`.
    """
    with reason_kept(folder):
        try:
            programs = _beside(unpack(["prometheus"], folder) / "usr" / "bin" / "prometheus")
        except PackagesError as e:
            raise NoPrometheusError(str(e)) from None
        if not programs.run():
            raise NoPrometheusError("the prometheus of this system's packages does not run here")
    return programs


def _beside(prometheus: Path) -> Programs:
    return Programs(prometheus, prometheus.with_name("promtool"))


def main(folder: Path = FOLDER) -> int:
    """Find or fetch; ends with 0 either way."""
    return provide("Prometheus", lambda: find(folder).prometheus, lambda: fetch(folder).prometheus)


if __name__ == "__main__":
    sys.exit(main())
