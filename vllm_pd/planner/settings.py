"""Settings of a planner: flag > environment > file > default, in one frozen dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_pd import layered, parsers
from vllm_pd.errors import SettingsError
from vllm_pd.layered import Resolved, nearest, setting
from vllm_pd.planner.actuators.choose import ROLES, check_actuator
from vllm_pd.planner.config import DynamoLoad, PlannerConfig, Rule
from vllm_pd.planner.model import Mode
from vllm_pd.settings_file import read_file

DEFAULTS = PlannerConfig()
DEFAULT_LEASE_S = 15.0
_CONTRACTED = {
    "mode": "mode",
    "rule": "rule",
    "ttft_s": "ttft",
    "itl_s": "itl",
    "attainment": "attainment",
    "min_workers": "min",
    "max_workers": "max",
    "interval_s": "interval",
    "max_changes": "max_changes",
    "cooldown_s": "cooldown",
    "start_deadline_s": "start_deadline",
}
"""Fields of `PlannerConfig` that have settings of their own, and their names; all others are options."""
_NUMBER = re.compile(r"[-+0-9.eE]+")

_seconds = layered.number(0, exclusive=True, high=86400)


def _option_types() -> dict[str, type]:
    known: dict[str, type] = {}
    for spec in fields(PlannerConfig):
        default = getattr(DEFAULTS, spec.name)
        if spec.name not in _CONTRACTED and isinstance(default, int | float) and not isinstance(default, bool):
            known[spec.name] = type(default)
    for spec in fields(DynamoLoad):
        known[spec.name] = type(getattr(DEFAULTS.dynamo, spec.name))
    return known


OPTIONS = _option_types()
"""Names and types of what `--option` sets."""


def options(raw: Any) -> tuple[tuple[str, float], ...]:
    """NAME=VALUE, a list or a text of them separated by commas or spaces, or a mapping."""
    if isinstance(raw, Mapping):
        items: list[Any] = [f"{name}={value}" for name, value in raw.items()]
    elif isinstance(raw, str):
        items = raw.replace(",", " ").split()
    elif isinstance(raw, list | tuple):
        items = list(raw)
    else:
        raise ValueError(f"must be a list of NAME=VALUE, got {raw!r}")
    found: dict[str, float] = {}
    for item in items:
        name, equals, text = str(item).partition("=")
        name = name.strip().replace("-", "_")
        if name not in OPTIONS:
            raise ValueError(
                f"has the unknown option {name!r}{nearest(name, list(OPTIONS))}; known: {', '.join(OPTIONS)}"
            )
        try:
            value = OPTIONS[name](text) if equals and _NUMBER.fullmatch(text.strip()) else None
        except ValueError:
            value = None
        if value is None:
            kind = "whole number" if OPTIONS[name] is int else "number"
            raise ValueError(f"must be {name}=VALUE with a {kind}, got {item!r}")
        found[name] = value
    return tuple(found.items())


def actuators(raw: Any) -> tuple[str, ...]:
    """A list of actuators, or one as a text."""
    items = [raw] if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError(f"must be a list of actuators, got {raw!r}")
    found = tuple(check_actuator(layered.text(item)) for item in items)
    # Roles move without anything else being started, whoever starts workers.
    return found if ROLES in found else (*found, ROLES)


def token(raw: Any) -> str:
    """A secret of one line. The error does not show it."""
    found = layered.text(raw)
    if not found.isascii() or not found.isprintable() or " " in found:
        raise ValueError("must be printable ASCII without spaces")
    return found


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Everything a planner is told. Times are seconds."""

    store: str = setting(
        help="URL of the Redis-compatible store where workers register",
        env="VLLM_PD_STORE",
        flag="--store",
        parse=parsers.store_url,
        default="",
    )
    namespace: str = setting(
        help="name that separates clusters sharing one store",
        env="VLLM_PD_NAMESPACE",
        flag="--namespace",
        parse=parsers.namespace,
        default="default",
    )
    mode: str = setting(
        help="fixed (move workers between prefill and decode) or scale (also start and end them)",
        env="VLLM_PD_PLANNER_MODE",
        flag="--mode",
        parse=layered.choice(*Mode),
        default=str(DEFAULTS.mode),
    )
    ttft: float = setting(
        help="target for the time to the first token, seconds",
        env="VLLM_PD_PLANNER_TTFT",
        flag="--ttft",
        parse=_seconds,
        default=DEFAULTS.ttft_s,
    )
    itl: float = setting(
        help="target for the time between two tokens, seconds",
        env="VLLM_PD_PLANNER_ITL",
        flag="--itl",
        parse=_seconds,
        default=DEFAULTS.itl_s,
    )
    attainment: float = setting(
        help="fraction of the requests that are to meet the targets, above 0 and below 1",
        env="VLLM_PD_PLANNER_ATTAINMENT",
        flag="--attainment",
        parse=layered.number(0, exclusive=True, high=1),
        default=DEFAULTS.attainment,
    )
    min: int = setting(
        help="fewest workers of a pool, with --mode scale",
        env="VLLM_PD_PLANNER_MIN",
        flag="--min",
        parse=layered.integer(1, 100_000),
        default=DEFAULTS.min_workers,
    )
    max: int = setting(
        help="most workers of a pool, with --mode scale",
        env="VLLM_PD_PLANNER_MAX",
        flag="--max",
        parse=layered.integer(1, 100_000),
        default=DEFAULTS.max_workers,
    )
    interval: float = setting(
        help="seconds between two steps",
        env="VLLM_PD_PLANNER_INTERVAL",
        flag="--interval",
        parse=_seconds,
        default=DEFAULTS.interval_s,
    )
    rule: str = setting(
        help="by what is decided: sla (the targets) or dynamo-load (Dynamo's thresholds, for comparison)",
        env="VLLM_PD_PLANNER_RULE",
        flag="--rule",
        parse=layered.choice(*Rule),
        default=str(DEFAULTS.rule),
    )
    max_changes: int = setting(
        help="most moves, starts and removals that may be under way at once",
        env="VLLM_PD_PLANNER_MAX_CHANGES",
        flag="--max-changes",
        parse=layered.integer(1, 100_000),
        default=DEFAULTS.max_changes,
    )
    cooldown: float = setting(
        help="seconds after a change of roles without another one",
        env="VLLM_PD_PLANNER_COOLDOWN",
        flag="--cooldown",
        parse=_seconds,
        default=DEFAULTS.cooldown_s,
    )
    start_deadline: float = setting(
        help="seconds after which a worker that did not come up is given up",
        env="VLLM_PD_PLANNER_START_DEADLINE",
        flag="--start-deadline",
        parse=_seconds,
        default=DEFAULTS.start_deadline_s,
    )
    options: tuple[tuple[str, float], ...] = setting(
        help=f"any further parameter, as NAME=VALUE; repeat for more: {', '.join(OPTIONS)}",
        env="VLLM_PD_PLANNER_OPTIONS",
        flag="--option",
        parse=options,
        default=(),
    )
    actuators: tuple[str, ...] = setting(
        help="who carries decisions out; repeat for more, the first that can do something does it: roles (moves, "
        "always there), processes, kubernetes, command=PROGRAM, webhook=URL",
        env="VLLM_PD_PLANNER_ACTUATORS",
        flag="--actuator",
        parse=actuators,
        default=(ROLES,),
    )
    move_timeout: float = setting(
        help="seconds after which a change of role that has not finished is undone",
        env="VLLM_PD_PLANNER_MOVE_TIMEOUT",
        flag="--move-timeout",
        parse=layered.number(0, exclusive=True, high=3600),
        default=30.0,
    )
    actuator_timeout: float = setting(
        help="seconds that an actuator may take to begin something",
        env="VLLM_PD_PLANNER_ACTUATOR_TIMEOUT",
        flag="--actuator-timeout",
        parse=layered.number(0, exclusive=True, high=3600),
        default=30.0,
    )
    webhook_token: str = setting(
        help="bearer token for the webhook; better set by its environment variable",
        env="VLLM_PD_PLANNER_WEBHOOK_TOKEN",
        flag="--webhook-token",
        parse=token,
        default="",
        secret=True,
    )
    dry_run: bool = setting(
        help="decide and explain, but change nothing; a planner that acts may run beside",
        env="VLLM_PD_PLANNER_DRY_RUN",
        flag="--dry-run",
        parse=layered.boolean,
        default=False,
    )
    lease: float = setting(
        help="seconds after which another planner takes over from one that is gone",
        env="VLLM_PD_PLANNER_LEASE",
        flag="--lease",
        parse=layered.number(0.5, high=3600),
        default=DEFAULT_LEASE_S,
    )
    settle: float = setting(
        help="seconds after an outage of the store in which nothing is decided: workers register again one by one",
        env="VLLM_PD_PLANNER_SETTLE",
        flag="--settle",
        parse=layered.number(0, high=3600),
        default=15.0,
    )
    metrics_host: str = setting(
        help="address of the metrics page; 0.0.0.0 for every interface",
        env="VLLM_PD_PLANNER_METRICS_HOST",
        flag="--metrics-host",
        parse=layered.text,
        default="127.0.0.1",
    )
    metrics_port: int = setting(
        help="port of the metrics page (/metrics, /health, /v1/planner); 0 for none",
        env="VLLM_PD_PLANNER_METRICS_PORT",
        flag="--metrics-port",
        parse=layered.integer(0, 65535),
        default=0,
    )
    log_level: str = setting(
        help="debug, info, warning or error",
        env="VLLM_PD_PLANNER_LOG_LEVEL",
        flag="--log-level",
        parse=layered.log_level,
        default="info",
    )

    @property
    def config(self) -> PlannerConfig:
        """What the planner's core is told. Raises SettingsError for values that do not fit together."""
        values: dict[str, Any] = {name: getattr(self, own) for name, own in _CONTRACTED.items()}
        values["mode"], values["rule"] = Mode(self.mode), Rule(self.rule)
        thresholds = {spec.name for spec in fields(DynamoLoad)}
        values |= {name: value for name, value in self.options if name not in thresholds}
        dynamo = DynamoLoad(**{name: value for name, value in self.options if name in thresholds})  # type: ignore[arg-type]
        return PlannerConfig(**values, dynamo=dynamo)


def load(
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "the settings file",
) -> Resolved[PlannerSettings]:
    """Merge the layers and check that the settings fit together.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    resolved = layered.resolve(PlannerSettings, flags=flags, environ=environ, file=file, file_name=file_name)
    settings = resolved.value
    if not settings.store:
        raise SettingsError(
            "A planner needs the store of its cluster; give --store redis://host:6379 or VLLM_PD_STORE."
        )
    if settings.mode == Mode.SCALE and settings.actuators == (ROLES,):
        raise SettingsError(
            "With --mode scale somebody must start workers; name who with --actuator (processes, kubernetes, "
            "command=PROGRAM or webhook=URL), or use --mode fixed."
        )
    _ = settings.config
    return resolved


def read_settings(flags: Mapping[str, Any], config: str, environ: Mapping[str, str]) -> PlannerSettings:
    """The settings of a planner, from flags, environment and the file `config`, or the section `planner` of it.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    file: Mapping[str, Any] = {}
    if config:
        file = read_file(config, flag="--config", example="ttft: 0.5")
        section = file.get("planner")
        if isinstance(section, dict):
            file = section
    return load(flags=flags, environ=environ, file=file, file_name=config or "the settings file").value
