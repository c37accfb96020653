"""Which answers of the TTFT benchmark count as hits of which tier, and what its targets say."""

from __future__ import annotations

import pytest

from benchmarks import offload_ttft as ttft
from benchmarks.offload_peers import LMCACHE, OURS, VLLM
from benchmarks.offload_ttft import COLD, DISK, MEMORY, Times, came_from


@pytest.mark.parametrize(
    ("loaded", "read", "kind"),
    [(0.0, 0.0, COLD), (0.05, 0.3, COLD), (0.98, 0.0, MEMORY), (0.98, 1.1, DISK), (0.98, 0.5, None), (0.6, 0.6, None)],
)
def test_an_answer_counts_for_the_tier_that_its_bytes_came_from(loaded: float, read: float, kind: str | None) -> None:
    assert came_from(loaded, read) == kind


def test_targets_compare_with_the_faster_peer_and_with_computing() -> None:
    found = {
        (OURS, 1500, COLD): Times([0.1]),
        (OURS, 1500, MEMORY): Times([0.02, 0.02, 0.03]),
        (VLLM, 1500, MEMORY): Times([0.03]),
        (LMCACHE, 1500, MEMORY): Times([0.05]),
        (OURS, 1500, DISK): Times([], strays=3),
        (VLLM, 1500, DISK): Times([0.03]),
    }
    made = {target.name: target for target in ttft.targets(found, [OURS, VLLM, LMCACHE], [1500])}
    assert [(target.value, target.ok) for target in made.values()] == [
        (round(0.02 / 0.03, 3), True),
        (0.2, True),
        # What was never measured is not reached.
        (None, False),
        (None, False),
    ]


def test_a_row_says_how_many_answers_came_from_elsewhere() -> None:
    found = {(OURS, 1500, COLD): Times([0.1]), (OURS, 1500, DISK): Times([0.02], strays=2)}
    cold, disk = ttft.rows(found)
    assert (cold["strays"], cold["of cold"]) == (0, 1.0)
    assert (disk["strays"], disk["answers"], disk["of cold"]) == (2, 1, 0.2)
