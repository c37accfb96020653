"""LMCache's multi-process connector as a child of `PDConnector`, in place of the tiers.

It is LMCache's own (0.5.6), with what it needs to stand beside hand-offs and to be exact:

- Keys: `lmcache_keys`. What a client says to LMCache by `kv_transfer_params` is not passed on.
- A server that dies or hangs is a miss. LMCache lets a timeout of a store end the engine, and its defaults wait for
  minutes.
- A load that failed is not tried a second time. LMCache knows that of its own loads; when the load was a hand-off, it
  would promise blocks that it then does not fetch, and the request would wait for ever.
- Its KV events are off: they name LMCache's hashes, which no router knows, and nobody would fetch them.
- It falls back to pickle over a socket when it has no shared memory. That is refused.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.lmcache_mp_metadata import (
    LMCacheMPRequestMetadata,
    LMCacheMPRequestState,
    LMCacheMPRequestTracker,
)
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter
from lmcache.v1.multiprocess.transfer_context.pickle import EngineDrivenContextPickle

from vllm_pd import lmcache_options
from vllm_pd.connectors import weight_watch
from vllm_pd.connectors.lmcache_keys import KeySpace, why_not
from vllm_pd.errors import SettingsError, UnsupportedLMCacheError
from vllm_pd.kv_offload.ssd_namespace import model_identity, namespace
from vllm_pd.vllm_compat import KVConnectorRole, RequestStatus, build_offloading_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(f"vllm.{__name__}")

_INTERNALS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        LMCacheMPConnector,
        ("_get_or_create_request_tracker", "register_kv_caches", "start_load_kv", "wait_for_save", "request_finished"),
    ),
    (LMCacheMPRequestState, ("PREFETCHING", "READY", "BYPASS_LMCACHE")),
    (LMCacheMPSchedulerAdapter, ("cleanup_lookup_result",)),
    (LMCacheMPWorkerAdapter, ("submit_retrieve_request", "create_recorded_event")),
)
_ADAPTER = ("error_block_ids", "_failed_request_ids", "_dropped_retrieves", "_health_event", "transfer_ctx")
_TRACKER = (
    "state", "cache_salt", "request_configs", "max_offload_tokens", "allocated_block_ids", "num_scheduled_tokens",
    "num_stored_tokens", "num_vllm_hit_tokens", "num_lmcache_hit_tokens",
)  # fmt: skip


class PDLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]
    """See the module.

    Raises:
        SettingsError: the model, the server or how it was started does not fit.
        UnsupportedLMCacheError: the installed LMCache is built otherwise than the one that this was written for.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_internals()
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise SettingsError(
                "--pd-offload lmcache was not tested with a model whose layers keep different KV (sliding windows, "
                "Mamba), and LMCache refuses it outside CUDA; use --pd-offload tiers, or "
                "--disable-hybrid-kv-cache-manager where the model works with it."
            )
        quiet = copy.copy(vllm_config)
        quiet.kv_events_config = None
        try:
            super().__init__(quiet, role, kv_cache_config)
        except ConnectionError as e:
            raise SettingsError(self._no_answer(quiet, "to the first question")) from e
        if role is KVConnectorRole.WORKER:
            adapter = self.worker_adapter
            _refuse_without(f"{type(adapter).__name__}.{name}" for name in _ADAPTER if not hasattr(adapter, name))
        else:
            identity = namespace(build_offloading_config(quiet, kv_cache_config), model_identity(vllm_config))
            self._keys = KeySpace(identity.digest.hex())
            weight_watch.install()
        self._said: set[str] = set()

    # Of the scheduler.

    def on_new_request(self, request: Request) -> None:
        if not self._stays_out(request):
            super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._stays_out(request):
            # LMCache wants to know of every request that is scheduled.
            self._get_or_create_request_tracker(request)
            return 0, False
        tracker = self.request_trackers.get(request.request_id)
        if tracker is not None and self._load_failed(request, tracker):
            _start_over(tracker)
            self.scheduler_adapter.cleanup_lookup_result(request.request_id)
            return 0, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # What a client asks LMCache about the request could end the engine when LMCache does not know it yet.
        silent = SimpleNamespace(request_id=request.request_id, kv_transfer_params=None)
        kept, _ = super().request_finished(silent, block_ids)
        return kept, None

    def _get_or_create_request_tracker(self, request: Request) -> LMCacheMPRequestTracker:
        known = self.request_trackers.get(request.request_id)
        tracker = super()._get_or_create_request_tracker(request)
        if tracker is not known:
            tracker.cache_salt = self._keys.salt(request.cache_salt)
            tracker.request_configs = None
            tracker.max_offload_tokens = 0 if why_not(request) else None
        return tracker

    def weights_changed(self, why: str) -> None:
        """See `weight_watch`. What is stored is not found any more, and nothing that is under way is stored."""
        self._keys = self._keys.renewed()
        for request_id, tracker in self.request_trackers.items():
            tracker.max_offload_tokens = 0
            if tracker.state is LMCacheMPRequestState.PREFETCHING:
                _start_over(tracker)
                self.scheduler_adapter.cleanup_lookup_result(request_id)
        logger.warning("vllm-pd: %s changes the model's weights: its blocks in LMCache are not used any more.", why)

    def _stays_out(self, request: Request) -> bool:
        reason = why_not(request)
        if reason and reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "vllm-pd: request %s and others like it are served without LMCache: %s.", request.request_id, reason
            )
        return bool(reason)

    @staticmethod
    def _load_failed(request: Request, tracker: LMCacheMPRequestTracker) -> bool:
        """Whether this request has got blocks before, from whomever, and is back at its beginning without them."""
        return (
            tracker.state is LMCacheMPRequestState.READY
            and request.num_computed_tokens == 0
            and request.status is not RequestStatus.PREEMPTED
        )

    # Of the workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            super().register_kv_caches(kv_caches)
        except ConnectionError as e:
            raise SettingsError(self._no_answer(self._vllm_config, "when it was given the KV cache")) from e
        if self._would_pickle():
            raise SettingsError(
                "The LMCache server offers no shared memory, and without it blocks would go through pickle, which runs "
                f"whatever the other side sends; start it with {lmcache_options.SERVER!r} on this host."
            )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        loads = [meta for meta in self._get_connector_metadata().requests if meta.direction == "RETRIEVE"]
        if not loads:
            return
        try:
            event = self.worker_adapter.create_recorded_event()
        except Exception as e:
            self._server_failed("load", e)
            event = None
        for meta in loads:
            try:
                self._check_transport()
                self._load(meta, event)
            except Exception as e:
                self._server_failed("load", e)
                self._report_failed(meta)

    def _load(self, meta: LMCacheMPRequestMetadata, event: Any) -> None:
        self.worker_adapter.submit_retrieve_request(
            meta.request_id, meta.op, event, cache_salt=meta.cache_salt, request_configs=meta.request_configs
        )

    def _report_failed(self, meta: LMCacheMPRequestMetadata) -> None:
        """As LMCache's adapter does with a load that it is asked for while the server is dead."""
        adapter = self.worker_adapter
        adapter.error_block_ids.update(meta.op.flat_block_ids)
        adapter._failed_request_ids.add(meta.request_id)
        adapter._dropped_retrieves.add(meta.request_id)

    def wait_for_save(self) -> None:
        try:
            self._check_transport()
            super().wait_for_save()
        except Exception as e:
            self._server_failed("store", e)

    def _server_failed(self, what: str, error: Exception) -> None:
        """From now on LMCache's adapter takes the server for dead, until a heartbeat of it comes back."""
        if self.worker_adapter.is_healthy:
            logger.warning(
                "vllm-pd: the LMCache server failed to %s blocks (%s: %s); prompts are computed until it is back.",
                what,
                type(error).__name__,
                error,
            )
        self.worker_adapter._health_event.clear()

    def _check_transport(self) -> None:
        """A server that was started anew may offer less than the one before."""
        if self._would_pickle():
            raise RuntimeError("it offers no shared memory any more, and pickle is refused")

    def _would_pickle(self) -> bool:
        context = getattr(self.worker_adapter.transfer_ctx, "_engine_driven_context", None)
        return isinstance(context, EngineDrivenContextPickle)

    @staticmethod
    def _no_answer(vllm_config: VllmConfig, when: str) -> str:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        host, port = (options[lmcache_options.PREFIX + name] for name in ("host", "port"))
        return (
            f"The LMCache server at {host}:{port} did not answer {when} within "
            f"{options[lmcache_options.PREFIX + 'mq_timeout']:g} s; start it with {lmcache_options.SERVER!r} "
            "(outside CUDA it answers only with --supported-transfer-mode auto)."
        )


