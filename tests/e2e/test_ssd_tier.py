"""The SSD tier under a real server: the same answers as without it, whatever happens to server and disk."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import pytest

from scripts.models import model_dir, tiny_model_dir
from tests.e2e.ask import Answer, Prompt
from tests.e2e.tier_server import (
    BLOCK_TOKENS,
    CPU_BLOCKS,
    KV_BLOCKS,
    Server,
    assert_same,
    conversations,
    die,
    segment_files,
    serve,
)
from tests.e2e.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(1800)]

TINY_BLOCK = 4 * 2 * BLOCK_TOKENS * 4 * 32 * 4
"""Layers, keys and values, tokens, heads, their size, float32."""
HYBRID_BLOCK = TINY_BLOCK // 2
"""A block is that of two layers: either with full attention or with a window."""


def wrote(server: Server) -> bool:
    return server.metrics().value("vllm_pd_ssd_written_blocks_total") > 0


def settle(server: Server) -> None:
    """Until what was stored is written: an engine steps on for that, so that its metrics tell."""
    deadline, calm, last = time.monotonic() + 60, 0, -1.0
    while calm < 3:
        assert time.monotonic() < deadline, "the tier never comes to rest"
        metrics = server.metrics()
        now = metrics.value("vllm_pd_ssd_written_bytes_total") + metrics.value("vllm:kv_offload_store_bytes_total")
        calm = calm + 1 if now == last and not metrics.value("vllm_pd_ssd_staged_bytes") else 0
        last = now
        time.sleep(0.1)


def test_prompts_come_back_from_the_ssd_also_when_files_are_damaged_under_the_server(tmp_path: Path) -> None:
    """One start: cold, from the tiers, with every second segment damaged, with all of them gone."""
    prompts = conversations(12, 2)
    ssd = tmp_path / "ssd"
    with serve(tmp_path, tiny_model_dir(), block_bytes=TINY_BLOCK, ssd=ssd) as server:
        cold = server.ask_all(prompts, at_once=2)
        settle(server)
        assert server.metrics().value("vllm_pd_ssd_blocks") > CPU_BLOCKS
        assert_same(prompts, cold, server.ask_all(prompts))
        metrics = server.metrics()
        assert metrics.value("vllm_pd_ssd_read_blocks_total") > KV_BLOCKS
        assert metrics.value("vllm_pd_ssd_loads_failed_blocks_total") == 0

        for path in segment_files(ssd)[::2]:
            raw = bytearray(path.read_bytes())
            raw[4096::512] = bytes(byte ^ 1 for byte in raw[4096::512])
            path.write_bytes(raw)
        assert_same(prompts, cold, server.ask_all(prompts))
        assert server.metrics().value("vllm_pd_ssd_loads_failed_blocks_total", reason="corrupt") > 0
        for path in segment_files(ssd):
            path.unlink()
        assert_same(prompts, cold, server.ask_all(prompts))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "block_bytes"), [("tiny", TINY_BLOCK), ("tiny-hybrid", HYBRID_BLOCK)])
def test_five_hundred_answers_equal_those_of_a_server_without_tiers(
    tmp_path: Path, model: str, block_bytes: int
) -> None:
    """Hits on every tier, eight at a time, preemptions, prompts in pieces, resets, a restart, and three deaths."""
    folder, prompts, others = model_dir(model), conversations(100, 5), conversations(60, 2, seed=6)
    with serve(tmp_path / "plain", folder) as server:
        wanted, wanted_of_others = server.ask_all(prompts), server.ask_all(others)

    ssd = tmp_path / "ssd"
    with serve(tmp_path / "first", folder, block_bytes=block_bytes, ssd=ssd) as server:
        got = []
        for first in range(0, len(prompts), 100):
            got += server.ask_all(prompts[first : first + 100])
            # Of the GPU's cache, then of host memory, too; the second time while requests are under way.
            server.post("/reset_prefix_cache")
            if first % 200:
                with _asking(server, prompts[:20]):
                    _reset_all(server)
        assert_same(prompts, wanted, got)
        metrics = server.metrics()
        settle(server)
    assert metrics.value("vllm:prefix_cache_hits_total") > 0
    from_ssd = metrics.value("vllm_pd_ssd_read_blocks_total")
    assert from_ssd > KV_BLOCKS
    assert metrics.value("vllm:kv_offload_load_bytes_total") > from_ssd * block_bytes * 0.5
    assert metrics.value("vllm:num_preemptions_total") > 0
    assert metrics.value("vllm_pd_ssd_loads_failed_blocks_total") == 0

    some = random.Random(1).sample(range(len(prompts)), 100)
    again = [prompts[number] for number in some]
    with serve(tmp_path / "again", folder, block_bytes=block_bytes, ssd=ssd) as server:
        assert_same(again, [wanted[number] for number in some], server.ask_all(again))
        metrics = server.metrics()
        recovered = metrics.value("vllm_pd_ssd_recovered_blocks_total")
        assert recovered > CPU_BLOCKS
        assert metrics.value("vllm_pd_ssd_read_blocks_total") > KV_BLOCKS

    draw = random.Random(2)
    for death in range(3):
        dying = serve(tmp_path / f"death {death}", folder, block_bytes=block_bytes, ssd=ssd)
        # Of other prompts, so that there is something to write.
        with dying as server, _asking(server, others):
            if not death:
                # The first one is not to die before it wrote anything: a first step may take seconds.
                assert eventually(partial(wrote, server), seconds=60)
            time.sleep(draw.uniform(0.2, 3.0))
            die(server)
    with serve(tmp_path / "after", folder, block_bytes=block_bytes, ssd=ssd) as server:
        assert_same(again, [wanted[number] for number in some], server.ask_all(again))
        assert_same(others, wanted_of_others, server.ask_all(others))
        metrics = server.metrics()
        assert metrics.value("vllm_pd_ssd_recovered_blocks_total") > recovered
        assert metrics.value("vllm_pd_ssd_loads_failed_blocks_total", reason="corrupt") == 0


@pytest.mark.slow
def test_changed_weights_never_meet_blocks_of_the_former_ones(tmp_path: Path) -> None:
    """vLLM's `reload_weights` reads the same files again: the answers stay, and nothing comes from the SSD for them."""
    prompts = conversations(8, 1)
    ssd = tmp_path / "ssd"
    with serve(tmp_path, tiny_model_dir(), block_bytes=TINY_BLOCK, ssd=ssd) as server:
        cold = server.ask_all(prompts)
        settle(server)
        assert server.metrics().value("vllm_pd_ssd_blocks") > 0
        server.endpoint.post("/collective_rpc", {"method": "reload_weights"})
        server.post("/reset_prefix_cache?reset_external=true")
        before = server.metrics().value("vllm_pd_ssd_read_blocks_total")
        assert_same(prompts, cold, server.ask_all(prompts))
        assert server.metrics().value("vllm_pd_ssd_read_blocks_total") == before
    assert "SSD tier begins anew" in server.log.read_text()
    assert len({path.parent for path in segment_files(ssd)}) == 1, "the blocks of the new weights went with the server"


def _reset_all(server: Server) -> None:
    """Caches and running requests. vLLM refuses it, with an error, while blocks are being loaded for one."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return server.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
        except HTTPError as e:
            assert e.code == 500 and time.monotonic() < deadline
            time.sleep(0.02)


class _asking:
    """Prompts under way in the background; answers and errors are nobody's business."""

    def __init__(self, server: Server, prompts: list[Prompt]) -> None:
        self._server, self._prompts = server, prompts
        self._thread = threading.Thread(target=self._run)
        self.answers: list[Answer] = []

    def _run(self) -> None:
        # It may be killed meanwhile.
        with suppress(OSError, HTTPException, ValueError):
            self.answers = self._server.ask_all(self._prompts)

    def __enter__(self) -> None:
        self._thread.start()
        time.sleep(0.3)

    def __exit__(self, *_: object) -> None:
        self._thread.join(600)
        assert not self._thread.is_alive()
