"""What is to come about by itself, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

_LOOK_S = 0.05


def eventually(holds: Callable[[], bool], *, seconds: float) -> bool:
    """Whether it does within so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def until(condition: Callable[[], bool], shown: Callable[[], object], *, seconds: float) -> None:
    """The test fails, and says what there is instead, if it does not hold within so many seconds."""
    if not eventually(condition, seconds=seconds):
        pytest.fail(f"it did not happen in time: {shown()}")