def _start_over(tracker: LMCacheMPRequestTracker) -> None:
    """The request gets other blocks now and computes its whole prompt: LMCache does this after its own failed loads."""
    tracker.allocated_block_ids.clear()
    tracker.num_scheduled_tokens = tracker.num_stored_tokens = 0
    tracker.num_vllm_hit_tokens = tracker.num_lmcache_hit_tokens = 0
    tracker.state = LMCacheMPRequestState.BYPASS_LMCACHE


def check_internals() -> None:
    """Whether what this uses of LMCache is there: without it keys would not hold requests apart.

    Raises:
        UnsupportedLMCacheError: something is missing.
    """
    missing = [f"{owner.__name__}.{name}" for owner, names in _INTERNALS for name in names if not hasattr(owner, name)]
    fields = getattr(LMCacheMPRequestTracker, "__dataclass_fields__", {})
    missing += [f"{LMCacheMPRequestTracker.__name__}.{name}" for name in _TRACKER if name not in fields]
    _refuse_without(missing)


def _refuse_without(names: Iterable[str]) -> None:
    if missing := ", ".join(names):
        raise UnsupportedLMCacheError(
            f"LMCache {lmcache_options.version()} has no {missing}, which --pd-offload lmcache needs; "
            f"install lmcache=={lmcache_options.TESTED}."
        )
