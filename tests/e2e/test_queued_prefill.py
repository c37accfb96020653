"""By default a router's prefill work goes through the store's queue, on real workers too."""

from __future__ import annotations

import pytest

from tests.e2e.ask import Endpoint, Prompt, compare
from tests.e2e.conftest import BLOCK
from vllm_pd.graph.local import LocalCluster
from vllm_pd.state import Role

LENGTH = 5 * BLOCK + 3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_prompt_is_claimed_from_the_queue(cluster: LocalCluster, through_router: Endpoint, plain: Endpoint) -> None:
    def legs(way: str) -> float:
        return cluster.router_metrics().value("vllm_pd_router_prefill_dispatch_total", way=way)

    def read() -> float:
        (decode,) = cluster.of_role(Role.DECODE)
        return decode.metrics().value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")

    # A router that has just started, or a machine that is too busy for its store, sends a prompt directly.
    for attempt in range(5):
        prompt = Prompt(f"queued-{attempt}", "completion", {"prompt": [3 + (n + attempt) % 400 for n in range(LENGTH)]})
        queued, before = legs("queue"), read()
        answer = through_router.ask(prompt)
        if legs("queue") > queued:
            break
    else:
        pytest.fail("no prompt of five went through the queue")
    assert read() - before >= 5 * BLOCK
    assert not compare(plain.ask(prompt), answer).detail
