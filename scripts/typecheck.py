"""Type-checks the package and the scripts: `python -m scripts.typecheck`.

mypy finds modules by folder, and our rooms get their import names from setup.py. So a tree of links is laid out that
looks like the installed package (`vllm_pd/connectors` -> `connectors`, ...), and mypy runs on that.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".cache" / "typecheck"
ROOMS = ("connectors", "kv_offload", "router")


def lay_out(tree: Path = TREE) -> Path:
    """Build the tree of links anew and return the folder to check."""
    package = tree / "vllm_pd"
    shutil.rmtree(tree, ignore_errors=True)
    package.mkdir(parents=True)
    for path in (ROOT / "vllm_pd").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for room in ROOMS:
        (package / room).symlink_to(ROOT / room)
    (tree / "scripts").symlink_to(ROOT / "scripts")
    return package


def main() -> int:
    lay_out()
    settings = ["--config-file", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "mypy", *settings, *sys.argv[1:], "vllm_pd", "scripts"]
    return subprocess.run(command, cwd=TREE, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
