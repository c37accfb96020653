"""The block index suite on every store."""

from __future__ import annotations

from tests.conformance.block_index import BlockIndexConformance


class TestBlockIndex(BlockIndexConformance):
    pass
