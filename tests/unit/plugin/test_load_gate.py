"""`--pd-load-gate` on its way to the connector."""

from __future__ import annotations

import pytest

from vllm_pd import settings as s
from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings, from_extra_config
from vllm_pd.tier_choices import LoadGate


def test_the_gate_decides_unless_told_otherwise() -> None:
    assert WorkerSettings().load_gate is LoadGate.AUTO


@pytest.mark.parametrize("mode", LoadGate)
def test_the_choice_survives_the_way_through_vllms_configuration(mode: LoadGate) -> None:
    settings = s.load_worker_settings(flags={"cpu_gib": "1", "load_gate": str(mode)}).value
    assert settings.load_gate is mode
    assert from_extra_config(settings.to_extra_config()) == settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"load_gate": "allways"}, ["load_gate", "did you mean 'always'"]),
        ({"tiers": {"load_gate": "auto"}}, ["load_gate"]),
    ],
)
def test_what_is_no_choice_is_refused(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        from_extra_config({"cpu_gib": 1, **given})
    assert all(word in str(refused.value) for word in words)


@pytest.mark.vllm
def test_the_choice_reaches_the_tiers_connector() -> None:
    tc = pytest.importorskip("vllm_pd.transfer_config")
    by_mode = {
        mode: tc.child_configs(WorkerSettings(cpu_gib=1.0, load_gate=mode), nixl=False)[0]["kv_connector_extra_config"]
        for mode in LoadGate
    }
    assert [options.get("load_gate") for options in by_mode.values()] == [None, "always", "never"]
