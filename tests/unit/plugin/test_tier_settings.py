"""How the CPU tier is sized and who evicts from it, from flags to the options of vLLM's connector."""

from __future__ import annotations

import pytest

from vllm_pd import settings as s
from vllm_pd import transfer_config as tc
from vllm_pd.errors import SettingsError
from vllm_pd.tier_choices import DEFAULT_EVICTION


def given(**flags: str) -> s.WorkerSettings:
    return s.load_worker_settings(flags=flags).value


@pytest.mark.parametrize("text", ["25", "25%", " 25% "])
def test_a_percentage_becomes_gib_of_the_host_it_is_asked_on(text: str) -> None:
    made = given(cpu_percent=text)
    assert made.has_tiers and made.cpu_gib == 0
    sized = made.sized_for(64 * s.GIB)
    assert (sized.cpu_gib, sized.cpu_percent) == (16.0, 0.0)
    assert sized.sized_for(1) is sized
    # The processes of the server are told the size, not the percentage.
    assert s.from_extra_config(sized.to_extra_config()) == sized


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cpu_percent": "101"}, "at most 100"),
        ({"cpu_percent": "-1"}, "at least 0"),
        ({"cpu_percent": "a lot"}, "must be a number"),
        ({"cpu_percent": "10", "cpu_gib": "4"}, "both size the CPU tier"),
        ({"ssd_path": "/d", "ssd_gib": "4"}, "--pd-cpu-gib or --pd-cpu-percent"),
        ({"eviction": "adaptiv"}, "did you mean 'adaptive'"),
    ],
)
def test_what_cannot_be_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        given(**flags)


def test_an_ssd_goes_with_a_percentage() -> None:
    assert given(cpu_percent="10", ssd_path="/d", ssd_gib="4").ssd_path == "/d"


@pytest.mark.vllm
def test_the_policy_reaches_vllms_connector_and_its_own_option_wins() -> None:
    def option(settings: s.WorkerSettings) -> str:
        (child,) = tc.child_configs(settings, nixl=False)
        return str(child["kv_connector_extra_config"]["eviction_policy"])

    assert option(given(cpu_gib="1")) == DEFAULT_EVICTION
    assert option(given(cpu_gib="1", eviction="arc")) == "arc"
    assert option(s.load_worker_settings(file={"cpu_gib": 1, "tiers": {"eviction_policy": "lru"}}).value) == "lru"
