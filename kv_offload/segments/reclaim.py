"""Which segment to give up, what of it to keep, and how much room is missing. Pure.

The victim is the segment that frees the most for what keeping its used blocks costs: the cost-benefit rule of
log-structured file systems (Rosenblum and Ousterhout, 1991), with "used since it was written" in place of "not
overwritten". Time is counted in segments written, so that nothing happens to an idle store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes, for the root folder over all namespaces: what segments may take, and free space to keep."""

    budget_bytes: int
    floor_bytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment that may be evicted.

    Attributes:
        id: grows with each segment that is written.
        blocks: that were put in it.
        live: of those, that can still be loaded.
        hot: of those, that were used since they were written.
        used_at: id of the newest segment when one of its blocks was last used.
    """

    id: int
    blocks: int
    live: int
    hot: int
    used_at: int


def missing(limits: Limits, used_bytes: int, free_bytes: int, wanted_bytes: int) -> int:
    """Bytes that must be freed before `wanted_bytes` more may be taken; 0 when they may be now."""
    over_budget = used_bytes + wanted_bytes - limits.budget_bytes
    under_floor = limits.floor_bytes + wanted_bytes - free_bytes
    return max(0, over_budget, under_floor)


def is_ours_to_free(limits: Limits, used_bytes: int, free_bytes: int, wanted_bytes: int, own: int, others: int) -> bool:
    """Whether this namespace should evict, where other processes use namespaces under the same root.

    Who takes more than an equal share of the budget makes room for the others. When space is short for other reasons
    than the budget, everybody does.

    Args:
        own: bytes of this namespace.
        others: namespaces that other processes use now.
    """
    if limits.floor_bytes + wanted_bytes > free_bytes:
        return True
    return not others or own + wanted_bytes > limits.budget_bytes // (others + 1)


def victim(candidates: Iterable[Candidate], clock: int, turn: int) -> Candidate | None:
    """The one to evict next; None without candidates.

    Args:
        clock: id of the newest segment.
        turn: how many segments the store holds: in this time everything is written anew once, and half of what was
            known of a segment's use is forgotten.
    """
    return max(candidates, key=lambda candidate: (_benefit(candidate, clock, turn), -candidate.id), default=None)


def keep(heat: Sequence[int], live: Iterable[int], most: int) -> list[int]:
    """Numbers of the blocks to write again, in the order they lie: used ones, the most used first, `most` of them."""
    used = [number for number in live if heat[number]]
    if len(used) > most:
        # Of equally used blocks the first: those before a block of a prompt are needed for it to be of use.
        used = sorted(sorted(used, key=lambda number: -heat[number])[:most])
    return used


def _benefit(candidate: Candidate, clock: int, turn: int) -> float:
    if not candidate.live:
        return float("inf")
    known: float = 0.5 ** ((clock - candidate.used_at) / max(turn, 1))
    use = candidate.hot / max(candidate.blocks, 1) * known
    return (clock - candidate.id + 1) * (1 - use) / (1 + use)
