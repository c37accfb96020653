"""The flags that vllm-pd adds to `vllm serve`, and what they turn into.

Pure of vLLM at import, so that a vLLM process which does not use `pd` pays nothing for it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd import layered
from vllm_pd.errors import SettingsError
from vllm_pd.settings import (
    CONNECTOR,
    KV_ROLES,
    LMCACHE,
    WorkerSettings,
    json_layer,
    load_worker_settings,
)
from vllm_pd.settings_file import read_file
from vllm_pd.state.base import Role

if TYPE_CHECKING:
    from vllm_pd.transfer_config import PDKVTransferConfig

GROUP = "vllm-pd"
CONNECTOR_ENV = "VLLM_PD_KV_CONNECTOR"
FILE_ENV = "VLLM_PD_CONFIG"
DRAIN_S = 30
"""What SIGTERM leaves to requests under way on a pd worker whose user names no --shutdown-timeout: vLLM's default cuts
them off, and with them the blocks that decode workers are about to read. As long as NIXL's lease on such blocks."""
HASH_ALGO = "sha256_cbor"
"""Pinned for every pd worker, so that workers and routers compute the same block hashes."""


_CHOICES = {"role": "{prefill,decode,both}", "offload": "{tiers,lmcache,none}", "load_gate": "{auto,always,never}"}


def environment_names() -> tuple[str, ...]:
    """Every environment variable that vllm-pd reads in a vLLM process."""
    names = [spec.env for spec in layered.settings_of(WorkerSettings).values() if spec.env]
    return (CONNECTOR_ENV, FILE_ENV, *names)


class Unsaid(int):
    """The default of a whole number, to be told from the same number given by the user."""

    __slots__ = ()


class PluginLoader(str):
    """A text that loads the plugin wherever it is unpickled.

    vLLM's further API server processes are spawned with the parsed arguments and turn them into engine arguments
    before they load any plugin; our flags would be lost there. They come with one of these.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_plugin, (str(self),)


def _load_plugin(value: str) -> PluginLoader:
    from vllm_pd.plugin import register

    register()
    return PluginLoader(value)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--kv-connector`, `--role` and the `--pd-*` flags as group `vllm-pd`.

    A flag that is not given leaves no trace in the parsed arguments, which are then the same as without vllm-pd.
    """
    parser.set_defaults(shutdown_timeout=Unsaid(parser.get_default("shutdown_timeout") or 0))
    group = parser.add_argument_group(
        title=GROUP,
        description="Prefill/decode disaggregation and tiered KV offload (vllm-pd). "
        "Environment variables VLLM_PD_* and the file of --pd-config take the same settings; "
        "a flag wins over the environment, which wins over the file.",
    )
    group.add_argument(
        "--kv-connector",
        dest="kv_connector",
        metavar="NAME",
        type=PluginLoader,
        default=argparse.SUPPRESS,
        help="KV connector to use: pd, or any other name registered with vLLM (then short for --kv-transfer-config)",
    )
    for name, spec in layered.settings_of(WorkerSettings).items():
        if spec.flag:
            group.add_argument(
                spec.flag,
                dest=dest(name),
                metavar=_CHOICES.get(name, name.upper()),
                type=layered.SecretUrl if name == "store" else str,
                default=argparse.SUPPRESS,
                help=spec.help + _default_text(name),
            )
    group.add_argument(
        "--pd-config",
        dest="pd_config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with the same keys, for example role: prefill",
    )


def _default_text(name: str) -> str:
    default = getattr(WorkerSettings(), name)
    return f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})" if default else ""


