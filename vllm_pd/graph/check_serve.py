"""Whether vLLM understands what the workers of a graph are told, asked of its own parser where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from vllm_pd.errors import SettingsError

DEADLINE_S = 180.0
"""Loading vLLM takes seconds, on a machine with much to do minutes."""


def check_serve(commands: Mapping[str, Sequence[str]], *, deadline_s: float = DEADLINE_S) -> str:
    """Have vLLM parse what follows `vllm serve` in these commands, by the names of their components. Blocks.

    Returns:
        A sentence that says that it was done, or why not.

    Raises:
        SettingsError: some are not understood.
    """
    if find_spec("vllm") is None:
        return _unchecked("vLLM is not installed here")
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_pd.graph.serve_parser"],
            input=json.dumps({name: list(args) for name, args in commands.items()}),
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
            env=env,
        )
        answer = json.loads(done.stdout)
        version, problems = answer["version"], answer["problems"]
    except subprocess.TimeoutExpired:
        return _unchecked(f"vLLM was not loaded within {deadline_s:g} s")
    except OSError as e:
        return _unchecked(f"{sys.executable} cannot be run ({e.strerror or e})")
    except (ValueError, KeyError, TypeError):
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return _unchecked(f"vLLM cannot be asked: {last[0]}")
    if problems:
        raise SettingsError(
            " ".join(
                f"args of {name} {problem}; vLLM {version} does not take them." for name, problem in problems.items()
            )
        )
    return f"What workers are told was checked against the options of vLLM {version}."


def _unchecked(why: str) -> str:
    return f"What workers are told was not checked against vLLM's options: {why}."
