"""Actions as JSON, for programs outside and for the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_pd.planner.model import Action, AddAction, GiveUp, MoveAction, RemoveAction, StartView
from vllm_pd.state.base import Role


def as_json(action: Action | GiveUp) -> dict[str, Any]:
    """`{"action": "add", "role": "decode", "count": 2, "why": "..."}` and so on."""
    match action:
        case MoveAction():
            about = {"worker": action.worker, "epoch": action.epoch, "role": str(action.to)}
            return {"action": "move", **about, "why": action.why}
        case AddAction():
            return {"action": "add", "role": str(action.role), "count": action.count, "why": action.why}
        case RemoveAction():
            return {"action": "remove", "worker": action.worker, "epoch": action.epoch, "why": action.why}
        case GiveUp():
            return {"action": "give_up", "role": str(action.role), "count": action.count, "why": action.why}


class _Start(msgspec.Struct):
    role: Role
    count: int
    for_s: float = 0.0


_starts = msgspec.json.Decoder(list[_Start])


def read_starts(data: bytes) -> Sequence[StartView]:
    """`[{"role": "decode", "count": 2, "for_s": 12.5}, ...]`; nothing for nothing. Raises ValueError for other text."""
    if not data.strip():
        return ()
    return [StartView(each.role, max(0, each.count), max(0.0, each.for_s)) for each in _starts.decode(data)]
