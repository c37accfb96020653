"""Settings of a component, as arguments and variables of its program. Pure.

Arguments can be read by everybody on the machine; what is secret therefore goes into the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pd import layered
from vllm_pd.errors import SettingsError
from vllm_pd.planner.settings import PlannerSettings
from vllm_pd.router.settings import RouterSettings
from vllm_pd.settings import CONNECTOR, WorkerSettings
from vllm_pd.state.base import Role

_SECRET = (
    "{where} hold {flag}, and arguments can be read by everybody on the machine; name the variable {variable} in its "
    "secrets instead."
)
_SERVE_SECRETS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}


@dataclass(frozen=True, slots=True)
class ProgramArgs:
    """What a program is told."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def router_args(settings: Mapping[str, Any]) -> ProgramArgs:
    """Of `vllm-pd-router`. Raises SettingsError for settings that it does not know."""
    return _flags(RouterSettings, settings, "settings of the router")


def planner_args(settings: Mapping[str, Any]) -> ProgramArgs:
    """Of `vllm-pd planner run`. Raises SettingsError for settings that it does not know."""
    return _flags(PlannerSettings, settings, "settings of the planner")


def worker_args(role: Role, settings: Mapping[str, Any]) -> ProgramArgs:
    """Of `vllm serve`. Raises SettingsError for settings that it does not know.

    Settings that have no flag, which are mappings, go with all others into a --kv-transfer-config.
    """
    specs = layered.settings_of(WorkerSettings)
    known = layered.check_keys(settings, list(specs), "settings of the worker")
    if all(specs[name].flag for name in known):
        told = _flags(WorkerSettings, known, "settings of the worker")
        return ProgramArgs(("--kv-connector", CONNECTOR, "--role", str(role), *told.args), told.env)
    config = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"role": str(role), **known},
    }
    return ProgramArgs(("--kv-transfer-config", json.dumps(config)))


def _flags(cls: type, settings: Mapping[str, Any], where: str) -> ProgramArgs:
    specs = layered.settings_of(cls)
    args: list[str] = []
    env: dict[str, str] = {}
    defaults = cls()
    for name, value in layered.check_keys(settings, list(specs), where).items():
        spec, default = specs[name], getattr(defaults, name)
        if value is None:
            continue
        if spec.secret:
            env[spec.env] = str(value)
        elif default is False:
            # A flag without a value.
            args += [spec.flag] if layered.boolean(value) else []
        elif isinstance(default, bool):
            args += [spec.flag, "on" if layered.boolean(value) else "off"]
        elif isinstance(value, Mapping):
            args += [part for key, number in value.items() for part in (spec.flag, f"{key}={number}")]
        elif isinstance(value, list | tuple):
            args += [part for each in value for part in (spec.flag, str(each))]
        else:
            args += [spec.flag, str(value)]
    return ProgramArgs(tuple(args), env)


def told_by(cls: type, args: Sequence[str], where: str) -> dict[str, Any]:
    """What further arguments of a program set, by the names of its settings, and not yet parsed.

    Raises:
        SettingsError: one is no option of the program, lacks its value, or is a secret, which arguments do not keep.
    """
    specs = layered.settings_of(cls)
    names, defaults = {spec.flag: name for name, spec in specs.items()}, cls()
    out: dict[str, Any] = {}
    left = list(args)
    while left:
        flag, equals, inline = left.pop(0).partition("=")
        if flag not in names:
            near = layered.nearest(flag, list(names))
            raise SettingsError(f"{where} hold {flag!r}, which is no option of its program{near}; drop it.")
        name = names[flag]
        default = getattr(defaults, name)
        if specs[name].secret:
            raise SettingsError(_SECRET.format(where=where, flag=flag, variable=specs[name].env))
        if default is False:
            out[name] = True
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise SettingsError(f"{where} hold {flag} without a value; add one.")
        value = inline if equals else left.pop(0)
        if isinstance(default, tuple):
            out.setdefault(name, []).append(value)
        else:
            out[name] = value
    return out


def check_serve_args(args: Sequence[str], where: str) -> None:
    """What can be said of further arguments of `vllm serve` without vLLM. Raises SettingsError as `told_by` does."""
    ours = [spec.flag for spec in layered.settings_of(WorkerSettings).values() if spec.flag.startswith("--pd-")]
    for arg in args:
        flag = arg.partition("=")[0].replace("_", "-")
        if flag in _SERVE_SECRETS:
            raise SettingsError(_SECRET.format(where=where, flag=flag, variable=_SERVE_SECRETS[flag]))
        if flag.startswith("--pd-") and flag not in ours:
            raise SettingsError(f"{where} hold {flag}, which is no option{layered.nearest(flag, ours)}; drop it.")


def parallel_sizes(args: Sequence[str]) -> dict[str, str]:
    """By name (tensor, pipeline, data): how far `vllm serve` with these arguments splits the model over GPUs."""
    short = {"-tp": "tensor", "-pp": "pipeline", "-dp": "data"}
    sizes: dict[str, str] = {}
    for i, arg in enumerate(args):
        flag, equals, inline = arg.partition("=")
        name = short.get(flag) or flag.removeprefix("--").replace("_", "-").removesuffix("-parallel-size")
        is_size = flag in short or (flag.startswith("--") and flag.replace("_", "-").endswith("-parallel-size"))
        if is_size and name in short.values():
            sizes[name] = inline if equals else args[i + 1] if i + 1 < len(args) else ""
    return sizes


def value_of(args: Sequence[str], flag: str) -> str:
    """What the last `flag VALUE` or `flag=VALUE` among the arguments says; "" when there is none."""
    value = ""
    for i, arg in enumerate(args):
        if arg == flag and i + 1 < len(args):
            value = args[i + 1]
        elif arg.startswith(f"{flag}="):
            value = arg.partition("=")[2]
    return value
