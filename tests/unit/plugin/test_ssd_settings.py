"""What a user says of the SSD tier, from the flag to the option that the tier parses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.ssd_config import SsdConfig
from vllm_pd.settings import WorkerSettings, check, from_extra_config
from vllm_pd.transfer_config import child_configs

pytestmark = pytest.mark.vllm

WITH_SSD = {"cpu_gib": 1.0, "ssd_path": "/kv", "ssd_gib": 2.0}


def option(**settings: Any) -> Any:
    [child] = child_configs(WorkerSettings(**{**WITH_SSD, **settings}), nixl=False)
    return child["kv_connector_extra_config"]["ssd"]


def test_writes_per_day_reach_the_tier_also_when_they_are_none() -> None:
    assert SsdConfig.parse({**option(), "identity": "x"}).writes_per_day == 1.0
    assert SsdConfig.parse({**option(ssd_writes_per_day=0.0), "identity": "x"}).writes_per_day == 0.0
    settings = WorkerSettings(**WITH_SSD, ssd_writes_per_day=0.0)
    assert from_extra_config(settings.to_extra_config()) == settings


def test_further_options_are_given_under_tiers_and_go_with_the_flags() -> None:
    tiers = {"ssd": {"backend": "threads", "readers": 2}, "blocks_per_chunk": 2}
    assert option(tiers=tiers) == {"path": "/kv", "gib": 2.0, "backend": "threads", "readers": 2}
    [child] = child_configs(WorkerSettings(**WITH_SSD, tiers=tiers), nixl=False)
    assert child["kv_connector_extra_config"]["blocks_per_chunk"] == 2


def test_a_mistake_in_them_ends_the_start_before_the_model_is_loaded() -> None:
    with pytest.raises(SettingsError, match=r"unknown key 'raeders' \(did you mean 'readers'\?\)"):
        option(tiers={"ssd": {"raeders": 2}})


@pytest.mark.parametrize("settings", [{"ssd_writes_per_day": 2.0}, {"tiers": {"ssd": {"readers": 1}}}])
def test_options_of_an_ssd_tier_that_is_not_there_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="there is none; add --pd-ssd-path"):
        check(WorkerSettings(cpu_gib=1.0, **settings))
