"""What an API server process does once the pd connector is on: side channel, agent, log line."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_pd import side_channel
from vllm_pd import vllm_compat as compat
from vllm_pd.agent.identity import own_ip
from vllm_pd.settings import WorkerSettings
from vllm_pd.side_channel import SideChannel
from vllm_pd.transfer_config import nixl_installed

if TYPE_CHECKING:
    from vllm_pd.agent import runtime

logger = logging.getLogger("vllm.vllm_pd")


def prepare(settings: WorkerSettings, engine_args: Any, args: argparse.Namespace) -> None:
    """Choose NIXL's side channel, and have the agent start with the engine if a store is configured."""
    channel = _side_channel(settings, engine_args, args) if nixl_installed() else None
    if channel is None:
        logger.warning(
            "NIXL is not installed, so prefill/decode hand-off is off and only the KV tiers work; "
            "pip install 'vllm-pd[nixl]' turns it on."
        )
    if settings.store and _serves_http(args):
        from vllm_pd.agent import runtime

        runtime.configure(_runtime_config(settings, args, channel))
        install_stat_logger()
    logger.info("vllm-pd: %s", describe(settings))


def describe(settings: WorkerSettings) -> str:
    """One line for the log: what this worker is."""
    tiers = [f"{settings.cpu_gib:g} GiB in host memory"] if settings.cpu_gib else []
    tiers += [f"{settings.ssd_gib:g} GiB on {settings.ssd_path}"] if settings.ssd_path else []
    store = f"store {settings.store!r}, namespace {settings.namespace}" if settings.store else "no store"
    return f"role {settings.role}, {store}, " + (
        f"KV tiers: {', '.join(tiers)}" if tiers else "no KV tier below GPU memory"
    )


def install_stat_logger() -> None:
    """Add our stat logger to those that vLLM's engine client builds in this process.

    It is not a `vllm.stat_logger_plugins` entry point: vLLM would then gather statistics even under
    `--disable-log-stats`, for everybody who has this package installed.
    """
    module = compat.async_llm
    original = module.load_stat_logger_plugin_factories
    if getattr(original, "_vllm_pd_wrapped", False):
        return

    def load_factories_and_ours() -> list[Any]:
        from vllm_pd.agent.stat_logger import PDStatLogger

        return [*original(), PDStatLogger]

    load_factories_and_ours._vllm_pd_wrapped = True  # type: ignore[attr-defined]
    module.load_stat_logger_plugin_factories = load_factories_and_ours


def _serves_http(args: argparse.Namespace) -> bool:
    return hasattr(args, "port") and not getattr(args, "headless", False)


def _side_channel(settings: WorkerSettings, engine_args: Any, args: argparse.Namespace) -> SideChannel:
    advertised = urlsplit(settings.advertise_url).hostname or ""
    served = getattr(args, "host", None) or ""
    first = engine_args.data_parallel_rank or engine_args.data_parallel_start_rank or 0
    ranks = (
        1
        if engine_args.data_parallel_rank is not None
        else (engine_args.data_parallel_size_local or engine_args.data_parallel_size)
    )
    return side_channel.ensure((advertised, served, own_ip(os.environ)), first_rank=first, ranks=ranks)


def _runtime_config(
    settings: WorkerSettings, args: argparse.Namespace, channel: SideChannel | None
) -> runtime.RuntimeConfig:
    from vllm_pd.agent import runtime

    served = getattr(args, "served_model_name", None) or [args.model]
    return runtime.RuntimeConfig(
        store=settings.store,
        namespace=settings.namespace,
        role=settings.role,
        advertise_url=settings.advertise_url,
        host=getattr(args, "host", None),
        port=args.port,
        uds=getattr(args, "uds", None),
        tls=bool(getattr(args, "ssl_certfile", None)),
        nixl_host=channel.host if channel else "",
        nixl_port=channel.port if channel else 0,
        cpu_gib=settings.cpu_gib,
        ssd_gib=settings.ssd_gib,
        lease_s=settings.lease_s,
        models=tuple([served] if isinstance(served, str) else served),
        loras=tuple(lora.name for lora in getattr(args, "lora_modules", None) or ()),
        chat_template=getattr(args, "chat_template", None),
    )
