"""Whether the router is worth sending requests to: a worker that decodes is known, after a start also the index."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_pd.router.directory import Directory
from vllm_pd.router.index_watch import IndexWatch

GRACE_S = 30.0
"""After so long without the index, placing requests by load alone is better than not at all."""
STORE_GRACE_S = 3.0
"""The same while the store does not answer: nobody knows when it will."""

_log = logging.getLogger(__name__)


class Readiness:
    """Says what is missing. Index and tokenizers are waited for once: a pool that joins later never takes a router out
    of service.

    Args:
        index: None where the router does not wait for one.
        loading: whether tokenizers are being loaded.
        clock: monotonic seconds.
        require_prefill: whether to wait for a worker that prefills for others, and whenever there is none.
    """

    def __init__(
        self,
        directory: Directory,
        index: IndexWatch | None,
        loading: Callable[[], bool],
        clock: Callable[[], float],
        *,
        require_prefill: bool = False,
    ) -> None:
        self._require_prefill = require_prefill
        self._directory = directory
        self._index = index
        self._loading = loading
        self._clock = clock
        self._since: float | None = None

    def missing(self) -> str:
        """Why not to send requests now, in one sentence; "" when they are welcome."""
        return self._directory.missing() or self._prefill_missing() or self._index_missing()

    def _prefill_missing(self) -> str:
        if not self._require_prefill or any(worker.can_hand_over for worker in self._directory.workers):
            return ""
        return (
            "No worker prefills for others, and the router runs with --require-prefill; start one with --role prefill "
            "or --role both, with NIXL on."
        )

    def _index_missing(self) -> str:
        if self._index is None:
            return ""
        mirrors = self._index.mirrors
        if not mirrors:
            store = self._directory.store
            if store.up or store.problem or not store.configured:
                # Whatever joins from now on joins later: static workers serve already.
                self._index = None
            return ""
        loading = [mirror for mirror in mirrors if not mirror.loaded]
        if not loading and not self._loading():
            self._index = None
            return ""
        now = self._clock()
        if self._since is None:
            self._since = now
        problem = next((mirror.problem for mirror in loading if mirror.problem), "")
        if now - self._since >= (STORE_GRACE_S if problem else GRACE_S):
            _log.warning("ready without the block index, by load alone: %s", problem or "loading it takes too long")
            self._index = None
            return ""
        cause = f" ({problem.rstrip('.')})" if problem else ""
        what = "block index is" if loading else "tokenizers are"
        return f"The {what} being loaded{cause}; start the router with --serve-before-index not to wait."
