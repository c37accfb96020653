"""What a planner is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.config import PlannerConfig, Rule
from vllm_pd.planner.model import Mode
from vllm_pd.planner.settings import OPTIONS, PlannerSettings, load, read_settings

STORE = {"store": "redis://h:1"}


def test_the_defaults_are_those_of_the_core() -> None:
    assert load(flags=STORE).value.config == PlannerConfig()


def test_flag_goes_before_environment_before_file() -> None:
    environ = {"VLLM_PD_STORE": "redis://e:1", "VLLM_PD_PLANNER_ITL": "0.03", "VLLM_PD_PLANNER_TTFT": "0.3"}
    resolved = load(flags={"ttft": "0.2"}, environ=environ, file={"ttft": 9, "itl": 9, "max-changes": 5})
    config = resolved.value.config
    assert (config.ttft_s, config.itl_s, config.max_changes) == (0.2, 0.03, 5)
    assert resolved.source["max_changes"] == "file"


def test_every_parameter_of_the_core_can_be_set() -> None:
    flags = {
        **STORE,
        "mode": "scale",
        "actuators": ["command=/bin/true"],
        "rule": "dynamo-load",
        "min": "3",
        "max": "9",
        "options": ["worth=0.05", "decode-kv-scale-up=0.8", "grace_intervals=4"],
    }
    config = load(flags=flags).value.config
    assert (config.mode, config.rule) == (Mode.SCALE, Rule.DYNAMO_LOAD)
    assert (config.min_workers, config.max_workers, config.worth) == (3, 9, 0.05)
    assert (config.dynamo.decode_kv_scale_up, config.dynamo.grace_intervals) == (0.8, 4)
    assert "stale_s" in OPTIONS


def test_roles_are_moved_whoever_starts_workers() -> None:
    assert load(flags={**STORE, "actuators": ["processes"]}).value.actuators == ("processes", "roles")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({}, "needs the store"),
        ({"mode": "scael"}, "did you mean 'scale'"),
        ({"mode": "scale"}, "somebody must start workers"),
        ({"options": ["wort=1"]}, "did you mean 'worth'"),
        ({"options": ["grace_intervals=1.5"]}, "whole number"),
        ({"options": ["worth=much"]}, "with a number"),
        ({"options": ["worth=2"]}, "fraction between 0 and 1"),
        ({"attainment": "1"}, "fraction between 0 and 1"),
        ({"min": "9"}, "3 workers|9 to 8"),
        ({"actuators": ["roles", "kubernets"]}, "did you mean 'kubernetes'"),
        ({"interval": "0"}, "--interval must be a number above 0"),
        ({"webhook_token": "a b"}, "printable ASCII without spaces"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(flags: dict[str, object], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(flags={**(STORE if flags else {}), **flags})


def test_an_unknown_key_of_the_file_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'cooldown'"):
        load(flags=STORE, file={"cool_down": 3})


def test_secrets_are_not_shown() -> None:
    shown = load(flags={"store": "redis://u:geheim@h:1", "webhook_token": "streng"}).describe()
    assert not any("geheim" in value or "streng" in value for _, value, _ in shown)


def test_a_file_may_hold_a_section_for_the_planner(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("router: {port: 1}\nplanner:\n  ttft: 0.25\n  options: {worth: 0.1}\n")
    settings = read_settings(STORE, str(file), {})
    assert (settings.ttft, settings.config.worth) == (0.25, 0.1)
    file.write_text("ttft: 0.125\n")
    assert read_settings(STORE, str(file), {}).ttft == 0.125


def test_secrets_are_in_no_repr_of_the_settings() -> None:
    settings = PlannerSettings(webhook_token="a-secret")
    context = ActuatorContext("redis://:a-secret@h", "n", None, None, 1.0, 1.0, "a-secret")  # type: ignore[arg-type]
    assert "a-secret" not in f"{settings!r} {context!r}"