def dest(field: str) -> str:
    """Name under which a flag's value is found in the parsed arguments."""
    return f"pd_{field}"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, before vLLM's configuration is touched.

    Attributes:
        connector: name of the connector, None when neither flag, environment nor file names one.
        flags: settings given as flags, by field name.
        environ: the environment.
        file, file_name: content and name of the settings file.
        connector_source: what names the connector, for messages.
    """

    connector: str | None
    flags: Mapping[str, Any]
    environ: Mapping[str, str]
    file: Mapping[str, Any]
    file_name: str
    connector_source: str = ""

    def settings(self) -> WorkerSettings:
        return load_worker_settings(
            flags=self.flags, environ=self.environ, file=self.file, file_name=self.file_name
        ).value

    def given(self) -> list[str]:
        """The flags of ours that were given, as typed."""
        specs = layered.settings_of(WorkerSettings)
        return [specs[name].flag for name in self.flags]


def read_request(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Request:
    """Collect what flags, environment and file say.

    Raises:
        SettingsError: the file cannot be read, or the connector's name is no name.
    """
    environ = os.environ if environ is None else environ
    flags = {
        name: value
        for name in layered.settings_of(WorkerSettings)
        if (value := getattr(args, dest(name), None)) is not None
    }
    path = getattr(args, "pd_config", None) or environ.get(FILE_ENV)
    file = read_file(path, flag="--pd-config", example="role: prefill") if path else {}
    if path or CONNECTOR_ENV in environ:
        args.pd_plugin = PluginLoader(CONNECTOR)
    name = path or "the settings file"
    connector, source = _connector(args, environ, file, name)
    return Request(connector, flags, environ, file, name, source)


def _connector(
    args: argparse.Namespace, environ: Mapping[str, str], file: dict[str, Any], file_name: str
) -> tuple[str | None, str]:
    """The connector's name and what says so. Takes the name out of `file`."""
    named = {key: file.pop(key) for key in list(file) if layered.normalise_key(str(key)) == "kv_connector"}
    if (flag := getattr(args, "kv_connector", None)) is not None:
        if not flag.strip():
            raise SettingsError("--kv-connector is empty; give it a name, for example pd, or drop it.")
        return flag, f"--kv-connector {flag}"
    if value := environ.get(CONNECTOR_ENV):
        return value, f"{CONNECTOR_ENV}={value}"
    if len(named) > 1:
        raise SettingsError(f"{file_name} sets 'kv_connector' twice; keep one of the spellings.")
    for key, value in named.items():
        if not isinstance(value, str) or not value.strip():
            raise SettingsError(f"{key} in {file_name} must be the name of a connector, for example pd, got {value!r}.")
        return value, f"{key} in {file_name}"
    return None, ""


def resolve(engine_args: Any, args: argparse.Namespace) -> WorkerSettings | None:
    """Turn our flags into vLLM's engine arguments, in place.

    Returns:
        The worker's settings when the pd connector is on, else None (`engine_args` is then as vLLM made it, or has
        the KVTransferConfig of another connector named by `--kv-connector`).

    Raises:
        SettingsError: one sentence that says what to change.
    """
    request = read_request(args)
    unsaid = isinstance(getattr(engine_args, "shutdown_timeout", None), Unsaid)
    if unsaid:
        engine_args.shutdown_timeout = int(engine_args.shutdown_timeout)
    given_json = engine_args.kv_transfer_config
    if given_json is not None:
        args.pd_plugin = PluginLoader(CONNECTOR)
    if given_json is not None and request.connector not in (None, given_json.kv_connector):
        raise SettingsError(
            f"{request.connector_source} and --kv-transfer-config choose different connectors; keep one of them."
        )
    if given_json is not None and given_json.kv_connector == CONNECTOR:
        if request.flags:
            raise SettingsError(
                f"{request.given()[0]} does not go with a pd connector given in --kv-transfer-config; "
                "use --kv-connector pd, or put the setting into kv_connector_extra_config."
            )
        settings = settings_from_json(given_json, request)
    elif given_json is not None or request.connector is None:
        if request.flags:
            raise SettingsError(f"{request.given()[0]} has no effect without a connector; add --kv-connector pd.")
        return None
    elif request.connector != CONNECTOR:
        engine_args.kv_transfer_config = other_connector(request)
        return None
    else:
        settings = request.settings()
    settings = _apply(settings, engine_args, given_json)
    if unsaid:
        engine_args.shutdown_timeout = args.shutdown_timeout = DRAIN_S
    return settings


