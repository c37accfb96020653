"""The length from which on a hit pays, as the benchmark reads it off its times."""

from __future__ import annotations

import pytest

from benchmarks.offload_misses import break_even
from benchmarks.offload_ttft import COLD, MEMORY


@pytest.mark.parametrize(
    ("hits", "shortest"),
    [
        ({64: 0.02, 256: 0.02, 1024: 0.03}, 256),
        ({64: 0.001, 256: 0.02, 1024: 0.03}, 64),
        ({64: 0.001, 256: 0.9, 1024: 0.03}, 1024),
        ({64: 0.02, 256: 0.04, 1024: 0.2}, None),
        ({64: 0.001, 1024: 0.03}, 1024),
        ({}, None),
    ],
)
def test_break_even_is_the_length_from_which_on_all_longer_ones_pay(
    hits: dict[int, float], shortest: int | None
) -> None:
    found = {(length, COLD): [seconds] * 3 for length, seconds in ((64, 0.01), (256, 0.03), (1024, 0.1))}
    found |= {(length, MEMORY): [seconds] for length, seconds in hits.items()}
    assert break_even(found, MEMORY) == shortest
