"""Keeps the prefix index of every pool equal to the block index in the store.

One task per pool. It notes where the stream ends, reads what each live cache holds, and then applies the stream from
the noted place on; a change that is older than what was read is skipped, so the two always meet. A cache whose
numbers have a gap is read again, alone. While the store is away the last index stays in use: it ages, which a metric
shows, and is read again afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vllm_pd.background import end_tasks
from vllm_pd.block_hash import KEY_BYTES, BlockKey
from vllm_pd.errors import StoreError
from vllm_pd.router.directory import Directory
from vllm_pd.router.worker import Source
from vllm_pd.routing.prefix_index import PrefixIndex
from vllm_pd.state.base import Epoch, PoolId
from vllm_pd.state.block_index import START, BlockIndex, Holder, Packed, Position, StreamEntry

READ_WAIT_MS = 500
READ_LIMIT = 256
RETRY_S = 0.5
READ_DEADLINE_S = 5.0
SNAPSHOT_DEADLINE_S = 60.0
"""For one cache: a large one is tens of megabytes, and the store may be busy with many routers that start at once."""
PARALLEL_SNAPSHOTS = 4
SLICE_BLOCKS = 1024
SLICE_S = 0.001
"""Work on the index yields to requests after about this long."""

_UNREAD = -1
"""Sequence number of a cache whose history the store does not know: only a fresh start of it can be applied."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MirrorCounts:
    """What a mirror did since it began."""

    changes: int = 0
    """Changes applied."""
    blocks: int = 0
    """Blocks stated by them and by snapshots."""
    snapshots: int = 0
    gaps: int = 0
    """Caches read again because changes were missing."""


@dataclass(slots=True)
class _Cache:
    listed: Epoch
    """What the directory said last."""
    epoch: Epoch
    """The process whose blocks are known."""
    newest: Epoch
    """Of all that were ever seen. Up to it, the stream's word on who has the worker's place is old."""
    seq: int = 0
    """The newest change that is applied."""


@dataclass(slots=True)
class _Pace:
    """Lets other tasks run when the work has taken long enough since they last could."""

    clock: Callable[[], float]
    began: float = 0.0

    def begin(self) -> None:
        """Other tasks have just run."""
        self.began = self.clock()

    async def breathe(self) -> None:
        if self.clock() - self.began >= SLICE_S:
            await asyncio.sleep(0)
            self.began = self.clock()


