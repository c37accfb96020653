"""In whose name actuators act: the leadership in which an action was decided, asked for anew before each single thing
that is begun.

A planner may stand still at any moment, for as long as it likes, and another one leads when it goes on. What it asks
for carries the number of its leadership, so that whoever is asked can refuse what comes from an older one.
"""

from __future__ import annotations

from typing import Protocol

from vllm_pd.state.base import PoolId


class Mandate(Protocol):
    """Of one planner, for each pool."""

    def term(self, pool: PoolId) -> int:
        """Number of the leadership in whose name it acts; 0 for none."""

    async def confirm(self, pool: PoolId) -> int:
        """The same, once the store has said just now that it still leads. Has a deadline.

        Raises:
            DeposedError: it does not lead, or the store did not say.
        """


class Anybody:
    """Of somebody who is no planner: acts in nobody's name, and is not asked."""

    def term(self, pool: PoolId) -> int:
        return 0

    async def confirm(self, pool: PoolId) -> int:
        return 0


ANYBODY = Anybody()
