"""What every `Registry` must do. A test module subclasses it; `harness` is a fixture."""

from __future__ import annotations

import dataclasses

import pytest

from tests.conformance.harness import Harness
from vllm_pd.state import (
    Epoch,
    HeartbeatResult,
    MoveState,
    PoolSpec,
    Registry,
    Role,
    RoleMove,
    RouterWork,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
)

POOL = PoolSpec("tiny", "main", "bfloat16", "auto", "NHD", 32, "sha256_cbor", "0.32.0")
OTHER_POOL = dataclasses.replace(POOL, model="other")
LEASE_MS = 60_000
FILES = TokenizerFiles(b'{"version":"1.0"}', b'{"eos_token":"</s>"}', "{{ messages }}")


def worker(
    name: str = "10.0.0.1:8000", epoch: int = 1_764_000_000_000, pool: PoolSpec = POOL, role: Role = Role.PREFILL
) -> WorkerRecord:
    return WorkerRecord(
        id=WorkerId(name),
        epoch=Epoch(epoch),
        pool=pool,
        url=f"http://{name}",
        role=role,
        models=("tiny", "adapter"),
        engine_id="e1",
        nixl_host="10.0.0.1",
        nixl_port=5600,
        dp_size=2,
        kv_blocks=128,
        cpu_gib=1.5,
        max_model_len=2048,
        tokenizer=FILES.sha,
        versions={"vllm": "0.32.0", "vllm-pd": "0.1.0"},
    )


def newer(record: WorkerRecord) -> WorkerRecord:
    return dataclasses.replace(record, epoch=Epoch(record.epoch + 1))


async def live(registry: Registry) -> list[WorkerRecord]:
    return [state.record for state in (await registry.snapshot()).workers]


