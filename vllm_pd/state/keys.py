"""Every key name in Redis, in one place.

All keys of a pool share the hash tag `{pd:<namespace>:<pool>}` and therefore one slot of a cluster, so a script may
touch several of them. The directory of pools has a slot of its own and is never in a script with another key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_pd.errors import SettingsError
from vllm_pd.state.base import Epoch, PoolId, WorkerId
from vllm_pd.state.block_index import Holder

NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_namespace(namespace: str) -> str:
    """Return `namespace` if it may be part of a key.

    Raises:
        SettingsError: it is empty, too long, or has a character that could end a hash tag or a key part.
    """
    if not NAMESPACE.fullmatch(namespace):
        raise SettingsError(
            f"The namespace must be 1 to 64 letters, digits, '_', '.' or '-', got {namespace!r}; change --pd-namespace."
        )
    return namespace


def cache_name(holder: Holder, epoch: Epoch) -> str:
    """A cache of one worker start, as part of a key."""
    return f"{holder.worker}:{holder.rank}:{epoch}"


def parse_cache_name(name: bytes) -> tuple[Holder, Epoch]:
    """Raises ValueError when `name` is none."""
    worker, rank, epoch = name.decode().rsplit(":", 2)
    return Holder(WorkerId(worker), int(rank)), Epoch(int(epoch))


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one namespace."""

    namespace: str

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @property
    def pools(self) -> str:
        """ZSET: pool -> when its last lease ends, ms of the store's clock."""
        return f"{{pd:{self.namespace}}}:pools"

    @property
    def planned(self) -> str:
        """ZSET: pool that has a journal of plans -> when that ends, ms of the store's clock."""
        return f"{{pd:{self.namespace}}}:planned"

    def workers(self, pool: PoolId) -> str:
        """ZSET: worker id -> when its lease ends, ms of the store's clock."""
        return f"{self._tag(pool)}:workers"

    def worker(self, pool: PoolId, worker: WorkerId) -> str:
        """HASH with the lease as time to live: `epoch` (digits) and `record` (JSON of `WorkerRecord`)."""
        return f"{self._tag(pool)}:worker:{worker}"

    def load(self, pool: PoolId, worker: WorkerId) -> str:
        """HASH with a time to live: rank of the API server process -> `<end ms>:<msgpack {engine: WorkerLoad}>`."""
        return f"{self._tag(pool)}:load:{worker}"

    def inflight(self, pool: PoolId) -> str:
        """HASH with a time to live: router id -> `<end ms>:<msgpack {worker: [prefill tokens, requests]}>`."""
        return f"{self._tag(pool)}:inflight"

    def roles(self, pool: PoolId) -> str:
        """HASH with a time to live: worker id -> `<end ms>:<epoch>:<wanted role>:<timeout ms>:<who>:<id>`."""
        return f"{self._tag(pool)}:roles"

    def prefill(self, pool: PoolId, worker: WorkerId | None) -> str:
        """STREAM with a time to live and a consumer group: prefill jobs, for one worker or (None) for any."""
        return f"{self._tag(pool)}:prefill" + (f":{worker}" if worker is not None else "")

    def job(self, pool: PoolId, job: str) -> str:
        """HASH with a time to live: a prefill job, and in which entry of which stream it is. '' gives the prefix."""
        return f"{self._tag(pool)}:job:{job}"

    def done(self, pool: PoolId, job: str) -> str:
        """STRING with a time to live: a job of this id has ended, and how. '' gives the prefix."""
        return f"{self._tag(pool)}:done:{job}"

    def dead_jobs(self, pool: PoolId) -> str:
        """STREAM with a time to live and a bounded length: jobs that were given up."""
        return f"{self._tag(pool)}:dead"

    def results(self, pool: PoolId, router: str) -> str:
        """STREAM with a time to live and a bounded length: results a router has not seen. '' gives the prefix."""
        return f"{self._tag(pool)}:results:{router}"

    def router(self, pool: PoolId, router: str) -> str:
        """STRING with a time to live: the router lives. '' gives the prefix."""
        return f"{self._tag(pool)}:router:{router}"

    def owners(self, pool: PoolId) -> str:
        """SET with a time to live: ids of workers that may have a stream of prefill jobs, or claims."""
        return f"{self._tag(pool)}:owners"

    def claims(self, pool: PoolId, worker: str) -> str:
        """HASH with a time to live: job -> epoch of the worker that has it. '' gives the prefix."""
        return f"{self._tag(pool)}:claims:{worker}"

    def cancelled(self, pool: PoolId, claimant: str) -> str:
        """STREAM with a time to live and a bounded length: jobs cancelled in its hands. '' gives the prefix."""
        return f"{self._tag(pool)}:cancelled:{claimant}"

    def caches(self, pool: PoolId) -> str:
        """ZSET: name of a cache (`cache_name`) -> when it ends, ms of the store's clock."""
        return f"{self._tag(pool)}:caches"

    def cache(self, pool: PoolId, name: str) -> str:
        """HASH with a time to live: generation `gen`, newest change `seq`, number of `slabs`, `digests` (msgpack)."""
        return f"{self._tag(pool)}:cache:{name}"

    def slab(self, pool: PoolId, name: str, generation: int, number: int) -> str:
        """STRING with a time to live: blocks of a cache and their tiers (`block_codec`)."""
        return f"{self._tag(pool)}:blocks:{name}:{generation}:{number}"

    def events(self, pool: PoolId) -> str:
        """STREAM with a time to live and a bounded length: field `c` of an entry is a change (`block_codec`)."""
        return f"{self._tag(pool)}:events"

    def tokenizer(self, pool: PoolId, sha: str) -> str:
        """STRING with a time to live: msgpack of `TokenizerFiles` whose hex SHA-256 is `sha`."""
        return f"{self._tag(pool)}:tokenizer:{sha}"

    def demand(self, pool: PoolId) -> str:
        """HASH with a time to live: router id -> `<end ms>:<msgpack DemandReport>`."""
        return f"{self._tag(pool)}:demand"

    def planner(self, pool: PoolId) -> str:
        """HASH with a time to live: which planner leads, in which term, until when."""
        return f"{self._tag(pool)}:planner"

    def plan_memory(self, pool: PoolId) -> str:
        """HASH with a time to live: `memory` of the leading planner, and its newest step (`newest`)."""
        return f"{self._tag(pool)}:plan_memory"

    def plans(self, pool: PoolId) -> str:
        """STREAM with a time to live and a bounded length: field `s` of an entry is a step that is worth keeping."""
        return f"{self._tag(pool)}:plans"

    def _tag(self, pool: PoolId) -> str:
        return f"{{pd:{self.namespace}:{pool}}}"
