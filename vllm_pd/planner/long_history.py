"""What arrived over days, in buckets: three widths, each with as many as it takes to see twice what returns. Pure.

The buckets lie on the clock that all planners share, so what returns at an hour of the day does so in whichever planner
leads, and however long none did.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

from vllm_pd.planner.memory import Buckets, Sample
from vllm_pd.planner.periods import period, smoothed_out

WIDTHS_S = (60.0, 600.0, 3600.0)
KEPT = 360
"""Buckets of a width: six hours, two and a half days, fifteen days. Half of that is the longest period that can be
found; with `LEAST` buckets as the shortest, periods from some minutes to a week are."""
_ROW = struct.Struct("<5f")
_MOST = 1e30
"""What a bucket holds at most: more than any traffic, less than what its number can be."""


def remembered(ages: Sequence[Buckets], sample: Sample, at_s: float) -> tuple[Buckets, ...]:
    """The buckets with one more sample, which ended at `at_s`."""
    known = {each.width_s: each for each in ages if _is_ours(each)}
    return tuple(_with(known.get(width, Buckets(width)), sample, at_s) for width in WIDTHS_S)


def _is_ours(buckets: Buckets) -> bool:
    """Whether they hold the numbers of this version: a planner of another one may have led before."""
    fresh = Buckets(buckets.width_s)
    numbers = len(buckets.sums) == len(fresh.sums) and len(buckets.periods) == len(fresh.periods)
    return numbers and len(buckets.packed) % _ROW.size == 0 and len(buckets.packed) >= max(buckets.periods) * _ROW.size


def _with(buckets: Buckets, sample: Sample, at_s: float) -> Buckets:
    index = int((at_s - sample.seconds / 2) // buckets.width_s)
    filled, passed = buckets.sums, 0
    if buckets.sums[0] > 0:
        passed = index - buckets.index
        if passed > 0:
            buckets = _closed(buckets, passed)
            filled = buckets.sums
        elif passed < -1:
            # The clock went back: where it stands in what was is not known any more.
            buckets, passed = Buckets(buckets.width_s), 0
            filled = buckets.sums
    rates = (sample.arrivals, sample.prompt_tokens, sample.uncached_tokens, sample.output_tokens, sample.held)
    added = (sample.seconds, *(min(rate, _MOST) * sample.seconds for rate in rates))
    sums = tuple(before + more for before, more in zip(filled, added, strict=True))
    return replace(buckets, index=index if passed >= 0 else buckets.index, sums=sums)


def _closed(buckets: Buckets, passed: int) -> Buckets:
    """With the bucket that was being filled, and as many as nothing was seen in since."""
    if passed > KEPT // 2:
        return Buckets(buckets.width_s)
    seconds, *sums = buckets.sums
    size, back = _ROW.size, buckets.periods[0] or 1
    packed = buckets.packed + _ROW.pack(*(total / seconds for total in sums))
    for _ in range(passed - 1):
        # Nobody looked; what was there a period before is as good a guess as there is.
        begin = max(0, len(packed) - back * size)
        packed += packed[begin : begin + size]
    packed = packed[-KEPT * size :]
    closed = Buckets(buckets.width_s, buckets.index, packed=packed)
    return replace(closed, periods=tuple(period(column) for column in rhythms(closed)))


def columns(buckets: Buckets) -> list[list[float]]:
    """What is in the buckets that are full, oldest first: arrivals, prompt, uncached and output tokens a second, and
    the KV tokens of a sequence that is decoded."""
    return [list(column) for column in zip(*_ROW.iter_unpack(buckets.packed), strict=True)] or [[]] * 5


def rhythms(buckets: Buckets) -> list[list[float]]:
    """The same, with tokens of one arrival in place of those of a second: how many requests come and what they are
    like each have a rhythm of their own."""
    arrivals, *tokens, held = columns(buckets)
    steady = smoothed_out(arrivals)
    return [arrivals, *(_each(column, steady) for column in tokens), held]


def _each(tokens: Sequence[float], arrivals: Sequence[float]) -> list[float]:
    found: list[float] = []
    for some, among in zip(tokens, arrivals, strict=True):
        found.append(some / among if among > 0 else found[-1] if found else 0.0)
    return found
