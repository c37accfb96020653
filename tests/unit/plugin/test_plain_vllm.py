"""Having vllm-pd installed changes nothing for those who give none of its flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.models import tiny_model_dir

pytestmark = pytest.mark.vllm

PROBE = Path(__file__).with_name("plain_probe.py")


def probe(**env: str) -> dict[str, Any]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_PD_")}
    done = subprocess.run(
        [sys.executable, str(PROBE), str(tiny_model_dir())],
        env={**environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    # No plugin has an empty name: nothing is loaded.
    return probe(VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    return probe()


@pytest.mark.parametrize("what", ["parsed", "engine_args", "config", "stat_loggers"])
def test_parser_defaults_and_engine_configuration_are_the_same(
    what: str, without: dict[str, Any], installed: dict[str, Any]
) -> None:
    assert without["ours"] == []
    assert installed[what] == without[what]


def test_no_connection_is_made(without: dict[str, Any], installed: dict[str, Any]) -> None:
    assert installed["connections"] == without["connections"] == []


def test_nothing_heavy_is_imported(without: dict[str, Any], installed: dict[str, Any]) -> None:
    """What costs start-up time is what is imported: no client of the store, no connector, no agent, no NIXL."""
    rooms = {".".join(name.split(".")[:2]) for name in installed["ours"]}
    assert rooms == {
        "vllm_pd",
        "vllm_pd.block_hash",
        "vllm_pd.errors",
        "vllm_pd.layered",
        "vllm_pd.lmcache_options",
        "vllm_pd.parsers",
        "vllm_pd.plugin",
        "vllm_pd.routing",
        "vllm_pd.serve_flags",
        "vllm_pd.settings",
        "vllm_pd.settings_file",
        "vllm_pd.state",
        "vllm_pd.tier_choices",
        "vllm_pd.vllm_compat",
    }
    assert "vllm_pd.state.redis_registry" not in installed["ours"]
    assert installed["others"] == without["others"]
