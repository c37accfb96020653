"""`PDConnector`: vLLM's NIXL connector and vLLM's offloading connector as one, configured by vllm-pd's settings.

Real models need what those two already have (hybrid KV groups, tensor-parallel layouts, MLA), so they are composed as
vLLM's own MultiConnector composes connectors, not rewritten. Order: a request that carries hand-off parameters loads
from the prefill worker, any other from the tiers; a finished block is offered to both.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from vllm_pd import settings as s
from vllm_pd import side_channel, transfer_config
from vllm_pd.connectors import event_flush, load_room, reused_blocks, weight_watch
from vllm_pd.connectors.cpu_cures import calm_nixl, calm_queues
from vllm_pd.connectors.handoff_lease import DEFAULT_LEASE_S, is_handoff
from vllm_pd.connectors.handoffs import Handoffs
from vllm_pd.connectors.offload_gate import OffloadGate
from vllm_pd.connectors.pd_metadata import PDMetadata
from vllm_pd.connectors.read_leases import Blocks, ReadLeases
from vllm_pd.connectors.send_leases import SendLeases
from vllm_pd.connectors.ssd_link import SsdLink
from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.ssd_namespace import model_identity
from vllm_pd.tier_choices import LoadGate
from vllm_pd.vllm_compat import (
    KVConnectorRole,
    KVTransferConfig,
    MultiConnector,
    MultiKVConnectorStats,
    OffloadingSpecFactory,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

SPECS = ("PDOffloadingSpec", "PDTieringOffloadingSpec")


class PDConnector(MultiConnector):
    """The connector behind `--kv-connector pd`.

    Raises:
        SettingsError: the settings do not fit together, NIXL is missing for a role that needs it, or prefix caching
            is off.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        if vllm_config.cache_config.enable_prefix_caching is False:
            raise SettingsError(
                "The pd connector shares KV blocks by their prefix hash, and prefix caching is off for this model; "
                "turn it on with --enable-prefix-caching or serve without --kv-connector pd."
            )
        expanded = copy.copy(vllm_config)
        expanded.kv_transfer_config = expand(vllm_config.kv_transfer_config, model_identity(vllm_config))
        nixl = _index_of(transfer_config.NIXL, expanded.kv_transfer_config)
        if role is KVConnectorRole.SCHEDULER and side_channel.PORT_ENV not in os.environ:
            # Started from Python, without `vllm serve`: nobody has chosen a side channel yet.
            rank = vllm_config.parallel_config.data_parallel_index
            side_channel.ensure((), first_rank=rank)
        calm_queues()
        with calm_nixl() if nixl is not None else nullcontext():
            super().__init__(expanded, role, kv_cache_config)
        self._nixl = nixl
        # Of the scheduler half.
        self._handoffs = Handoffs(
            self.sub_connectors[nixl].connector_scheduler if nixl is not None else None,
            _lease_duration(expanded.kv_transfer_config),
        )
        self._kept: set[str] = set()
        """Requests that have finished and whose blocks stay until they are said to be sent, or stored."""
        self._tiers = _index_of(transfer_config.OFFLOADING, expanded.kv_transfer_config)
        self._gate: OffloadGate | None = None
        self._ssd: SsdLink | None = None
        if role is KVConnectorRole.SCHEDULER:
            load_room.install()
        if self._tiers is not None and role is KVConnectorRole.SCHEDULER:
            tiers = self.sub_connectors[self._tiers].connector_scheduler
            self._gate = OffloadGate(
                tiers,
                LoadGate(_options(expanded.kv_transfer_config, self._tiers).get("load_gate", LoadGate.AUTO)),
                vllm_config.scheduler_config.max_num_batched_tokens,
            )
            self._ssd = SsdLink(tiers.manager)
            weight_watch.install()
        # Of the worker half.
        self._reads = ReadLeases()
        self._sends: SendLeases | None = None
        if nixl is not None and role is KVConnectorRole.WORKER:
            self._sends = SendLeases(self.sub_connectors[nixl].connector_worker)
        events = vllm_config.kv_events_config
        if role is KVConnectorRole.SCHEDULER and events is not None and events.enable_kv_cache_events:
            event_flush.install()

    def on_new_request(self, request: Request) -> None:
        # The index counts the copies of a block by its events; a request may ask for events without a new copy.
        request.kv_cache_report_mode = "incremental"
        self._handoffs.arrived(request, time.time(), time.monotonic())
        if self._ssd is not None:
            self._ssd.arrived(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._handoffs.asks(request, time.monotonic())
        if self._gate is not None and not self._gate.before_lookup(
            request, num_computed_tokens, handed_over=is_handoff(request.kv_transfer_params)
        ):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if self._gate is not None and self._gate.ask_again(request, matched[0], time.monotonic()):
            matched = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._tiers is not None and num_external_tokens:
            reused_blocks.read_into(self.sub_connectors[self._tiers].connector_scheduler, blocks)
        if self._gate is not None:
            self._gate.allocated(request, time.monotonic())

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        if self._gate is not None:
            self._gate.scheduled(scheduler_output, time.monotonic())
        if self._nixl is None:
            return meta
        if meta.metadata[self._nixl].heartbeat_by_engine:
            self._handoffs.heartbeat(time.monotonic())
        return PDMetadata(meta.metadata, meta.extra_async_saves, *self._handoffs.take_news())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._handoffs.sent(connector_output.finished_sending or ())
        meta = connector_output.kv_connector_worker_meta
        if self._gate is not None and meta is not None and (tiers := meta.metadata[self._tiers]) is not None:
            self._gate.transferred(tiers)
        super().update_connector_output(connector_output)
        if sent := connector_output.finished_sending:
            # vLLM frees the blocks of each and ends the engine over one that it does not know: LMCache's connector
            # may tell of the same request twice when its server dies.
            connector_output.finished_sending = sent & self._kept
            self._kept -= sent
        # Of a request that has ended since, this frees the blocks.
        self._kept -= connector_output.finished_recving or set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = super().get_kv_connector_stats()
        if self._gate is None:
            return stats
        # The scheduler takes these in after each step, and after the step's transfers.
        now = time.monotonic()
        self._gate.step_ended(now)
        if (counted := self._gate.take_stats(now)) is not None:
            stats = MultiKVConnectorStats() if stats is None else stats
            before = stats.data.get(transfer_config.OFFLOADING)
            stats.data[transfer_config.OFFLOADING] = counted if before is None else before.aggregate(counted)
        return stats

    def weights_changed(self, why: str) -> bool:
        """See `weight_watch`. Returns whether the SSD tier no longer has blocks that it told of."""
        for child in self.sub_connectors:
            if (tell := getattr(child, "weights_changed", None)) is not None:
                tell(why)
        return self._ssd is not None and self._ssd.weights_changed(why)

    def caches_were_reset(self) -> None:
        """See `weight_watch`."""
        if self._ssd is not None:
            self._ssd.caches_were_reset()

    def reset_cache(self) -> bool:
        with self._gate.resetting() if self._gate is not None else nullcontext():
            return bool(super().reset_cache())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._nixl is None or self._sends is None:
            super().start_load_kv(forward_context, **kwargs)
            return
        meta = self._get_connector_metadata()
        nixl: NixlConnectorMetadata = meta.metadata[self._nixl]
        now = time.monotonic()
        self._reads.learn(meta.new_leases, time.time(), now)
        # Before they are sent: an extension counts from then.
        self._reads.beat(self._heartbeats(nixl), now)
        for request_id, read in nixl.reqs_to_recv.items():
            if read.remote is not None and (read.awaiting_kvs or any(read.local_block_ids)):
                self._reads.begin(request_id, (read.remote.engine_id, read.remote.request_id))
        super().start_load_kv(forward_context, **kwargs)
        self._sends.let_go(meta.released)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._sends is not None:
            self._sends.give_grace(time.perf_counter())
        results: KVConnectorTransferResults = super().get_transfer_results(finished_req_ids)
        late = self._reads.late(results.finished_recving, time.monotonic()) - results.failed_recving
        for request_id in late:
            logger.warning(
                "vllm-pd: the prompt of request %s is computed here: its blocks may have been read after the end of "
                "the prefill worker's lease.",
                request_id,
            )
        results.failed_recving |= late
        return results

    def _heartbeats(self, meta: NixlConnectorMetadata) -> Iterator[Blocks]:
        """The blocks for which this step really sends heartbeats: vLLM skips engines it does not know yet."""
        worker = self.sub_connectors[self._nixl].connector_worker
        for engine_id, info in meta.heartbeat_by_engine.items():
            if engine_id in worker._remote_agents:
                yield from ((engine_id, request_id) for request_id in info.req_ids)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request)
        return self._stamped(request, *super().request_finished(request, blocks))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._ended(request)
        return self._stamped(request, *super().request_finished_all_groups(request, block_ids))

    def has_pending_push_work(self) -> bool:
        return self._handoffs.has_farewells(time.monotonic()) or bool(super().has_pending_push_work())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Only NIXL makes this metadata; the tiers' connector refuses any of a second pipeline stage."""
        if self._nixl is not None:
            self.sub_connectors[self._nixl].set_xfer_handshake_metadata_pp_aware(metadata)

    def _ended(self, request: Request) -> None:
        """Before its children have seen the end of the request."""
        self._handoffs.ended(request, time.monotonic())
        if self._gate is not None:
            self._gate.finished(request.request_id)

    def _stamped(
        self, request: Request, keep_blocks: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        if keep_blocks:
            self._kept.add(request.request_id)
        return keep_blocks, self._handoffs.finished(request.request_id, keep_blocks, params, time.time())

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: VllmConfig) -> Any:
        expanded = copy.copy(vllm_config)
        expanded.kv_transfer_config = expand(vllm_config.kv_transfer_config)
        register_specs()
        return super()._get_connector_classes_and_configs(expanded)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        return bool(super().requires_piecewise_for_cudagraph({"connectors": _children(extra_config, None)}))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Asked by vLLM 0.33 and later: sleep mode works when it does for every child."""
        inherited = getattr(super(), "supports_sleep_mode", None)
        return inherited is not None and bool(inherited(expand(kv_transfer_config)))


def expand(config: KVTransferConfig, identity: str = "") -> KVTransferConfig:
    """The same configuration in MultiConnector's form: `connectors` lists the children. Idempotent.

    Args:
        identity: digest of what changes KV bytes, see `ssd_namespace.model_identity`; separates the SSD tier's folders.
    """
    if "connectors" in config.kv_connector_extra_config:
        return config
    children = _children(config.kv_connector_extra_config, config.kv_role)
    for child in children:
        options = child["kv_connector_extra_config"]
        if ssd := options.get("ssd"):
            options["ssd"] = {**ssd, "identity": identity}
    expanded = copy.copy(config)
    expanded.kv_connector_extra_config = {"connectors": children}
    return expanded


def register_specs() -> None:
    """Register the offloading specs with vLLM. Idempotent."""
    for name in SPECS:
        if name not in OffloadingSpecFactory._registry:
            OffloadingSpecFactory.register_spec(name, "vllm_pd.kv_offload.spec", name)


def _children(extra: Mapping[str, Any], kv_role: str | None) -> list[dict[str, Any]]:
    if "connectors" in extra:
        return list(extra["connectors"])
    settings = s.from_extra_config(extra, kv_role=kv_role)
    return transfer_config.child_configs(settings, nixl=transfer_config.check_nixl(settings))


def _index_of(name: str, config: KVTransferConfig) -> int | None:
    """Which child is the connector of that name; None without one."""
    names = [child["kv_connector"] for child in config.kv_connector_extra_config["connectors"]]
    return names.index(name) if name in names else None


def _options(config: KVTransferConfig, child: int) -> Mapping[str, Any]:
    options: Mapping[str, Any] = config.kv_connector_extra_config["connectors"][child]["kv_connector_extra_config"]
    return options


def _lease_duration(config: KVTransferConfig) -> float:
    index = _index_of(transfer_config.NIXL, config)
    if index is None:
        return DEFAULT_LEASE_S
    return float(_options(config, index).get("kv_lease_duration", DEFAULT_LEASE_S))