class PoolMirror:
    """The index of one pool and the task that keeps it up to date.

    Args:
        wanted: the pool's live caches, with the epoch of each.
        generation: changes whenever `wanted` may give another answer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: PoolId,
        store: BlockIndex,
        wanted: Callable[[], Mapping[Holder, Epoch]],
        generation: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.prefixes = PrefixIndex()
        self.loaded = False
        """Whether it has once been complete."""
        self.counts = MirrorCounts()
        self.fresh_at = 0.0
        """When it was last known to be as new as the store, by `clock`; 0.0 for never."""
        self.problem = ""
        """Why the store could not be read the last time, or ""."""
        self._store = store
        self._wanted = wanted
        self._generation = generation
        self._seen_generation = -1
        self._clock = clock
        self._pace = _Pace(clock)
        self._position: Position = START
        self._caches: dict[Holder, _Cache] = {}
        self._unread: set[Holder] = set()

    def age(self) -> float:
        """Seconds since the mirror was as new as the store; 0.0 while it has never been."""
        return self._clock() - self.fresh_at if self.fresh_at else 0.0

    def seq(self, holder: Holder) -> int:
        """Number of the newest change of a cache that is applied; 0 when there is none or the cache is unknown."""
        cache = self._caches.get(holder)
        return max(0, cache.seq) if cache is not None else 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._load()
                while True:
                    await self._follow()
            except (StoreError, OSError, TimeoutError) as e:
                problem = str(e) or "the store did not answer in time"
                if not self.problem:
                    _log.warning(
                        "the block index of pool %s is not followed, the last one stays: %s", self.pool, problem
                    )
                self.problem = problem
            except Exception:
                # A mistake in here must not freeze the index for ever.
                _log.exception("the block index of pool %s is read again", self.pool)
                self.problem = "an unexpected error, see the log"
            await asyncio.sleep(RETRY_S)

    async def _load(self) -> None:
        """Become as new as the store, whatever was missed."""
        async with asyncio.timeout(READ_DEADLINE_S):
            # Before the snapshots: what is written while they are taken is read from the stream.
            self._position = await self._store.tail(self.pool)
        await self._reconcile()
        self._unread.update(self._caches)
        await self._read_unread()
        self._note_fresh()
        if not self.loaded:
            self.loaded = True
            _log.info("the block index of pool %s is loaded: %d blocks", self.pool, len(self.prefixes))

    async def _follow(self) -> None:
        """One read of the stream, and what follows from it."""
        if self._seen_generation != self._generation():
            await self._reconcile()
            await self._read_unread()
        async with asyncio.timeout(READ_DEADLINE_S + READ_WAIT_MS / 1000):
            entries = await self._store.read(self.pool, self._position, wait_ms=READ_WAIT_MS, limit=READ_LIMIT)
        self._pace.begin()
        await self._apply(entries)
        await self._read_unread()
        if len(entries) < READ_LIMIT:
            self._note_fresh()

    def _note_fresh(self) -> None:
        self.fresh_at = self._clock()
        if self.problem:
            self.problem = ""
            _log.info("the block index of pool %s is followed again", self.pool)

    async def _reconcile(self) -> None:
        """Know exactly the live caches. A new epoch in the directory or in the stream counts, whichever is first.

        Epochs may go back: when a newer process crashes and an older one takes its place back. Only the directory says
        so; the stream may still hold the newer one's last words.
        """
        self._seen_generation = self._generation()
        wanted = self._wanted()
        for holder in self._caches.keys() - wanted.keys():
            del self._caches[holder]
            self._unread.discard(holder)
            await self._empty(holder)
            self.prefixes.remove(holder)
        for holder, epoch in wanted.items():
            cache = self._caches.get(holder)
            if cache is None:
                self._caches[holder] = _Cache(epoch, epoch, epoch)
                self.prefixes.add(holder)
                self._unread.add(holder)
            elif epoch != cache.listed:
                cache.listed = epoch
                if epoch != cache.epoch:
                    await self._restart(holder, cache, epoch)
                    self._unread.add(holder)

    async def _restart(self, holder: Holder, cache: _Cache, epoch: Epoch) -> None:
        """Another process: nothing of what the old one held is left."""
        cache.epoch, cache.newest, cache.seq = epoch, max(epoch, cache.newest), 0
        self._unread.discard(holder)
        await self._empty(holder)

    async def _empty(self, holder: Holder) -> None:
        while not self.prefixes.drain(holder, SLICE_BLOCKS):
            await self._pace.breathe()

    async def _read_unread(self) -> None:
        while self._unread:
            some = sorted(self._unread)[:PARALLEL_SNAPSHOTS]
            async with asyncio.timeout(SNAPSHOT_DEADLINE_S):
                answers = await asyncio.gather(
                    *(self._store.held(self.pool, holder, self._caches[holder].epoch) for holder in some)
                )
            self._pace.begin()
            for holder, held in zip(some, answers, strict=True):
                self._unread.discard(holder)
                cache = self._caches[holder]
                if held is None:
                    # Not written yet, or forgotten by the store: its agent will state it all, and until then what is
                    # known is the best guess.
                    cache.seq = _UNREAD if cache.seq else 0
                elif held.seq != cache.seq:
                    await self._take_over(holder, held.blocks)
                    cache.seq = held.seq

    async def _take_over(self, holder: Holder, blocks: Mapping[int, Packed]) -> None:
        self.counts.snapshots += 1
        await self._empty(holder)
        await self._state(holder, blocks)

    async def _state(self, holder: Holder, blocks: Mapping[int, Packed]) -> None:
        for bits, packed in _slices(blocks):
            self.prefixes.apply(holder, {bits: packed})
            self.counts.blocks += len(packed) // KEY_BYTES
            await self._pace.breathe()

    async def _apply(self, entries: Sequence[StreamEntry]) -> None:
        for entry in entries:
            self._position = entry.position
            holder, change = entry.holder, entry.change
            cache = self._caches.get(holder)
            if cache is None or (entry.epoch != cache.epoch and entry.epoch <= cache.newest):
                # Of a worker that is not known yet (it is read whole when it is), or of a process that has ended.
                continue
            if entry.epoch != cache.epoch:
                await self._restart(holder, cache, entry.epoch)
            if holder in self._unread or change.seq <= cache.seq:
                continue
            if change.cleared:
                # Whatever was missed before it does not matter any more.
                await self._empty(holder)
            elif change.seq != cache.seq + 1:
                self._unread.add(holder)
                self.counts.gaps += 1
                continue
            await self._state(holder, change.blocks)
            cache.seq = change.seq
            self.counts.changes += 1


def _slices(blocks: Mapping[int, Packed]) -> Iterator[tuple[int, Packed]]:
    """Pieces of at most `SLICE_BLOCKS` blocks."""
    step = SLICE_BLOCKS * KEY_BYTES
    for bits, packed in blocks.items():
        if len(packed) <= step:
            yield bits, packed
        else:
            for start in range(0, len(packed), step):
                yield bits, packed[start : start + step]


class IndexWatch:
    """The mirrors of all pools that workers of the store belong to.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, store: BlockIndex, directory: Directory, clock: Callable[[], float]) -> None:
        self._store = store
        self._directory = directory
        self._clock = clock
        self._mirrors: dict[PoolId, PoolMirror] = {}
        self._tasks: dict[PoolId, asyncio.Task[None]] = {}

    @property
    def mirrors(self) -> Sequence[PoolMirror]:
        return list(self._mirrors.values())

    def mirror(self, pool: PoolId) -> PoolMirror | None:
        """The pool's mirror once it has been complete, else None."""
        mirror = self._mirrors.get(pool)
        return mirror if mirror is not None and mirror.loaded else None

    def follows(self, pool: PoolId) -> bool:
        """Whether the pool is mirrored, or about to be."""
        return pool in self._mirrors

    def holds(self, holder: Holder, keys: Sequence[BlockKey]) -> bool:
        """Whether a cache is known to hold any of some blocks."""
        mirror = self._mirror_of(holder)
        return mirror is not None and any(holder in mirror.prefixes.lookup((key,)) for key in keys)

    def seq(self, holder: Holder) -> int:
        """Number of the newest change that a cache announced; 0 for none."""
        mirror = self._mirror_of(holder)
        return mirror.seq(holder) if mirror is not None else 0

    def _mirror_of(self, holder: Holder) -> PoolMirror | None:
        return next((mirror for mirror in self._mirrors.values() if holder in mirror.prefixes), None)

    async def refresh(self) -> None:
        """Begin to mirror pools that are new, forget those without workers."""
        pools = {w.pool for w in self._directory.workers if w.source is Source.STORE}
        gone = self._mirrors.keys() - pools
        for pool in gone:
            del self._mirrors[pool]
        await end_tasks([self._tasks.pop(pool) for pool in gone])
        for pool in pools - self._mirrors.keys():
            mirror = PoolMirror(
                pool,
                self._store,
                lambda pool=pool: self._caches(pool),  # type: ignore[misc]
                lambda: self._directory.generation,
                self._clock,
            )
            self._mirrors[pool] = mirror
            self._tasks[pool] = asyncio.create_task(mirror.run())

    def _caches(self, pool: PoolId) -> dict[Holder, Epoch]:
        return {
            Holder(worker.id, rank): worker.record.epoch
            for worker in self._directory.workers
            if worker.pool == pool and worker.source is Source.STORE
            for rank in range(worker.record.dp_size)
        }

    async def close(self) -> None:
        """Stop following. Idempotent."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await end_tasks(tasks)
