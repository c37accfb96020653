"""What a client reads of a stream through the router is what the worker itself would have sent."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e import prompts
from tests.e2e.streams import Stream
from tests.e2e.test_continuation import CHAT, COMPLETION, asked
from vllm_pd.graph.local import LocalCluster
from vllm_pd.router.token_tail import TokenTail

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("usage", [None, {"include_usage": True, "continuous_usage_stats": True}])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_through_the_router_has_the_workers_own_bytes(cluster: LocalCluster, path: str, usage: Any) -> None:
    body = asked(path, prompts.TEXTS["emoji and code"], 64, **({"stream_options": usage} if usage else {}))
    worker = cluster.worker("decode-0")
    direct = Stream(worker.url, path, body).start().finish()
    routed = Stream(cluster.router_url, path, body).start().finish()
    # Where one event ends and the next begins is chance; what an event looks like is not.
    assert forms(routed) == forms(direct)
    assert any(b'"token_ids":null' in event for event in direct.events)

    with_ids = Stream(worker.url, path, {**body, "return_token_ids": True}).start().finish()
    tail = TokenTail(chat=path == CHAT)
    made = b"".join(tail.feed(event + b"\n\n") for event in with_ids.events)
    wanted = b"".join(b"data: %b\n\n" % without_ids(value) for value in with_ids.values)
    assert made == wanted + b"data: [DONE]\n\n"
    assert len(tail.ids) == 64


def forms(stream: Stream) -> set[bytes]:
    """The events without their texts, numbers and names."""
    data = [re.sub(rb'"(content|text|id)":"(\\.|[^"\\])*"', rb'"\1":""', event) for event in stream.events]
    return {re.sub(rb"\d+", b"0", event) for event in data}


def without_ids(value: dict[str, Any]) -> bytes:
    """The event as vLLM writes it to who has not asked for ids."""
    for part in (value, *value["choices"]):
        part.update({name: None for name in ("token_ids", "prompt_token_ids") if name in part})
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
