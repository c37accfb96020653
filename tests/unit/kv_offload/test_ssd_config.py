"""The option `ssd`: every mistake is one sentence that says what to change."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.block_io.choose import IOBackend
from vllm_pd.kv_offload.segments import StoreConfig
from vllm_pd.kv_offload.ssd_config import GIB, MIB, ROOT_NAME, SsdConfig

LEAST = {"path": "/kv", "gib": 2, "identity": "digest"}


def test_what_is_not_said_has_defaults() -> None:
    config = SsdConfig.parse(LEAST)
    assert config == SsdConfig(Path("/kv"), 2 * GIB, "digest")
    assert config.root == Path("/kv") / ROOT_NAME
    assert config.backend is IOBackend.AUTO and config.floor_bytes is None


def test_what_a_server_gets_by_default_is_what_the_store_is_measured_with() -> None:
    of_the_store = {field.name: field.default for field in fields(StoreConfig)}
    of_a_server = {field.name: field.default for field in fields(SsdConfig)}
    assert of_a_server["readers"] == of_the_store["readers"]
    assert of_a_server["segment_bytes"] == of_the_store["max_segment_bytes"]


def test_everything_can_be_said() -> None:
    config = SsdConfig.parse(
        {
            **LEAST,
            "gib": 0.5,
            "free_gib": 0,
            "backend": "threads",
            "segment_mib": 64,
            "readers": 2,
            "load_deadline_s": 0.5,
            "writes_per_day": 0,
        }
    )
    assert config == SsdConfig(
        Path("/kv"), GIB // 2, "digest", 0, IOBackend.THREADS, 64 * MIB, 2, load_deadline_s=0.5, writes_per_day=0.0
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("/kv", "ssd must be an object with path and gib"),
        ({"gib": 1, "identity": "x"}, "ssd.path must name a folder, got None"),
        ({**LEAST, "path": " "}, "ssd.path must name a folder"),
        ({"path": "/kv", "identity": "x"}, "ssd.gib must be a number above 0, got None"),
        ({**LEAST, "gib": 0}, "ssd.gib must be a number above 0, got 0"),
        ({**LEAST, "gib": True}, "ssd.gib must be a number above 0"),
        ({**LEAST, "gib": float("inf")}, "ssd.gib must be a number above 0"),
        ({**LEAST, "free_gib": -1}, "ssd.free_gib must be a number of at least 0, got -1"),
        ({**LEAST, "writes_per_day": -1}, "ssd.writes_per_day must be a number of at least 0"),
        ({**LEAST, "load_deadline_s": 0}, "ssd.load_deadline_s must be a number above 0"),
        ({**LEAST, "readers": 0}, "ssd.readers must be a whole number of at least 1"),
        ({**LEAST, "readers": 1.5}, "ssd.readers must be a whole number of at least 1"),
        ({**LEAST, "backend": "nixel"}, r"ssd.backend must be one of .*\(did you mean 'nixl'\?\)"),
        ({**LEAST, "redears": 1}, r"ssd has the unknown key 'redears' \(did you mean 'readers'\?\)"),
        ({"path": "/kv", "gib": 1}, "ssd.identity must say .*--kv-connector pd fills it in"),
    ],
)
def test_mistakes_are_named(raw: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SsdConfig.parse(raw)


def test_the_floor_is_a_part_of_the_file_system_unless_given(tmp_path: Path) -> None:
    config = SsdConfig.parse({**LEAST, "path": str(tmp_path)})
    assert config.floor() >= GIB
    assert SsdConfig.parse({**LEAST, "path": str(tmp_path), "free_gib": 0.25}).floor() == GIB // 4
