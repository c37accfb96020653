"""The hand-offs of one engine, scheduler side: which blocks are kept for readers, and which may still be read here.

Around the scheduler half of vLLM's NIXL connector, which does the rest. What is said in the `kv_transfer_params` of
requests (`vllm_pd.holds`, `vllm_pd.given_up`, the leases) is read and written here, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd.connectors.farewells import Farewells
from vllm_pd.connectors.handoff_arrivals import HandoffArrivals
from vllm_pd.connectors.handoff_lease import DEFAULT_LEASE_S, MARGIN_S, HandoffLease, is_handoff
from vllm_pd.connectors.handoff_params import Wanted, problem
from vllm_pd.connectors.held_blocks import HeldBlocks
from vllm_pd.connectors.read_leases import ReadLease
from vllm_pd.given_up import GivenUp, Handoff, given_up
from vllm_pd.holds import hold_key, released_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")


class Handoffs:
    """Used by the scheduler's thread. `now` is the caller's monotonic clock and `wall` its wall clock, in seconds.

    Args:
        nixl: the scheduler half of vLLM's NIXL connector; None where nothing is handed over.
        lease_s: for how long a prefill worker keeps blocks (`kv_lease_duration`).
    """

    def __init__(self, nixl: Any | None, lease_s: float = DEFAULT_LEASE_S) -> None:
        self._nixl = nixl
        self._lease = HandoffLease(lease_s)
        self._held = HeldBlocks()
        self._arrivals = HandoffArrivals()
        self._farewells = Farewells()
        self._new_leases: list[ReadLease] = []

    def arrived(self, request: Request, wall: float, now: float) -> None:
        """A request is new to the scheduler, and its connectors have not heard of it."""
        params = request.kv_transfer_params
        if told := given_up(params):
            self._give_up(told, wall, now)
        elif keys := released_keys(params):
            self._held.release(keys, now)
        elif key := hold_key(params):
            self._held.arrived(request.request_id, key)
        if told or keys:
            # All that this request is for; it neither reads blocks nor leaves any.
            request.kv_transfer_params = params = None
        self._refuse_unusable(request)
        if self._lease.arrived(request.request_id, params, wall, now):
            self._compute_anew(request, "it came after the end of the prefill worker's lease")
        elif lease := self._lease.for_workers(request.request_id, params, wall, now):
            if self._arrivals.arrived(request.request_id, lease.blocks, now):
                self._compute_anew(request, "its router had given it up before it came")
            else:
                self._new_leases.append(lease)

    def asks(self, request: Request, now: float) -> None:
        """The request is about to ask for its blocks."""
        # Only as long as nobody asked for them: vLLM takes the mark off when it does.
        if is_handoff(request.kv_transfer_params) and self._lease.is_stale(request.request_id, now):
            self._compute_anew(request, "it waited for longer than the prefill worker's lease is known to hold")

    def heartbeat(self, now: float) -> None:
        """A step goes out with heartbeats for all that wait."""
        self._lease.heartbeat(now)

    def take_news(self) -> tuple[tuple[str, ...], tuple[ReadLease, ...]]:
        """For the workers, with the next step: finished requests whose blocks nobody will read, and leases that are
        new. Each is given once."""
        leases, self._new_leases = tuple(self._new_leases), []
        return self._held.take_leaving(), leases

    def sent(self, request_ids: Iterable[str]) -> None:
        """Nothing is kept for these any more."""
        self._held.gone(request_ids)

    def ended(self, request: Request, now: float) -> None:
        """A request ended, and its connectors have not heard of it."""
        self._farewells.finished(request.kv_transfer_params, now)
        self._arrivals.ended(request.request_id, now)

    def finished(
        self, request_id: str, keep_blocks: bool, params: dict[str, Any] | None, wall: float
    ) -> dict[str, Any] | None:
        """Its connectors have heard, and this is what they say of it. Returns what is said to whoever asked."""
        self._lease.forget(request_id)
        self._held.finished(request_id, keep_blocks)
        return self._lease.stamp(params, wall)

    def has_farewells(self, now: float) -> bool:
        """Whether an idle engine has to go on, see `Farewells`."""
        return self._farewells.are_due(now)

    def _give_up(self, told: GivenUp, wall: float, now: float) -> None:
        """Tell the prefill workers of those hand-offs that nothing here has read or will read."""
        if self._nixl is None or not told.is_for(self._nixl.engine_id):
            return
        for handoff in told.handoffs:
            left_s = handoff.pd_lease_until_ms / 1000 - wall
            blocks = handoff.remote_engine_id, handoff.remote_request_id
            if left_s > 0 and self._arrivals.give_up(blocks, now + left_s + MARGIN_S, now):
                _tell_unread(self._nixl, handoff)
                self._farewells.given_up(now)

    def _refuse_unusable(self, request: Request) -> None:
        """Take parameters off a request by which nothing can be read: vLLM would wait for blocks, or end."""
        nixl, params = self._nixl, request.kv_transfer_params
        if nixl is None or not params:
            return
        if params.get("do_remote_decode") and not nixl.is_bidirectional_kv_xfer_enabled:
            # A prefill leg that names blocks to read first, which only that option reads.
            params["remote_block_ids"] = None
        if not is_handoff(params):
            return
        prompt = request.prompt_token_ids
        # What the API server has refused comes without its prompt, only to let go of the blocks.
        knows = prompt is not None and not request.abort_immediately
        wanted = Wanted(
            nixl._get_remote_prefill_token_count(len(prompt)) if knows else None,
            len(nixl.kv_cache_config.transfer_groups),
            0 if nixl._is_hma_required else nixl.block_size,
        )
        if why := problem(params, wanted):
            self._compute_anew(request, f"its hand-off cannot be used ({why})")

    def _compute_anew(self, request: Request, reason: str) -> None:
        logger.warning("vllm-pd: the prompt of request %s is computed here: %s.", request.request_id, reason)
        request.kv_transfer_params["do_remote_prefill"] = False
        self._lease.forget(request.request_id)
        if self._nixl is not None:
            # Heartbeats would otherwise hold the blocks that nobody reads until this request ends.
            self._nixl._stop_heartbeat(request.request_id)


def _tell_unread(nixl: Any, handoff: Handoff) -> None:
    """As vLLM does for a request that ends before it is scheduled: a read of no blocks."""
    params = {**msgspec.structs.asdict(handoff), "remote_block_ids": []}
    unread = SimpleNamespace(kv_transfer_params=params)
    nixl._reqs_need_recv[f"given-up-{handoff.remote_request_id}"] = (unread, [], (), False)
