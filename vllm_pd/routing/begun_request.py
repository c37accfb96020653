"""A request on an engine, as the ledger of that engine keeps it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_pd.block_hash import BlockKey
from vllm_pd.routing.model import Ask, Overlap
from vllm_pd.routing.rates import prefill_work


class BegunRequest:
    """Mutable, owned by an `EngineLedger`.

    Args:
        cached: tokens of its prompt that need not be computed.
        now: when it was placed there.
    """

    __slots__ = (
        "blocks",
        "cached",
        "crowded",
        "missing",
        "new",
        "promises",
        "seconds",
        "silent",
        "since",
        "turn",
        "work",
    )

    def __init__(self, ask: Ask, overlap: Overlap, cached: int, silent: bool, now: float) -> None:
        self.cached = cached
        self.new = ask.tokens - cached
        self.work = prefill_work(self.new, cached, overlap.cpu, overlap.ssd)
        self.promises: Sequence[BlockKey] = ()
        """Keys of the blocks it will leave in the cache."""
        self.seconds = 0.0
        """Predicted prefill time, without the queue before it."""
        self.blocks = ask.blocks
        self.silent = silent
        """Its first token is not seen: the answer comes in one piece."""
        self.missing = ask.blocks - overlap.gpu
        """Blocks to hand over if another worker prefills it."""
        self.crowded: bool | None = None
        """Whether it was sent to an engine without room for what it brings; None: prefilled elsewhere, not sent yet."""
        self.turn = now
        """Of those that wait, the one with the smallest is computed next."""
        self.since = now
        """Sent; with a remote prefill: when the prefilled request was sent; later: when its first token came."""
