"""Where each engine publishes its KV events, as something to connect to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from vllm_pd.agent.kv_event_source import EventEndpoints

logger = logging.getLogger("vllm.vllm_pd")


def event_endpoints(published: Mapping[int, Any], local_ranks: range) -> dict[int, EventEndpoints]:
    """The engines whose events can be read here.

    Args:
        published: rank -> the KVEventsConfig with which its engine really publishes.
        local_ranks: ranks whose engine runs on this host.
    """
    found: dict[int, EventEndpoints] = {}
    for rank, config in published.items():
        live = _reachable(config.endpoint, rank in local_ranks)
        replay = _reachable(config.replay_endpoint or "", rank in local_ranks)
        if live:
            found[rank] = EventEndpoints(live, replay, config.topic)
        else:
            _complain(rank, config.endpoint)
    return found


@functools.cache
def _complain(rank: int, endpoint: str) -> None:
    """Once for each: the question is asked again and again."""
    logger.warning(
        "vllm-pd: the KV events of rank %d cannot be reached at %s, so the block index does not cover it; "
        "drop --kv-events-config, or let it bind tcp://*:0.",
        rank,
        endpoint,
    )


def _reachable(endpoint: str, local: bool) -> str:
    """The address to connect to for one that was bound; empty when there is none from here."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return endpoint if local else ""
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not port.isdigit():
        return ""
    if host in ("*", "0.0.0.0"):
        return f"tcp://127.0.0.1:{port}" if local else ""
    if host in ("[::]", "::"):
        return f"tcp://[::1]:{port}" if local else ""
    return endpoint
