"""Publishes at once what a reset of the caches changed. Runs in the engine's process.

vLLM hands its KV events on at the end of a scheduler step, and an idle engine makes none: after `/reset_prefix_cache`
or when put to sleep it would be said to hold blocks that are gone, until its next request. That the CPU tier was
emptied, too, is not among vLLM's events at all; it is said by a removal without hashes.
"""

from __future__ import annotations

import functools
import time
from typing import Any

from vllm_pd import vllm_compat as compat

_MARK = "_vllm_pd_wrapped"
CPU = "CPU"


def install() -> None:
    """Wrap the scheduler's resets in this process. Idempotent."""
    scheduler = compat.Scheduler
    if getattr(scheduler.reset_prefix_cache, _MARK, False):
        return
    reset_prefix_cache, reset_connector_cache = scheduler.reset_prefix_cache, scheduler.reset_connector_cache

    @functools.wraps(reset_prefix_cache)
    def reset_prefix_cache_and_publish(self: Any, *args: Any, **kwargs: Any) -> bool:
        try:
            return bool(reset_prefix_cache(self, *args, **kwargs))
        finally:
            publish(self, [])

    @functools.wraps(reset_connector_cache)
    def reset_connector_cache_and_publish(self: Any, *args: Any, **kwargs: Any) -> bool:
        done = bool(reset_connector_cache(self, *args, **kwargs))
        if done and self.connector is not None:
            publish(self, [compat.BlockRemoved(block_hashes=[], medium=CPU)])
        return done

    setattr(reset_prefix_cache_and_publish, _MARK, True)
    scheduler.reset_prefix_cache = reset_prefix_cache_and_publish
    scheduler.reset_connector_cache = reset_connector_cache_and_publish


def publish(scheduler: Any, last: list[Any]) -> None:
    """Publish what has gathered since the last step, and then `last`."""
    events = list(scheduler.kv_cache_manager.take_events() or ())
    if scheduler.connector is not None:
        events += scheduler.connector.take_events()
    events += last
    if events:
        scheduler.kv_event_publisher.publish(compat.KVEventBatch(ts=time.time(), events=events))
