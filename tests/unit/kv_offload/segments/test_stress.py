"""Puts, loads, use, late loads and evictions at once, on a disk that fails now and then."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.unit.kv_offload.segments.rig import LIMIT_S, Rig, config, content, key, used
from vllm_pd.kv_offload.segments import Finished

pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "failing"])
def test_whatever_happens_at_once_only_right_bytes_are_delivered_and_every_ticket_ends_once(
    tmp_path: Path, faults: bool
) -> None:
    rng, targets, ended = random.Random(3), dict[int, tuple[list[int], list[memoryview]]](), dict[int, Finished]()
    with Rig(config(tmp_path, readers=4, put_wait_s=0.2)) as rig:
        known = 0

        def collect() -> None:
            for result in rig.store.finished():
                assert result.ticket not in ended, "a ticket ended twice"
                ended[result.ticket] = result
                if result.is_load:
                    numbers, memory = targets.pop(result.ticket)
                    ok = set(result.ok)
                    assert ok.isdisjoint(result.failed) and ok | set(result.failed) == {key(i) for i in numbers}
                    for i, target in zip(numbers, memory, strict=True):
                        assert key(i) not in ok or bytes(target) == content(i), f"block {i} is wrong"
                        # What was given back is the user's again.
                        target[:8] = b"returned"

        for step in range(400):
            rig.begin_put(range(known, known + rng.randint(1, 12)))
            known += 12
            numbers = [rng.randrange(known) for _ in range(rng.randint(1, 40))]
            ticket, memory = rig.begin_get(sorted(set(numbers)), rng.choice([0.0, 0.001, 0.01, LIMIT_S]))
            targets[ticket] = (sorted(set(numbers)), memory)
            rig.store.touch([key(i) for i in numbers[:5]])
            if faults and step % 10 == 0:
                getattr(rig.disk, rng.choice(["fail", "cut_short", "flip_bit"]))(rng.choice(["read", "write"]))
                rig.disk.delay("read", 0.005, times=2)
                rig.store._writer._off_until = 0.0
            collect()
            assert used(tmp_path) <= rig.config.budget_bytes
            time.sleep(0.001)
        rig.store.drain(LIMIT_S)
        collect()
        assert len(ended) == rig.tickets and not targets
        assert rig.store.flush(LIMIT_S)
        rig.disk.clear()
        stats = rig.store.stats()
        assert stats.evicted_segments_total > 0 and stats.queued_load_bytes == stats.staged_bytes == 0
        # A load that was given up lets go of its segment when the disk is done with it.
        deadline = time.monotonic() + LIMIT_S
        while any(segment.pins for segment in rig.store._index.segments()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        has = rig.stored(range(known))
        rig.get(has)
        assert len(rig.get(rig.stored(range(known))).ok) > 50
