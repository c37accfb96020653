"""What a conformance suite needs of the store it runs on."""

from __future__ import annotations

from typing import Protocol

from vllm_pd.state import BlockIndex, Registry


class Harness(Protocol):
    """One store under test. Whatever it opens is closed by the fixture."""

    def registry(self, namespace: str = "test") -> Registry: ...

    def block_index(self, namespace: str = "test") -> BlockIndex: ...

    async def pass_time(self, ms: int) -> None:
        """Return when the store's clock is at least `ms` further."""

    async def lose_everything(self) -> None:
        """Make the store forget all keys, as a restart without persistence does."""