class RegistryConformance:
    """Inherit where there is a fixture `harness`."""

    async def test_a_heartbeat_makes_the_whole_record_visible(self, harness: Harness) -> None:
        registry = harness.registry()
        assert (await registry.snapshot()).workers == ()
        record = worker()
        assert await registry.heartbeat(record, LEASE_MS) is HeartbeatResult.NEW
        assert await registry.heartbeat(record, LEASE_MS) is HeartbeatResult.RENEWED
        (state,) = (await harness.registry().snapshot()).workers
        assert state.record == record
        assert 0 < state.lease_left_ms <= LEASE_MS
        assert state.loads == {}

    async def test_workers_of_all_pools_come_ordered_by_id(self, harness: Harness) -> None:
        registry = harness.registry()
        records = [worker("c:1"), worker("a:1", pool=OTHER_POOL), worker("[::1]:8000"), worker("b:1")]
        for record in records:
            await registry.heartbeat(record, LEASE_MS)
        assert await live(registry) == sorted(records, key=lambda r: r.id)

    async def test_a_renewal_carries_a_changed_role(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(worker(), LEASE_MS)
        changed = worker(role=Role.DECODE)
        assert await registry.heartbeat(changed, LEASE_MS) is HeartbeatResult.RENEWED
        assert await live(registry) == [changed]

    async def test_a_move_of_its_role_comes_back_as_the_worker_tells_it(self, harness: Harness) -> None:
        registry = harness.registry()
        move = RoleMove("a:1", Role.DECODE, "planner", MoveState.DRAINING, 7, detail="2 requests", hand_over=True)
        record = dataclasses.replace(worker(), role_epoch=3, move=move)
        await registry.heartbeat(record, LEASE_MS)
        (found,) = await live(registry)
        assert found == record and found.moving_to is Role.DECODE

    async def test_one_worker_is_found_with_its_load(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        assert await registry.find(record.id, POOL.id) is None
        await registry.heartbeat(record, LEASE_MS)
        await registry.heartbeat(worker("other:1"), LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 1, {0: WorkerLoad(2, 1, 0.5, 1000)}, LEASE_MS)
        state = await registry.find(record.id, POOL.id)
        assert state is not None and state.record == record
        assert state.loads == {0: WorkerLoad(2, 1, 0.5, 1000)} and 0 < state.lease_left_ms <= LEASE_MS
        assert await registry.find(record.id, OTHER_POOL.id) is None
        await registry.heartbeat(record, 40)
        await harness.pass_time(60)
        assert await registry.find(record.id, POOL.id) is None

    async def test_a_worker_is_absent_after_its_lease(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(worker("short:1"), 40)
        await registry.heartbeat(worker("long:1"), LEASE_MS)
        await harness.pass_time(60)
        assert await live(registry) == [worker("long:1")]
        assert await registry.heartbeat(worker("short:1"), LEASE_MS) is HeartbeatResult.NEW
        assert await live(registry) == [worker("long:1"), worker("short:1")]

    async def test_a_short_lease_does_not_hide_the_pool_of_a_long_one(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(worker("long:1"), LEASE_MS)
        await registry.heartbeat(worker("short:1"), 40)
        await harness.pass_time(60)
        assert await live(registry) == [worker("long:1")]

    async def test_a_restart_replaces_the_older_epoch_and_its_loads(self, harness: Harness) -> None:
        registry = harness.registry()
        old = worker()
        await registry.heartbeat(old, LEASE_MS)
        await registry.publish_load(old.id, POOL.id, 3, {0: WorkerLoad(9, 9, 0.9, 1)}, LEASE_MS)
        assert await registry.heartbeat(newer(old), LEASE_MS) is HeartbeatResult.NEW
        (state,) = (await registry.snapshot()).workers
        assert state.record == newer(old)
        assert state.loads == {}

    async def test_an_older_epoch_is_refused_and_changes_nothing(self, harness: Harness) -> None:
        registry = harness.registry()
        old = worker()
        await registry.heartbeat(newer(old), LEASE_MS)
        before = (await registry.snapshot()).workers
        assert await registry.heartbeat(old, 10 * LEASE_MS) is HeartbeatResult.STALE
        assert not await registry.withdraw(old.id, POOL.id, old.epoch)
        (state,) = (await registry.snapshot()).workers
        assert state.record == before[0].record
        assert state.lease_left_ms <= LEASE_MS

    async def test_an_older_epoch_may_register_once_the_newer_lease_ended(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(newer(worker()), 40)
        await harness.pass_time(60)
        assert await registry.heartbeat(worker(), LEASE_MS) is HeartbeatResult.NEW
        assert await live(registry) == [worker()]

    async def test_a_restart_with_another_model_hides_the_ghost_in_the_old_pool(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(worker(), LEASE_MS)
        moved = newer(worker(pool=OTHER_POOL))
        await registry.heartbeat(moved, LEASE_MS)
        assert await live(registry) == [moved]

    async def test_withdraw_removes_the_worker_and_can_be_repeated(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        await registry.heartbeat(record, LEASE_MS)
        assert await registry.withdraw(record.id, POOL.id, record.epoch)
        assert not await registry.withdraw(record.id, POOL.id, record.epoch)
        assert await live(registry) == []
        assert await registry.heartbeat(record, LEASE_MS) is HeartbeatResult.NEW

    async def test_loads_of_several_writers_merge_to_the_newest_per_engine(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        await registry.heartbeat(record, LEASE_MS)
        seen_first = {0: WorkerLoad(1, 0, 0.25, 1000), 1: WorkerLoad(5, 2, 0.5, 1001)}
        seen_later = {0: WorkerLoad(4, 7, 0.75, 1002)}
        await registry.publish_load(record.id, POOL.id, 0, seen_first, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 1, seen_later, LEASE_MS)
        (state,) = (await registry.snapshot()).workers
        assert state.loads == {0: seen_later[0], 1: seen_first[1]}
        assert (state.running, state.waiting, state.kv_usage) == (9, 9, 0.75)

    async def test_a_writer_replaces_only_its_own_load(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        await registry.heartbeat(record, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 0, {0: WorkerLoad(1, 0, 0.0, 1000)}, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 1, {1: WorkerLoad(2, 0, 0.0, 1000)}, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 0, {0: WorkerLoad(3, 0, 0.0, 1001)}, LEASE_MS)
        (state,) = (await registry.snapshot()).workers
        assert {engine: load.running for engine, load in state.loads.items()} == {0: 3, 1: 2}

    async def test_a_silent_writer_is_forgotten_while_others_write(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        await registry.heartbeat(record, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 1, {1: WorkerLoad(2, 0, 0.0, 2000)}, LEASE_MS)
        await registry.publish_load(record.id, POOL.id, 0, {0: WorkerLoad(1, 0, 0.0, 1000)}, 40)
        await harness.pass_time(60)
        (state,) = (await registry.snapshot()).workers
        assert list(state.loads) == [1]

    async def test_a_load_without_a_worker_shows_nothing(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.publish_load(WorkerId("a:1"), POOL.id, 0, {0: WorkerLoad(1, 1, 0.1, 1)}, LEASE_MS)
        assert await live(registry) == []

    async def test_the_work_of_every_router_shows_at_its_workers(self, harness: Harness) -> None:
        registry = harness.registry()
        one, two, other = worker("a:1"), worker("b:1"), worker("c:1", pool=OTHER_POOL)
        for record in (one, two, other):
            await registry.heartbeat(record, LEASE_MS)
        work = {one.id: RouterWork(1000, 3), two.id: RouterWork(0, 1)}
        await registry.publish_inflight("router-b", POOL.id, work, LEASE_MS)
        await registry.publish_inflight("router-a", POOL.id, {one.id: RouterWork(7, 1)}, LEASE_MS)
        await registry.publish_inflight("router-a", OTHER_POOL.id, {other.id: RouterWork(9, 9)}, LEASE_MS)
        assert [list(state.others.items()) for state in (await registry.snapshot()).workers] == [
            [("router-a", RouterWork(7, 1)), ("router-b", RouterWork(1000, 3))],
            [("router-b", RouterWork(0, 1))],
            [("router-a", RouterWork(9, 9))],
        ]

    async def test_a_router_replaces_its_work_and_a_silent_one_is_forgotten(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.heartbeat(worker(), LEASE_MS)
        id = worker().id
        await registry.publish_inflight("stays", POOL.id, {id: RouterWork(5, 1), WorkerId("z:1"): RouterWork(1, 1)}, 60)
        await registry.publish_inflight("gone", POOL.id, {id: RouterWork(5, 1)}, 40)
        await harness.pass_time(60)
        await registry.publish_inflight("stays", POOL.id, {id: RouterWork(0, 2)}, LEASE_MS)
        (state,) = (await registry.snapshot()).workers
        assert state.others == {"stays": RouterWork(0, 2)}
        await registry.publish_inflight("stays", POOL.id, {}, LEASE_MS)
        (state,) = (await registry.snapshot()).workers
        assert state.others == {}

    async def test_tokenizer_files_come_back_whole_and_only_from_their_pool(self, harness: Harness) -> None:
        registry = harness.registry()
        sha = await registry.put_tokenizer(POOL.id, FILES, LEASE_MS)
        assert sha == FILES.sha
        assert await registry.put_tokenizer(POOL.id, FILES, LEASE_MS) == sha
        assert await registry.get_tokenizer(POOL.id, sha) == FILES
        assert await registry.get_tokenizer(POOL.id, "0" * 64) is None
        assert await registry.get_tokenizer(OTHER_POOL.id, sha) is None

    async def test_putting_a_tokenizer_again_restarts_its_time_to_live(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.put_tokenizer(POOL.id, FILES, 40)
        await registry.put_tokenizer(POOL.id, FILES, LEASE_MS)
        await registry.put_tokenizer(OTHER_POOL.id, FILES, 40)
        await harness.pass_time(60)
        assert await registry.get_tokenizer(POOL.id, FILES.sha) == FILES
        assert await registry.get_tokenizer(OTHER_POOL.id, FILES.sha) is None

    async def test_namespaces_do_not_see_each_other(self, harness: Harness) -> None:
        one, two = harness.registry("one"), harness.registry("two")
        record = worker()
        await one.heartbeat(newer(record), LEASE_MS)
        assert await two.heartbeat(record, LEASE_MS) is HeartbeatResult.NEW
        await two.put_tokenizer(POOL.id, FILES, LEASE_MS)
        assert await live(one) == [newer(record)]
        assert await live(two) == [record]
        assert await one.get_tokenizer(POOL.id, FILES.sha) is None
        await one.withdraw(record.id, POOL.id, newer(record).epoch)
        assert await live(two) == [record]

    async def test_one_heartbeat_makes_an_emptied_store_whole(self, harness: Harness) -> None:
        registry = harness.registry()
        record = worker()
        await registry.heartbeat(record, LEASE_MS)
        await harness.lose_everything()
        assert await live(registry) == []
        assert await registry.heartbeat(record, LEASE_MS) is HeartbeatResult.NEW
        assert await live(registry) == [record]

    async def test_close_can_be_repeated(self, harness: Harness) -> None:
        registry = harness.registry()
        await registry.snapshot()
        await registry.close()
        await registry.close()

    @pytest.mark.parametrize("namespace", ["", "a b", "a:b", "a}b", "x" * 65, "ä", "a\n"])
    def test_a_namespace_that_cannot_be_part_of_a_key_is_refused(self, harness: Harness, namespace: str) -> None:
        with pytest.raises(ValueError, match="--pd-namespace"):
            harness.registry(namespace)
