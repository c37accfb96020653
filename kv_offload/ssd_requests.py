"""What the SSD tier remembers of a request, so that asking, loading and failing come to an end.

A block that failed for a request stays a miss for that request, and none is loaded for it more than twice: a tier above
that is smaller than the prompt drops blocks as fast as they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_pd.vllm_compat import ReqContext

_LOADS_PER_BLOCK = 2


@dataclass(slots=True)
class Request:
    """Lies in its `ReqContext`.

    Attributes:
        adapter: added to its keys, see `SegmentTier.has_adapter`.
        failed: blocks whose load failed.
        loads: how often each block was loaded.
        stored: blocks that were put.
        first_too: none of its blocks was left out for being new.
    """

    adapter: bytes = b""
    failed: set[bytes] = field(default_factory=set)
    loads: dict[bytes, int] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    first_too: bool = True

    def may_load(self, key: bytes, slots: int) -> bool:
        """Whether a load of this block would be tried; `slots` is how many blocks host memory holds."""
        loads = self.loads.get(key, 0)
        return key not in self.failed and loads < _LOADS_PER_BLOCK and (loads > 0 or len(self.loads) < slots)


def request_of(context: ReqContext) -> Request:
    """A context that the tier has not seen gets a new one."""
    request: Request | None = context.get_state(Request)
    if request is None:
        request = Request()
        context.set_state(request)
    return request
