"""How a router tells a decode worker that hand-offs it was sent are not wanted any more.

A client may leave after its decode leg was sent and before the engine there has it. The API server drops the request,
nobody tells the prefill worker, and that keeps the blocks until their lease ends. So the router names the hand-off to
the engine that was to read it, in the `kv_transfer_params` of a small request (`GIVE_UP_FIELD`). Only this engine knows
whether it has begun to read: a hand-off that has not come there yet is refused from then on, and the prefill worker is
told to let go of the blocks; one that has come ends as its request does. It counts as soon as the engine has it.
Workers without vllm-pd do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

GIVE_UP_FIELD = "pd_give_up"
LEASE_END_FIELD = "pd_lease_until_ms"
"""In transfer parameters: until when the blocks may be read, milliseconds since 1970."""
MAX_HANDOFFS = 64
"""Of one request."""

_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=1)]


class Handoff(msgspec.Struct, frozen=True):
    """Of transfer parameters, by their names, what it takes to tell the prefill worker something about the blocks."""

    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    pd_lease_until_ms: _Count
    """`LEASE_END_FIELD`. Without it nobody could say when a request that comes late is harmless."""
    tp_size: _Count = 1
    dcp_size: _Count = 1
    pp_size: _Count = 1


class GivenUp(msgspec.Struct, frozen=True):
    """Hand-offs that nobody wants any more."""

    engine: str
    """Id of the engine that was to read them: any other, also a later one at the same address, knows nothing of it."""
    handoffs: list[Handoff]

    def is_for(self, engine: str) -> bool:
        """Whether it is meant for the engine with this id. vLLM adds the data-parallel rank to what an API server says
        of itself; where that has one engine only, its router does not know the rank."""
        return bool(self.engine) and re.fullmatch(rf"{re.escape(self.engine)}(_dp\d+)?", engine) is not None


NOTHING = GivenUp("", [])

_handoff = msgspec.json.Decoder(Handoff)


def handoff_in(params: bytes) -> Handoff | None:
    """The hand-off that transfer parameters (JSON) are of; None if they do not name it fully."""
    try:
        return _handoff.decode(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def give_up_params(engine: str, handoffs: Sequence[Handoff]) -> dict[str, Any]:
    """The `kv_transfer_params` that name them."""
    return {GIVE_UP_FIELD: GivenUp(engine, list(handoffs))}


def given_up(params: Mapping[str, Any] | None) -> GivenUp | None:
    """What a request gives up; None for any other request. `NOTHING` if it cannot be read."""
    told = (params or {}).get(GIVE_UP_FIELD)
    if told is None:
        return None
    try:
        found = msgspec.convert(told, GivenUp)
    except (msgspec.ValidationError, RecursionError):
        return NOTHING
    return found if len(found.handoffs) <= MAX_HANDOFFS else NOTHING
