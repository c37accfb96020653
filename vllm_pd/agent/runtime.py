"""What the agent of this process is told before vLLM builds its engine, kept until the engine is up.

`configure` is called where the command line is known; vLLM builds the stat logger later and hands it only its own
configuration, so the two meet in this module.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.agent.identity import advertise_url, own_ip
from vllm_pd.agent.tokenizer_files import Rendering
from vllm_pd.settings import DEFAULT_LEASE_S
from vllm_pd.state.base import Role
from vllm_pd.state.keys import check_namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Sizes in GiB (2**30 bytes), times in seconds.

    Attributes:
        store: URL of the store; empty means that no agent runs.
        advertise_url: base URL given by the user; empty to derive it from `host`, `port` and `tls`.
        host: what the server binds; None and "" mean every interface.
        uds: path of the Unix socket it binds instead.
        nixl_host, nixl_port: NIXL's side channel; an empty host when this worker cannot hand KV over.
        models: served model names.
        loras, lora_paths: names of LoRA adapters known at start, and where each of them is.
        kv_events: whether the engine publishes its KV events for the block index.
        rendering: flags that decide how chats become prompts.
        api_key: one that the server accepts; empty when it wants none.
        asks_certificate: whether the server wants its clients to show one.
        prefill_budget_tokens: of prefill jobs claimed at a time; 0: from the size of the engine's batches.
    """

    store: str
    namespace: str
    role: Role = Role.BOTH
    advertise_url: str = ""
    host: str | None = None
    port: int = 0
    uds: str | None = None
    tls: bool = False
    nixl_host: str = ""
    nixl_port: int = 0
    cpu_gib: float = 0.0
    ssd_gib: float = 0.0
    lease_s: float = DEFAULT_LEASE_S
    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    lora_paths: tuple[str, ...] = ()
    kv_events: bool = False
    rendering: Rendering = Rendering()
    api_key: str = field(default="", repr=False)
    asks_certificate: bool = False
    prefill_budget_tokens: int = 0

    def url(self) -> str:
        """The advertised base URL.

        Raises:
            SettingsError: see `identity.advertise_url`.
        """
        return advertise_url(
            self.host,
            self.port,
            uds=self.uds,
            tls=self.tls,
            explicit=self.advertise_url,
            host_ip=own_ip(os.environ),
        )


_config: RuntimeConfig | None = None
_engine: weakref.ref[Any] | None = None


def configure(config: RuntimeConfig) -> None:
    """Remember `config` for the stat logger of this process; the last call counts.

    Raises:
        SettingsError: the namespace is malformed, or no URL can be advertised.
    """
    global _config
    if config.store:
        check_namespace(config.namespace)
        config.url()
    _config = config


def configured() -> RuntimeConfig | None:
    """What `configure` was told, or None when there is no store and hence no agent."""
    return _config if _config is not None and _config.store else None


def remember_engine(client: Any) -> None:
    """Remember vLLM's engine client of this process; the last call counts."""
    global _engine
    _engine = weakref.ref(client)


def engine() -> Any | None:
    """The engine client, or None when there is none (yet, or any more)."""
    return _engine() if _engine is not None else None
