"""Whether the worker that an action is about is still the one that the planner saw."""

from __future__ import annotations

from vllm_pd.errors import ActuatorError, StoreError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.model import MoveAction, RemoveAction
from vllm_pd.state.base import PoolId, Registry


async def another_start(registry: Registry, pool: PoolId, action: MoveAction | RemoveAction) -> Outcome | None:
    """Why the action must not be done, None when it may.

    Raises:
        ActuatorError: the store did not answer.
    """
    try:
        state = await registry.find(action.worker, pool)
    except StoreError as e:
        raise ActuatorError(f"Whether {action.worker} is still there could not be asked: {e}") from None
    if state is None:
        return Outcome(False, f"No worker {action.worker} is registered in pool {pool}.")
    if state.record.epoch != action.epoch:
        return Outcome(False, f"The worker {action.worker} was restarted since the planner looked at it.")
    return None
