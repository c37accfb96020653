"""What an API server process does once the pd connector is on: side channel, agent, log line."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_pd import side_channel
from vllm_pd import vllm_compat as compat
from vllm_pd.agent.identity import own_ip
from vllm_pd.settings import LMCACHE, WorkerSettings
from vllm_pd.side_channel import SideChannel
from vllm_pd.transfer_config import nixl_installed

if TYPE_CHECKING:
    from vllm_pd.agent import runtime
    from vllm_pd.agent.tokenizer_files import Rendering

logger = logging.getLogger("vllm.vllm_pd")


def prepare(settings: WorkerSettings, engine_args: Any, args: argparse.Namespace) -> None:
    """Choose NIXL's side channel, and have the agent start with the engine if a store is configured."""
    channel = _side_channel(settings, engine_args, args) if nixl_installed() else None
    if channel is None:
        logger.warning(
            "NIXL is not installed, so prefill/decode hand-off is off and only the KV tiers work; "
            "pip install 'vllm-pd[nixl]' turns it on."
        )
    # Also an engine without an API server of its own has one elsewhere that indexes it.
    events = bool(settings.store) and _publish_kv_events(engine_args, args)
    if settings.store and _serves_http(args):
        from vllm_pd.agent import runtime

        runtime.configure(_runtime_config(settings, args, channel, events))
        install_stat_logger()
    logger.info("vllm-pd: %s", describe(settings))


def describe(settings: WorkerSettings) -> str:
    """One line for the log: what this worker is."""
    tiers = [f"{settings.cpu_gib:g} GiB in host memory"] if settings.cpu_gib else []
    tiers += [f"{settings.ssd_gib:g} GiB on {settings.ssd_path}"] if settings.ssd_path else []
    store = f"store {settings.store!r}, namespace {settings.namespace}" if settings.store else "no store"
    below = f"KV tiers: {', '.join(tiers)}" if tiers else "no KV tier below GPU memory"
    if settings.offload == LMCACHE:
        below = f"LMCache at {settings.lmcache_url} below GPU memory"
    return f"role {settings.role}, {store}, {below}"


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
    _remember_engine(compat.AsyncLLM)


def _remember_engine(client: Any) -> None:
    """Have the agent know vLLM's engine client, which is told by each engine where it publishes its KV events."""
    original = client.__init__

    @functools.wraps(original)
    def init_and_remember(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_pd.agent import runtime

        runtime.remember_engine(self)
        original(self, *args, **kwargs)

    client.__init__ = init_and_remember


def _serves_http(args: argparse.Namespace) -> bool:
    return hasattr(args, "port") and not getattr(args, "headless", False)


def _side_channel(settings: WorkerSettings, engine_args: Any, args: argparse.Namespace) -> SideChannel:
    advertised = urlsplit(settings.advertise_url).hostname or ""
    served = getattr(args, "host", None) or ""
    ranks = _ranks(engine_args)
    return side_channel.ensure((advertised, served, own_ip(os.environ)), first_rank=ranks.start, ranks=len(ranks))


def _ranks(engine_args: Any) -> range:
    """The data-parallel ranks that this process starts."""
    first = engine_args.data_parallel_rank or engine_args.data_parallel_start_rank or 0
    ranks = (
        1
        if engine_args.data_parallel_rank is not None
        else (engine_args.data_parallel_size_local or engine_args.data_parallel_size)
    )
    return range(first, first + ranks)


def _publish_kv_events(engine_args: Any, args: argparse.Namespace) -> bool:
    from vllm_pd import kv_event_setup

    return kv_event_setup.publish_kv_events(
        engine_args, last_rank=_ranks(engine_args)[-1], local=_all_engines_are_here(engine_args, args)
    )


def _all_engines_are_here(engine_args: Any, args: argparse.Namespace) -> bool:
    """Whether the API server that is told of these engines, and all it talks to, run on this host."""
    if getattr(args, "headless", False) or engine_args.data_parallel_backend == "ray":
        return False
    balanced_outside = (
        engine_args.data_parallel_external_lb
        or engine_args.data_parallel_hybrid_lb
        or engine_args.data_parallel_rank is not None
        or engine_args.data_parallel_start_rank is not None
    )
    size, here = engine_args.data_parallel_size, engine_args.data_parallel_size_local
    if balanced_outside or size == 1:
        return True
    return engine_args.nnodes == 1 and (here is None or here >= size)


def _runtime_config(
    settings: WorkerSettings, args: argparse.Namespace, channel: SideChannel | None, kv_events: bool
) -> runtime.RuntimeConfig:
    from vllm_pd.agent import runtime

    served = getattr(args, "served_model_name", None) or [args.model]
    adapters = getattr(args, "lora_modules", None) or ()
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
        loras=tuple(lora.name for lora in adapters),
        lora_paths=tuple(lora.path for lora in adapters),
        kv_events=kv_events,
        rendering=_rendering(args),
        api_key=_api_key(args),
        asks_certificate=getattr(args, "ssl_cert_reqs", ssl.CERT_NONE) == ssl.CERT_REQUIRED,
        prefill_budget_tokens=settings.prefill_budget_tokens,
    )


def _api_key(args: argparse.Namespace) -> str:
    """A key that the server accepts, as vLLM finds them; empty when it wants none."""
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return next((key for key in keys if key), "")


def _rendering(args: argparse.Namespace) -> Rendering:
    from vllm_pd.agent.tokenizer_files import Rendering

    return Rendering(
        chat_template=getattr(args, "chat_template", None),
        content_format=getattr(args, "chat_template_content_format", "auto"),
        template_kwargs=getattr(args, "default_chat_template_kwargs", None) or {},
        drops_unused_tools=bool(getattr(args, "exclude_tools_when_tool_choice_none", False)),
    )
