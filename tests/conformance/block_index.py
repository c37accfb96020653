"""What every `BlockIndex` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.harness import Harness
from vllm_pd.block_hash import KEY_BYTES
from vllm_pd.errors import IndexLost
from vllm_pd.state import (
    START,
    BlockChange,
    BlockIndex,
    BlockWriter,
    Digest,
    Epoch,
    Holder,
    Packed,
    PoolId,
    Position,
    StreamEntry,
    Tier,
    WorkerId,
)

POOL = PoolId("0123456789abcdef")
OTHER_POOL = PoolId("fedcba9876543210")
HOLDER = Holder(WorkerId("[::1]:8000"), 1)
EPOCH = Epoch(1_764_000_000_000)
TTL_MS = 60_000
STEP = st.sampled_from(["3", "30", "3000", "replace", "lose", "clear", "reader", "read", "read"])
GPU, CPU, SSD = int(Tier.GPU), int(Tier.CPU), int(Tier.SSD)


@functools.cache
def key(n: int) -> bytes:
    return hashlib.sha256(b"%d" % n).digest()[:KEY_BYTES]


def packed(numbers: Iterable[int]) -> Packed:
    return b"".join(map(key, numbers))


def unpacked(blocks: Mapping[int, Packed]) -> dict[bytes, int]:
    """Key -> tier bits."""
    return {data[at : at + KEY_BYTES]: bits for bits, data in blocks.items() for at in range(0, len(data), KEY_BYTES)}


def digests(truth: Mapping[bytes, int]) -> dict[int, Digest]:
    """The plain definition of what a writer must state."""
    out: dict[int, Digest] = {}
    for name, bits in truth.items():
        known = out.get(bits, Digest(0, 0))
        out[bits] = Digest(known.blocks + 1, known.xor ^ int.from_bytes(name, "little"))
    return out


class Mirror:
    """A reader as simple as can be: the snapshot, then every change after it."""

    def __init__(self, index: BlockIndex, holder: Holder = HOLDER, epoch: Epoch = EPOCH) -> None:
        self._index = index
        self._holder = holder
        self._epoch = epoch
        self._after = START
        self.blocks: dict[bytes, int] = {}
        self.seq = 0
        self.gaps = 0

    async def start(self) -> None:
        self._after = await self._index.tail(POOL)
        held = await self._index.held(POOL, self._holder, self._epoch)
        self.blocks, self.seq = (unpacked(held.blocks), held.seq) if held is not None else ({}, 0)

    async def catch_up(self, limit: int = 256) -> None:
        while True:
            try:
                entries = await self._index.read(POOL, self._after, wait_ms=0, limit=limit)
            except IndexLost:
                await self.start()
                continue
            if not entries:
                return
            for entry in entries:
                self._after = entry.position
                if (entry.holder, entry.epoch) == (self._holder, self._epoch):
                    self._apply(entry.change)

    def _apply(self, change: BlockChange) -> None:
        if change.seq <= self.seq:
            return
        if change.cleared:
            self.blocks = {}
        elif change.seq != self.seq + 1:
            self.gaps += 1
        self.seq = change.seq
        for name, bits in unpacked(change.blocks).items():
            if bits:
                self.blocks[name] = bits
            else:
                self.blocks.pop(name, None)


async def held(index: BlockIndex, holder: Holder = HOLDER, epoch: Epoch = EPOCH) -> dict[bytes, int] | None:
    """What the store holds, after checking that it is what its writer stated."""
    found = await index.held(POOL, holder, epoch)
    if found is None:
        return None
    assert found.stated_seq == found.seq
    blocks = unpacked(found.blocks)
    assert found.stated == digests(blocks)
    assert sum(map(len, found.blocks.values())) == KEY_BYTES * len(blocks)
    return blocks


async def entries(index: BlockIndex, after: Position = START) -> Sequence[StreamEntry]:
    return await index.read(POOL, after, wait_ms=0, limit=100_000)


async def begun(index: BlockIndex, blocks: Mapping[int, Packed] | None = None) -> BlockWriter:
    writer = index.writer(POOL, HOLDER, EPOCH, TTL_MS)
    await writer.replace(blocks or {})
    return writer


def whatever(truth: dict[bytes, int], chance: random.Random, blocks: int) -> dict[int, Packed]:
    """A random change of the blocks 0 to `blocks`, which `truth` takes over."""
    changed: dict[int, set[int]] = {}
    for n in chance.sample(range(blocks), chance.randrange(1, blocks)):
        bits = chance.choice([0, 0, GPU, GPU, GPU | CPU, CPU, SSD])
        changed.setdefault(bits, set()).add(n)
    for bits, numbers in changed.items():
        for n in numbers:
            if bits:
                truth[key(n)] = bits
            else:
                truth.pop(key(n), None)
    return {bits: packed(numbers) for bits, numbers in changed.items()}


def grouped(truth: Mapping[bytes, int]) -> dict[int, Packed]:
    """By tier bits, as an agent states it."""
    lists: dict[int, list[bytes]] = {}
    for name, bits in truth.items():
        lists.setdefault(bits, []).append(name)
    return {bits: b"".join(names) for bits, names in lists.items()}


class BlockIndexConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_what_is_written_is_held_and_in_the_stream(self, harness: Harness) -> None:
        writer_side, reader = harness.block_index(), harness.block_index()
        assert await reader.held(POOL, HOLDER, EPOCH) is None
        assert await reader.tail(POOL) == START
        writer = await begun(writer_side, {GPU: packed(range(3))})
        await writer.write({GPU | CPU: packed([1]), 0: packed([0]), SSD: packed([9])})
        assert await held(reader) == {key(1): GPU | CPU, key(2): GPU, key(9): SSD}
        assert [(e.holder, e.epoch, e.change) for e in await entries(reader)] == [
            (HOLDER, EPOCH, BlockChange(1, True, {})),
            (HOLDER, EPOCH, BlockChange(2, False, {GPU: packed(range(3))})),
            (HOLDER, EPOCH, BlockChange(3, False, {GPU | CPU: packed([1]), 0: packed([0]), SSD: packed([9])})),
        ]

    async def test_nothing_to_write_is_no_change(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index)
        await writer.write({})
        await writer.write({0: b"", GPU: b""})
        assert [e.change.seq for e in await entries(index)] == [1]
        assert await held(index) == {}

    async def test_saying_the_same_again_changes_nothing(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index)
        for _ in range(3):
            await writer.write({GPU: packed(range(5)), 0: packed([7])})
        assert await held(index) == dict.fromkeys(map(key, range(5)), GPU)
        for _ in range(2):
            await writer.write({0: packed(range(5))})
        assert await held(index) == {}

    async def test_a_block_named_twice_counts_once_and_the_last_word_holds(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index)
        await writer.write({GPU: packed([1, 1, 2, 1])})
        await writer.write({0: packed([2]), CPU: packed([1, 2, 2])})
        assert await held(index) == {key(1): CPU, key(2): CPU}

    async def test_large_changes_come_in_pieces_that_add_up(self, harness: Harness) -> None:
        index = harness.block_index()
        truth = {GPU: packed(range(3000)), CPU | SSD: packed(range(3000, 5000))}
        writer = await begun(index, truth)
        await writer.write({0: packed(range(10, 2990))})
        changes = [e.change for e in await entries(index)]
        assert [c.seq for c in changes] == list(range(1, len(changes) + 1))
        assert [c.cleared for c in changes] == [True] + [False] * (len(changes) - 1)
        assert all(sum(map(len, c.blocks.values())) <= 128 * KEY_BYTES for c in changes)
        expected = unpacked({GPU: packed([*range(10), *range(2990, 3000)]), CPU | SSD: packed(range(3000, 5000))})
        assert await held(index) == expected
        mirror = Mirror(index)
        await mirror.catch_up(limit=3)
        assert mirror.blocks == expected

    async def test_replace_leaves_nothing_of_before(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index, {GPU: packed(range(4000))})
        mirror = Mirror(index)
        await mirror.start()
        await writer.replace({CPU: packed([1]), 0: packed([2])})
        assert await held(index) == {key(1): CPU}
        await mirror.catch_up()
        assert (mirror.blocks, mirror.gaps) == ({key(1): CPU}, 0)
        await writer.replace({})
        assert await held(index) == {}

    @given(steps=st.lists(STEP, max_size=25), seed=st.integers(0, 99))
    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    async def test_whatever_happens_readers_that_started_at_any_time_end_with_the_truth(
        self, harness: Harness, steps: list[str], seed: int
    ) -> None:
        await harness.lose_everything()
        chance = random.Random(seed)
        index, reader = harness.block_index(), harness.block_index()
        truth: dict[bytes, int] = {}
        mirrors = [Mirror(reader)]
        writer = await begun(index)
        for step in steps:
            if step == "replace":
                await writer.replace(grouped(truth))
            elif step == "lose":
                await harness.lose_everything()
            elif step == "clear":
                await index.clear(POOL)
            elif step == "reader":
                mirrors.append(Mirror(reader))
                await mirrors[-1].start()
            elif step == "read":
                await chance.choice(mirrors).catch_up(limit=chance.choice([1, 2, 256]))
            else:
                changed = whatever(truth, chance, int(step))
                try:
                    await writer.write(changed)
                except IndexLost:
                    await writer.replace(grouped(truth))
        # What the agent does at its next heartbeat.
        try:
            await writer.renew(TTL_MS)
        except IndexLost:
            await writer.replace(grouped(truth))
        assert await held(index) == truth
        for mirror in mirrors:
            await mirror.catch_up()
            assert (mirror.blocks, mirror.gaps) == (truth, 0)
        await index.close()
        await reader.close()

    async def test_a_snapshot_taken_while_blocks_change_converges(self, harness: Harness) -> None:
        index, reader = harness.block_index(), harness.block_index()
        truth: dict[bytes, int] = {}
        writer = await begun(index)
        done = asyncio.Event()

        async def churn() -> None:
            chance = random.Random(3)
            while not done.is_set():
                await writer.write(whatever(truth, chance, 5000))
                await asyncio.sleep(0)

        task = asyncio.create_task(churn())
        mirrors = [Mirror(reader) for _ in range(5)]
        for mirror in mirrors:
            await mirror.start()
            await asyncio.sleep(0)
        done.set()
        await task
        for mirror in mirrors:
            await mirror.catch_up()
            assert (mirror.blocks, mirror.gaps) == (truth, 0)

    async def test_caches_do_not_mix(self, harness: Harness) -> None:
        index = harness.block_index()
        others = [
            (POOL, Holder(HOLDER.worker, 0), EPOCH),
            (POOL, Holder(WorkerId("b:1"), 1), EPOCH),
            (OTHER_POOL, HOLDER, EPOCH),
        ]
        writer = await begun(index, {GPU: packed([1])})
        for n, (pool, holder, epoch) in enumerate(others):
            await index.writer(pool, holder, epoch, TTL_MS).replace({GPU: packed([10 + n])})
        elsewhere = harness.block_index("elsewhere")
        await elsewhere.writer(POOL, HOLDER, EPOCH, TTL_MS).replace({CPU: packed([99])})
        await writer.write({0: packed([10, 11, 12, 99])})
        assert await held(index) == {key(1): GPU}
        assert await held(elsewhere) == {key(99): CPU}
        for n, (pool, holder, epoch) in enumerate(others):
            found = await index.held(pool, holder, epoch)
            assert found is not None
            assert unpacked(found.blocks) == {key(10 + n): GPU}

    async def test_a_new_epoch_starts_empty_and_ends_the_older_one(self, harness: Harness) -> None:
        index = harness.block_index()
        old = await begun(index, {GPU: packed(range(3000))})
        newer = Epoch(EPOCH + 1)
        assert await held(index, epoch=newer) is None
        new = index.writer(POOL, HOLDER, newer, TTL_MS)
        await new.replace({GPU: packed([5])})
        assert await held(index) is None
        assert await held(index, epoch=newer) == {key(5): GPU}
        with pytest.raises(IndexLost):
            await old.write({GPU: packed([1])})
        first = next(e for e in await entries(index) if e.epoch == newer)
        assert first.change == BlockChange(1, True, {})

    async def test_a_store_that_came_back_empty_is_noticed_and_filled_again(self, harness: Harness) -> None:
        index, reader = harness.block_index(), harness.block_index()
        writer = await begun(index, {GPU: packed(range(10))})
        for call in self._calls(writer):
            await harness.lose_everything()
            with pytest.raises(IndexLost):
                await call()
            assert await reader.held(POOL, HOLDER, EPOCH) is None
            # Until it has announced everything again, it says so at once.
            for again in self._calls(writer):
                with pytest.raises(IndexLost):
                    await again()
            mirror = Mirror(reader)
            await writer.replace({GPU: packed([1]), CPU: packed([2])})
            await mirror.catch_up()
            assert await held(reader) == mirror.blocks == {key(1): GPU, key(2): CPU}

    async def test_the_numbers_of_changes_only_grow(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index, {GPU: packed(range(10))})
        await writer.write({GPU: packed([20])})
        last = (await entries(index))[-1].change.seq
        await harness.lose_everything()
        await writer.replace({})
        assert [e.change.seq for e in await entries(index)] == [last + 1]
        # An agent that restarted without a new epoch goes on where the store is.
        again = index.writer(POOL, HOLDER, EPOCH, TTL_MS)
        await again.replace({})
        assert (await entries(index))[-1].change == BlockChange(last + 2, True, {})
        with pytest.raises(IndexLost):
            await writer.write({GPU: packed([1])})
        assert await held(index) == {}

    async def test_a_reader_is_told_when_the_stream_does_not_go_on(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index, {GPU: packed(range(10))})
        tail = await index.tail(POOL)
        await harness.lose_everything()
        with pytest.raises(IndexLost):
            await index.read(POOL, tail, wait_ms=0)
        await writer.replace({GPU: packed([1])})
        mirror = Mirror(index)
        await mirror.start()
        assert mirror.blocks == {key(1): GPU}

    async def test_everything_ends_with_its_writer_unless_renewed(self, harness: Harness) -> None:
        index = harness.block_index()
        short = index.writer(POOL, HOLDER, EPOCH, 60)
        long_lived = Holder(WorkerId("long:1"))
        kept = index.writer(POOL, long_lived, EPOCH, 200)
        await short.replace({GPU: packed(range(3000))})
        await kept.replace({GPU: packed(range(3000))})
        await kept.renew(TTL_MS)
        await harness.pass_time(150)
        assert await held(index) is None
        with pytest.raises(IndexLost):
            await short.renew(60)
        await harness.pass_time(300)
        assert await held(index, long_lived) == dict.fromkeys(map(key, range(3000)), GPU)
        assert [cache.holder for cache in (await index.stats(POOL)).caches] == [long_lived]
        await kept.write({0: packed(range(1, 3000))})
        assert await held(index, long_lived) == {key(0): GPU}

    async def test_remove_clears_for_readers_and_can_be_repeated(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index, {GPU: packed(range(3000))})
        mirror = Mirror(index)
        await mirror.start()
        await writer.remove()
        await writer.remove()
        await mirror.catch_up()
        assert mirror.blocks == {}
        assert await held(index) is None
        assert (await index.stats(POOL)).caches == ()
        with pytest.raises(IndexLost):
            await writer.write({GPU: packed([1])})
        await writer.replace({GPU: packed([1])})
        await mirror.catch_up()
        assert (mirror.blocks, mirror.gaps) == ({key(1): GPU}, 0)
        await index.writer(POOL, Holder(WorkerId("never:1")), EPOCH, TTL_MS).remove()

    async def test_reading_waits_for_the_first_entry_only(self, harness: Harness) -> None:
        index, reader = harness.block_index(), harness.block_index()
        writer = await begun(index)
        tail = await reader.tail(POOL)
        assert await reader.read(POOL, tail, wait_ms=1) == []
        waiting = asyncio.create_task(reader.read(POOL, tail, wait_ms=20_000))
        await asyncio.sleep(0.05)
        # A blocked read holds nobody else up.
        assert await reader.tail(POOL) == tail
        await writer.write({GPU: packed([1])})
        (entry,) = await waiting
        assert entry.change.blocks == {GPU: packed([1])}

    async def test_entries_come_in_order_and_no_more_than_asked_for(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index)
        for n in range(5):
            await writer.write({GPU: packed([n])})
        after, seen = START, []
        while batch := await index.read(POOL, after, wait_ms=0, limit=2):
            assert len(batch) <= 2
            seen += [entry.change.seq for entry in batch]
            after = batch[-1].position
        assert seen == [1, 2, 3, 4, 5, 6]

    async def test_statistics_count_what_is_there(self, harness: Harness) -> None:
        index = harness.block_index()
        assert (await index.stats(POOL)).caches == ()
        await begun(index, {GPU: packed(range(10)), GPU | SSD: packed([20, 21]), CPU: packed([30])})
        await index.writer(POOL, Holder(WorkerId("a:1")), EPOCH, TTL_MS).replace({})
        stats = await index.stats(POOL)
        full, empty = stats.caches
        assert (empty.holder.worker, empty.distinct) == ("a:1", 0)
        assert (full.holder, full.epoch, full.seq) == (HOLDER, EPOCH, 2)
        assert full.blocks == {Tier.GPU: 12, Tier.CPU: 1, Tier.SSD: 2}
        assert full.distinct == 13
        assert full.keys >= 1
        assert stats.stream_entries == 3

    async def test_clear_removes_one_pool_and_its_writers_notice(self, harness: Harness) -> None:
        index = harness.block_index()
        writer = await begun(index, {GPU: packed(range(3000))})
        await index.writer(OTHER_POOL, HOLDER, EPOCH, TTL_MS).replace({GPU: packed([1])})
        registry = harness.registry()
        assert await index.clear(POOL) > 0
        assert await held(index) is None
        assert (await registry.snapshot()).workers == ()
        stats = await index.stats(POOL)
        assert (stats.caches, stats.stream_entries) == ((), 0)
        found = await index.held(OTHER_POOL, HOLDER, EPOCH)
        assert found is not None
        with pytest.raises(IndexLost):
            await writer.write({GPU: packed([1])})
        await writer.replace({GPU: packed([1])})
        assert await held(index) == {key(1): GPU}

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        index = harness.block_index()
        await index.tail(POOL)
        await index.close()
        await index.close()

    @pytest.mark.parametrize("namespace", ["", "a:b", "a}b"])
    def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(self, harness: Harness, namespace: str) -> None:
        with pytest.raises(ValueError, match="--pd-namespace"):
            harness.block_index(namespace)

    def _calls(self, writer: BlockWriter) -> list[Callable[[], object]]:
        return [lambda: writer.write({GPU: packed([3])}), lambda: writer.renew(TTL_MS)]
