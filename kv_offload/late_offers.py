"""Blocks that turn out to be worth a write only after they were offered.

vLLM offers a block to the SSD once, when it comes to host memory. One that was left out then, because nobody had asked
for it before, is not offered again while it stays there; and without a copy on the SSD it is gone with the next
restart. So when a later request has had it, the tier fetches it from host memory itself, by the way that vLLM has for
tiers which serve others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

from vllm_pd.vllm_compat import LookupResult, ReqContext, TierTransferJob

_MOST_WAITING = 8192
"""Blocks; what comes beyond is left out and will be noticed again."""
_PER_STEP = 256


class LateOffers:
    """Waiting blocks by vLLM's key. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, bytes] = {}
        self._requests = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, keys: Iterable[bytes], adapter: bytes) -> None:
        """These are wanted; `adapter` goes with them."""
        for key in keys:
            if len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting[key] = adapter

    def clear(self) -> None:
        self._waiting.clear()

    def submit(self, parent: Any, submit: Callable[[TierTransferJob, bytes], None]) -> None:
        """Begin to store some of those that are in host memory; those that are not are forgotten.

        Args:
            parent: vLLM's `ParentManager`, valid during this call.
            submit: gets a job whose blocks are held in host memory until it has ended, and the adapter.
        """
        if not self._waiting:
            return
        batch = dict(islice(self._waiting.items(), _PER_STEP))
        for key in batch:
            del self._waiting[key]
        for adapter in set(batch.values()):
            self._submit(parent, [key for key, its in batch.items() if its == adapter], adapter, submit)

    def _submit(
        self, parent: Any, keys: Collection[bytes], adapter: bytes, submit: Callable[[TierTransferJob, bytes], None]
    ) -> None:
        self._requests += 1
        context = ReqContext(req_id=f"vllm-pd-late-offer-{self._requests}")
        parent.on_new_request(context)
        ready = [key for key in keys if parent.lookup(key, context) is LookupResult.HIT]
        if ready:
            submit(parent.create_store_job(ready, context), adapter)
        parent.on_request_finished(context)