def complete(engine_args: Any) -> None:
    """Turn a plain `KVTransferConfig(kv_connector="pd")` into what the flags make of it, in place. Idempotent.

    For engines that are made in Python, without a command line: `LLM(kv_transfer_config=...)`.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    config = engine_args.kv_transfer_config
    if config is None or config.kv_connector != CONNECTOR:
        return
    from vllm_pd.transfer_config import PDKVTransferConfig

    if not isinstance(config, PDKVTransferConfig):
        _apply(settings_from_json(config, read_request(argparse.Namespace())), engine_args, config)


def hide_store(config: Any) -> Any:
    """`config`, a parsed `--kv-transfer-config`, with a store URL that hides its password when vLLM logs it."""
    if getattr(config, "kv_connector", None) == CONNECTOR:
        extra = config.kv_connector_extra_config
        for key, value in extra.items():
            if layered.normalise_key(str(key)) == "store" and isinstance(value, str):
                extra[key] = layered.SecretUrl(value)
    return config


def _apply(settings: WorkerSettings, engine_args: Any, given_json: Any) -> WorkerSettings:
    """Returns the settings as this host makes of them."""
    check_engine_args(engine_args)
    if settings.cpu_percent:
        from vllm_pd.kv_offload import host_memory

        settings = settings.sized_for(host_memory.total_bytes())
    if settings.offload == LMCACHE:
        from vllm_pd import lmcache_setup

        lmcache_setup.check(settings.lmcache_url, engine_args)
    engine_args.kv_transfer_config = _build(settings, given_json)
    engine_args.prefix_caching_hash_algo = HASH_ALGO
    # Lets a router say which request goes first; without priorities it is the order of arrival, as by default.
    engine_args.scheduling_policy = "priority"
    return settings


def settings_from_json(config: Any, request: Request) -> WorkerSettings:
    """Settings of `--kv-transfer-config '{"kv_connector": "pd", ...}'`; the environment and the file fill the rest.

    `kv_role` counts as the role when `kv_connector_extra_config` names none.
    """
    data = json_layer(config.kv_connector_extra_config, config.kv_role)
    return load_worker_settings(
        flags=data, environ=request.environ, file=request.file, file_name=request.file_name
    ).value


def other_connector(request: Request) -> Any:
    """`--kv-connector NAME` for a connector that is not ours: the same as `--kv-transfer-config` with that name."""
    from vllm_pd.vllm_compat import KVConnectorFactory, KVTransferConfig

    name = str(request.connector)
    known = sorted(KVConnectorFactory._registry)
    if name not in known:
        raise SettingsError(
            f"--kv-connector {name} is not registered with vLLM{layered.nearest(name, known)}; "
            f"registered are {', '.join(known)}."
        )
    extra = [flag for flag in request.given() if flag != "--role"]
    if extra:
        raise SettingsError(f"{extra[0]} belongs to the pd connector, not to {name}; use --kv-connector pd or drop it.")
    role = load_worker_settings(flags=request.flags, environ=request.environ).value.role
    return KVTransferConfig(kv_connector=name, kv_role=_vllm_role(role))


def check_engine_args(engine_args: Any) -> None:
    """Refuse vLLM settings that the pd connector cannot work with.

    Raises:
        SettingsError: one sentence that says what to change.
    """
    if engine_args.enable_prefix_caching is False:
        raise SettingsError(
            "The pd connector shares KV blocks by their prefix hash, and prefix caching is off; "
            "drop --no-enable-prefix-caching."
        )
    if getattr(engine_args, "kv_offloading_size", None):
        raise SettingsError(
            "--kv-offloading-size brings a connector of its own, which does not go with pd; use --pd-cpu-gib instead."
        )


def _vllm_role(role: Role) -> str:
    return next(name for name, value in KV_ROLES.items() if value is role)


def _build(settings: WorkerSettings, given_json: Any) -> PDKVTransferConfig:
    from vllm_pd import transfer_config

    # Fails here, in the process the user started, rather than in a child of it.
    nixl = transfer_config.check_nixl(settings)
    transfer_config.child_configs(settings, nixl=nixl)
    return transfer_config.build(settings, given_json)
