"""What the SSD tier must know and vLLM does not tell it: adapters' versions, and that weights have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd.kv_offload.adapter_versions import AdapterVersions
from vllm_pd.kv_offload.ssd_tier import SegmentTier

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SsdLink:
    """Used by the scheduler's thread. Does nothing without an SSD tier.

    Args:
        manager: of the tiers.
    """

    def __init__(self, manager: Any) -> None:
        tiers = getattr(manager, "secondary_tiers", ())
        self._tier = next((tier for tier in tiers if isinstance(tier, SegmentTier)), None)
        self._versions = AdapterVersions()

    def arrived(self, request: Request) -> None:
        """A request, before vLLM's tiers hear of it."""
        if self._tier is not None and request.lora_request is not None:
            self._tier.has_adapter(request.request_id, self._versions.of(request.lora_request))

    def weights_changed(self, why: str) -> bool:
        """The model computes other KV from now on. Returns whether blocks that were told of are gone."""
        return self._tier is not None and self._tier.weights_changed(why)

    def caches_were_reset(self) -> None:
        """Neither the device nor host memory has a block any more."""
        if self._tier is not None:
            self._tier.caches_were_reset()
