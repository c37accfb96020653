"""Notices that the model's weights are changed in a running engine, and tells the tiers. Runs in the engine's process.

KV of former weights is wrong for the new ones. vLLM leaves it to whoever changes weights to reset the caches, and a
reset leaves files on a disk alone, since it is asked for on other occasions, too. Weights are changed through calls to
the workers by name (`reload_weights`, `update_weights`, ..., and whatever a training framework adds), so every call
counts whose name is not known to leave them as they are. After it, what vLLM's own caches hold stays wrong until they
were all reset, which only the scheduler knows: a reset is refused while a request holds blocks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_pd import vllm_compat as compat
from vllm_pd.connectors import event_flush

logger = logging.getLogger(f"vllm.{__name__}")

_MARK = "_vllm_pd_watched"
STORAGE = "STORAGE"

HARMLESS = frozenset(
    {
        "add_lora",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "save_sharded_state",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Calls of vLLM's own that leave the weights as they are."""


def install() -> None:
    """Wrap the engine's calls to its workers, and the scheduler's resets, in this process. Idempotent."""
    _watch_calls()
    _watch_resets()


def _watch_calls() -> None:
    engine = compat.EngineCore
    if getattr(engine.collective_rpc, _MARK, False):
        return
    collective_rpc = engine.collective_rpc

    @functools.wraps(collective_rpc)
    def watched(self: Any, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        # Before it: half of the weights are other weights, too.
        if name not in HARMLESS and (scheduler := getattr(self, "scheduler", None)) is not None:
            _tell(scheduler, name)
        return collective_rpc(self, method, *args, **kwargs)

    setattr(watched, _MARK, True)
    engine.collective_rpc = watched


def _watch_resets() -> None:
    scheduler = compat.Scheduler
    if getattr(scheduler.reset_prefix_cache, _MARK, False):
        return
    reset_prefix_cache = scheduler.reset_prefix_cache

    @functools.wraps(reset_prefix_cache)
    def watched(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = bool(reset_prefix_cache(self, reset_running_requests, reset_connector))
        if done and reset_connector and (tell := getattr(self.connector, "caches_were_reset", None)) is not None:
            tell()
        return done

    # Another wrapper's mark, copied by `wraps`, is what keeps that one from wrapping twice.
    setattr(watched, _MARK, True)
    scheduler.reset_prefix_cache = watched


def _tell(scheduler: Any, why: str) -> None:
    tell: Callable[[str], bool] | None = getattr(scheduler.connector, "weights_changed", None)
    if tell is not None and tell(why):
        event_flush.publish(scheduler, [compat.BlockRemoved(block_hashes=[], medium=STORAGE)])
