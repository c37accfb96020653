"""The Kubernetes actuator against the test API server, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="needs the extra [kubernetes]")

from tests.conformance.actuator import WHY, ActuatorConformance, one_of, starting
from tests.conformance.registry import OTHER_POOL, POOL
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.world import LEASE_MS, STORE_NAMESPACE, KubernetesWorld, workload
from vllm_pd.errors import ActuatorError, DeposedError, SettingsError
from vllm_pd.planner.actuators import kubernetes
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.kubernetes_model import DELETION_COST, HOLD, LEAVING, MAX, MIN, MODEL, ROLE, TERM
from vllm_pd.planner.actuators.kubernetes_model import POOL as POOL_NAME
from vllm_pd.planner.model import AddAction, RemoveAction
from vllm_pd.state import Epoch, PoolId, Role, WorkerId
from vllm_pd.state.memory_roles import MemoryRoles

RULES = [
    {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["list"]},
    {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["get", "patch"]},
    {"apiGroups": ["apps"], "resources": ["deployments/scale", "statefulsets/scale"], "verbs": ["update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        server.rules = RULES
        yield server


@pytest.fixture
async def world(server: ApiServer) -> AsyncIterator[KubernetesWorld]:
    world = KubernetesWorld(server)
    server.create([workload("prefill", Role.PREFILL, 2), workload("decode", Role.DECODE, 3)])
    await world.settle()
    yield world
    await world.close()


async def removal(world: KubernetesWorld, role: Role = Role.DECODE) -> RemoveAction:
    id, epoch = await one_of(world, role)
    return RemoveAction(id, epoch, WHY)


class TestKubernetes(ActuatorConformance):
    pass


class TestWhoGoes:
    async def test_the_pod_that_is_meant_goes_although_kubernetes_prefers_younger_ones(
        self, world: KubernetesWorld
    ) -> None:
        for id, (epoch, role) in sorted((await world.workers()).items()):
            if role is not Role.DECODE:
                continue
            pod = world.pod_of(id)["metadata"]["name"]
            outcome = await world.actuator.act(world.pool, RemoveAction(id, epoch, WHY))
            assert outcome.ok
            assert pod in outcome.detail
            assert "60 s" in outcome.detail
            assert id not in await world.workers()
        assert await world.asked_for(Role.DECODE) == 0
        assert len(world.pods("prefill")) == 2

    async def test_nobody_goes_while_another_pod_would_be_taken(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        other = next(pod for pod in world.pods("decode") if pod is not world.pod_of(action.worker))
        world.server.controllers.unready(other["metadata"]["name"])
        outcome = await world.actuator.act(world.pool, action)
        assert not outcome.ok
        assert other["metadata"]["name"] in outcome.detail
        assert await world.asked_for(Role.DECODE) == 3
        assert not any(LEAVING in pod["metadata"]["labels"] for pod in world.pods())

    async def test_nobody_goes_while_a_pod_cannot_be_made(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        world.server.controllers.quota = 5
        world.server.set_replicas("Deployment", "decode", 4)
        outcome = await world.actuator.act(world.pool, action)
        assert not outcome.ok
        assert "could not be made" in outcome.detail

    async def test_nobody_goes_during_a_rollout(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        other = next(pod for pod in world.pods("decode") if pod is not world.pod_of(action.worker))
        other["metadata"]["labels"]["pod-template-hash"] = "newer"
        outcome = await world.actuator.act(world.pool, action)
        assert not outcome.ok
        assert "rollout" in outcome.detail

    async def test_of_a_stateful_set_only_the_last_one_can_go(self, world: KubernetesWorld) -> None:
        world.server.create([workload("big", Role.BOTH, 3, kind="StatefulSet")])
        workers = await world.workers()
        by_name = {world.pod_of(id)["metadata"]["name"]: (id, epoch) for id, (epoch, _) in workers.items()}
        first = await world.actuator.act(world.pool, RemoveAction(*by_name["big-0"], WHY))
        assert not first.ok
        assert "big-2" in first.detail
        assert (await world.actuator.act(world.pool, RemoveAction(*by_name["big-2"], WHY))).ok
        assert set(workers) - set(await world.workers()) == {by_name["big-2"][0]}

    async def test_a_stateful_sets_worker_is_known_by_the_name_of_its_pod(self, world: KubernetesWorld) -> None:
        world.server.create([workload("big", Role.BOTH, 1, kind="StatefulSet")])
        pod = world.pods("big")[0]
        record = replace(world.record(pod), id=WorkerId("big-0.big.llm.svc.cluster.local:8000"))
        await world.registry.heartbeat(record, LEASE_MS)
        assert (await world.actuator.act(world.pool, RemoveAction(record.id, record.epoch, WHY))).ok
        assert not world.pods("big")

    async def test_a_worker_whose_pod_is_gone_is_not_replaced_by_another(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        world.server.controllers.paused = True
        world.server.controllers.finish(world.pod_of(action.worker)["metadata"]["name"])
        outcome = await world.actuator.act(world.pool, action)
        assert not outcome.ok
        assert "deleted" in outcome.detail
        assert await world.asked_for(Role.DECODE) == 3

    async def test_the_address_of_a_pod_that_was_given_to_the_next_one_removes_nobody(
        self, world: KubernetesWorld
    ) -> None:
        action = await removal(world)
        pod = world.pod_of(action.worker)
        old = replace(world.record(pod), epoch=Epoch(action.epoch - 3_600_000))
        world.store.namespace(STORE_NAMESPACE).workers.clear()
        await world.registry.heartbeat(old, LEASE_MS)
        outcome = await world.actuator.act(world.pool, RemoveAction(old.id, old.epoch, WHY))
        assert not outcome.ok
        assert await world.asked_for(Role.DECODE) == 3

    async def test_a_removal_that_waits_for_kubernetes_is_not_done_twice(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        world.server.controllers.paused = True
        for _ in range(3):
            assert (await world.actuator.act(world.pool, action)).ok
        assert await world.asked_for(Role.DECODE) == 2
        world.server.controllers.paused = False
        world.server.controllers.run()
        assert len(world.pods("decode")) == 2
        assert action.worker not in await world.workers()

    async def test_the_mark_of_a_planner_that_died_between_two_steps_takes_nobody_later(
        self, world: KubernetesWorld
    ) -> None:
        left, chosen = [(id, e) for id, (e, role) in sorted((await world.workers()).items()) if role is Role.DECODE][:2]
        world.server.fail("update", "deployments/scale", 0, times=2)
        with pytest.raises(ActuatorError):
            await world.actuator.act(world.pool, RemoveAction(*left, WHY))
        assert world.pod_of(left[0])["metadata"]["annotations"][DELETION_COST]
        assert (await world.actuator.act(world.pool, RemoveAction(*chosen, WHY))).ok
        assert chosen[0] not in await world.workers()
        assert DELETION_COST not in world.pod_of(left[0])["metadata"]["annotations"]
        assert LEAVING not in world.pod_of(left[0])["metadata"]["labels"]


class TestWhatCanGoWrong:
    @pytest.mark.parametrize(
        ("verb", "resource", "named"),
        [
            ("list", "pods", "pods"),
            ("list", "deployments", "deployments.apps"),
            ("list", "statefulsets", "statefulsets.apps"),
            ("get", "deployments", "deployments.apps"),
            ("update", "deployments/scale", "deployments.apps/scale"),
            ("patch", "pods", "pods"),
        ],
    )
    async def test_a_missing_right_is_named(self, world: KubernetesWorld, verb: str, resource: str, named: str) -> None:
        world.server.rules = [
            {**rule, "resources": [each]} | {"verbs": [v for v in rule["verbs"] if (v, each) != (verb, resource)]}
            for rule in RULES
            for each in rule["resources"]
        ]
        outcome = await world.actuator.act(world.pool, await removal(world))
        assert not outcome.ok
        assert f"the verb {verb} on {named}" in outcome.detail
        assert await world.asked_for(Role.DECODE) == 3
        assert not any(LEAVING in pod["metadata"]["labels"] for pod in world.pods()) or verb == "patch"

    async def test_unknown_credentials_are_said_to_be(self, world: KubernetesWorld) -> None:
        world.server.fail("list", "pods", 401)
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert "credentials" in outcome.detail

    async def test_credentials_that_ran_out_are_read_anew(self, world: KubernetesWorld) -> None:
        assert await world.actuator.starting(world.pool) == []
        connected = world.connected
        world.server.fail("list", "pods", 401)
        with pytest.raises(ActuatorError, match="credentials"):
            await world.actuator.starting(world.pool)
        assert await world.actuator.starting(world.pool) == []
        assert world.connected == connected + 1

    async def test_a_conflict_with_a_change_of_something_else_is_resolved(self, world: KubernetesWorld) -> None:
        touched = 0

        def touch(verb: str, resource: str) -> None:
            nonlocal touched
            if (verb, resource) == ("update", "deployments/scale") and touched < 2:
                touched += 1
                world.server.objects.replace("Deployment", "llm", "decode", lambda found: found, "")

        world.server.before = touch
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert outcome.ok
        assert touched == 2
        assert await world.asked_for(Role.DECODE) == 4

    async def test_endless_conflicts_end(self, world: KubernetesWorld) -> None:
        world.server.fail("update", "deployments/scale", 409, times=100)
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert world.server.asked.count(("update", "deployments/scale")) == 3

    @pytest.mark.parametrize("theirs", [7, 1])
    async def test_replicas_that_a_person_changes_meanwhile_stand(self, world: KubernetesWorld, theirs: int) -> None:
        def scale(verb: str, resource: str) -> None:
            if (verb, resource) == ("update", "deployments/scale"):
                world.server.before = lambda verb, resource: None
                world.server.set_replicas("Deployment", "decode", theirs)

        world.server.before = scale
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert f"from 3 to {theirs}" in outcome.detail
        assert await world.asked_for(Role.DECODE) == theirs

    async def test_a_removal_ends_where_a_person_scaled_up_meanwhile(self, world: KubernetesWorld) -> None:
        action = await removal(world)

        def scale(verb: str, resource: str) -> None:
            if (verb, resource) == ("update", "deployments/scale"):
                world.server.before = lambda verb, resource: None
                world.server.set_replicas("Deployment", "decode", 5)

        world.server.before = scale
        assert not (await world.actuator.act(world.pool, action)).ok
        assert await world.asked_for(Role.DECODE) == 5
        assert not any(LEAVING in pod["metadata"]["labels"] for pod in world.pods())

    async def test_a_server_that_is_busy_is_asked_again_and_then_left(self, world: KubernetesWorld) -> None:
        world.server.fail("update", "deployments/scale", 429, times=2, headers={"Retry-After": "0"})
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        world.server.fail("update", "deployments/scale", 429, times=100, headers={"Retry-After": "0"})
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert "429" in outcome.detail
        assert await world.asked_for(Role.DECODE) == 4

    @pytest.mark.parametrize("status", [500, 503])
    async def test_a_failing_server_leaves_it_unknown(self, world: KubernetesWorld, status: int) -> None:
        world.server.fail("update", "deployments/scale", status, done=True)
        with pytest.raises(ActuatorError, match=str(status)):
            await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))

    async def test_a_server_that_does_not_answer_is_not_waited_for_beyond_the_deadline(self, server: ApiServer) -> None:
        world = KubernetesWorld(server, deadline_s=1.0)
        server.create([workload("decode", Role.DECODE, 2)])
        server.fail("list", "pods", -1, times=2)
        with pytest.raises(ActuatorError, match=r"within|longer than"):
            await world.actuator.starting(world.pool)
        with pytest.raises(ActuatorError, match=r"within|longer than"):
            await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        await world.close()

    async def test_a_server_that_is_away_comes_back(self, world: KubernetesWorld) -> None:
        port = int(world.server.url.rpartition(":")[2])
        await world.server.stop()
        with pytest.raises(ActuatorError, match="reached"):
            await world.actuator.starting(world.pool)
        await world.server.start(port)
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok

    async def test_a_lost_answer_is_not_followed_by_a_second_removal(self, world: KubernetesWorld) -> None:
        action = await removal(world)
        world.server.controllers.paused = True
        # The HTTP library tries once more.
        world.server.fail("update", "deployments/scale", 0, times=2, done=True)
        with pytest.raises(ActuatorError):
            await world.actuator.act(world.pool, action)
        assert (await world.actuator.act(world.pool, action)).ok
        world.server.controllers.paused = False
        world.server.controllers.run()
        assert await world.asked_for(Role.DECODE) == 2
        assert action.worker not in await world.workers()

    async def test_two_planners_that_remove_the_same_worker_remove_one(self, world: KubernetesWorld) -> None:
        action, other = await removal(world), world.open()

        async def second() -> None:
            outcome = await other.act(world.pool, action)
            # It may look only when the worker has left already.
            assert outcome.ok or "is registered" in outcome.detail

        done = False
        tasks: list[asyncio.Task[None]] = []

        def meanwhile(verb: str, resource: str) -> None:
            nonlocal done
            if (verb, resource) == ("patch", "pods") and not done:
                done = True
                tasks.append(asyncio.create_task(second()))

        world.server.before = meanwhile
        assert (await world.actuator.act(world.pool, action)).ok
        await asyncio.gather(*tasks)
        assert len(tasks) == 1
        assert await world.asked_for(Role.DECODE) == 2
        assert len(world.pods("decode")) == 2
        assert action.worker not in await world.workers()

    async def test_two_planners_that_saw_the_same_and_add_at_once_add_once(self, world: KubernetesWorld) -> None:
        other = world.open()
        outcomes = await asyncio.gather(
            world.actuator.act(world.pool, AddAction(Role.DECODE, 2, WHY)),
            other.act(world.pool, AddAction(Role.DECODE, 2, WHY)),
        )
        # One after the other they ask for four; where both saw three, both want five.
        assert all(outcome.ok for outcome in outcomes)
        told = {outcome.detail for outcome in outcomes}
        assert await world.asked_for(Role.DECODE) == (5 if len(told) == 1 else 7)

    async def test_an_answer_that_is_lost_once_is_found_out(self, world: KubernetesWorld) -> None:
        world.server.fail("update", "deployments/scale", 0, done=True)
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 2, WHY))
        assert outcome.ok
        assert "from 3 to 5" in outcome.detail
        assert await world.asked_for(Role.DECODE) == 5


class As:
    """A leadership that the store confirms until it is `over`."""

    def __init__(self, term: int) -> None:
        self._term = term
        self.over = False

    def term(self, pool: PoolId) -> int:
        return self._term

    async def confirm(self, pool: PoolId) -> int:
        if self.over:
            raise DeposedError("Another planner leads.")
        return self._term


class TestLeaderships:
    async def test_once_a_planner_has_scaled_none_of_an_older_leadership_does(self, world: KubernetesWorld) -> None:
        older, newer = world.open(As(7)), world.open(As(8))
        assert (await older.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        assert (await newer.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await world.settle()
        with pytest.raises(DeposedError, match=f"later leadership.*remove its annotation {TERM}"):
            await older.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        with pytest.raises(DeposedError):
            await older.act(world.pool, await removal(world))
        assert (await newer.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        assert await world.asked_for(Role.DECODE) == 6
        assert not any(LEAVING in pod["metadata"]["labels"] for pod in world.pods())

    async def test_one_that_stood_still_before_it_wrote_is_refused_by_the_version(self, world: KubernetesWorld) -> None:
        older, newer = world.open(As(7)), world.open(As(8))
        assert (await older.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await world.settle()
        action = await removal(world)

        def meanwhile(verb: str, resource: str) -> None:
            if (verb, resource) == ("update", "deployments/scale"):
                world.server.before = lambda verb, resource: None
                # As another one writes it, before it scales.
                written = {"metadata": {"annotations": {TERM: f"{POOL.id}/8"}}}
                world.server.objects.patch("Deployment", "llm", "decode", written)

        world.server.before = meanwhile
        with pytest.raises(DeposedError, match="later leadership"):
            await older.act(world.pool, action)
        assert await world.asked_for(Role.DECODE) == 4
        # Whose choice of a pod the mark is by now, the older one does not know: the newer one clears it.
        assert (await newer.act(world.pool, await removal(world))).ok
        assert sum(LEAVING in pod["metadata"]["labels"] for pod in world.pods()) == 0

    async def test_one_that_learns_that_it_was_replaced_writes_nothing(self, world: KubernetesWorld) -> None:
        mandate = As(7)
        actuator = world.open(mandate)
        assert (await actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await world.settle()
        mandate.over, asked = True, len(world.server.asked)
        for action in (AddAction(Role.DECODE, 1, WHY), await removal(world)):
            with pytest.raises(DeposedError, match="Another planner leads"):
                await actuator.act(world.pool, action)
        assert {verb for verb, _ in world.server.asked[asked:]} <= {"list", "get"}

    async def test_leaderships_of_other_pools_are_not_compared(self, world: KubernetesWorld) -> None:
        assert (await world.open(As(8)).act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        found = world.server.objects.get("Deployment", "llm", "decode")
        assert found["metadata"]["annotations"][TERM] == f"{POOL.id}/8"
        found["metadata"]["annotations"][TERM] = f"{OTHER_POOL.id}/9"
        assert (await world.open(As(7)).act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok

    async def test_a_missing_right_to_write_it_is_named(self, world: KubernetesWorld) -> None:
        world.server.rules = [
            rule | {"verbs": [verb for verb in rule["verbs"] if rule["resources"][0] == "pods" or verb != "patch"]}
            for rule in RULES
        ]
        outcome = await world.open(As(7)).act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert "the verb patch on deployments.apps" in outcome.detail
        assert await world.asked_for(Role.DECODE) == 3


class TestWhatPeopleSay:
    async def test_a_workload_held_by_hand_is_not_scaled(self, world: KubernetesWorld) -> None:
        world.server.objects.get("Deployment", "llm", "decode")["metadata"]["annotations"] = {HOLD: "true"}
        for action in (AddAction(Role.DECODE, 1, WHY), await removal(world)):
            outcome = await world.actuator.act(world.pool, action)
            assert not outcome.ok
            assert HOLD in outcome.detail
        assert await world.asked_for(Role.DECODE) == 3

    async def test_limits_of_a_workload_are_kept(self, world: KubernetesWorld) -> None:
        world.server.objects.get("Deployment", "llm", "decode")["metadata"]["annotations"] = {MAX: "4", MIN: "4"}
        outcome = await world.actuator.act(world.pool, AddAction(Role.DECODE, 3, WHY))
        assert outcome.ok
        assert "2 fewer" in outcome.detail
        assert not (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await world.settle()
        assert not (await world.actuator.act(world.pool, await removal(world))).ok
        assert await world.asked_for(Role.DECODE) == 4
        assert not any(LEAVING in pod["metadata"]["labels"] for pod in world.pods())

    async def test_workloads_of_another_store_namespace_are_left_alone(self, world: KubernetesWorld) -> None:
        world.server.create([workload("theirs", Role.BOTH, 1, namespace="other")])
        outcome = await world.actuator.act(world.pool, AddAction(Role.BOTH, 1, WHY))
        assert not outcome.ok
        assert "vllm-pd/starts-as=both" in outcome.detail


class TestManyPools:
    async def test_a_pool_gets_workers_of_the_workloads_that_serve_it(self, world: KubernetesWorld) -> None:
        world.pool_of["other"] = OTHER_POOL
        world.server.create([workload("other", Role.DECODE, 2)])
        await world.settle()
        assert (await world.actuator.act(OTHER_POOL.id, AddAction(Role.DECODE, 1, WHY))).ok
        assert (world.server.replicas("Deployment", "other"), world.server.replicas("Deployment", "decode")) == (3, 3)
        assert (await world.actuator.act(POOL.id, AddAction(Role.DECODE, 1, WHY))).ok
        assert (world.server.replicas("Deployment", "other"), world.server.replicas("Deployment", "decode")) == (3, 4)
        assert not (await world.actuator.act(OTHER_POOL.id, AddAction(Role.PREFILL, 1, WHY))).ok

    @pytest.mark.parametrize("annotations", [{MODEL: OTHER_POOL.model}, {POOL_NAME: OTHER_POOL.id}])
    async def test_a_workload_without_workers_is_known_by_its_annotations(
        self, world: KubernetesWorld, annotations: dict[str, str]
    ) -> None:
        world.pool_of["other"] = OTHER_POOL
        world.server.create(
            [workload("other", Role.DECODE, 1), workload("spare", Role.PREFILL, 0, annotations=annotations)]
        )
        await world.settle()
        assert (await world.actuator.act(OTHER_POOL.id, AddAction(Role.PREFILL, 1, WHY))).ok
        assert world.server.replicas("Deployment", "spare") == 1
        assert world.server.replicas("Deployment", "prefill") == 2

    async def test_the_first_worker_of_all_can_be_started(self, server: ApiServer) -> None:
        world = KubernetesWorld(server)
        server.create([workload("decode", Role.DECODE, 0)])
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await world.close()


class TestWhatIsStarting:
    async def test_replicas_that_no_pod_could_be_made_for_are_starting(self, world: KubernetesWorld) -> None:
        world.server.controllers.quota = 5
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 2, WHY))).ok
        assert await starting(world, Role.DECODE) == 2
        assert (await world.actuator.give_up(world.pool, Role.DECODE, 2)).ok
        assert await world.asked_for(Role.DECODE) == 3

    async def test_a_pod_that_is_ready_and_not_registered_is_still_starting(self, world: KubernetesWorld) -> None:
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        assert await starting(world, Role.DECODE) == 1
        await world.settle()
        assert await starting(world, Role.DECODE) == 0

    async def test_what_comes_up_while_it_is_given_up_is_what_goes(self, world: KubernetesWorld) -> None:
        before = await world.workers()
        await world.hold_starts()
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok

        def rise(verb: str, resource: str) -> None:
            if (verb, resource) == ("update", "deployments/scale"):
                world.server.controllers.held = False
                world.server.controllers.run()

        world.server.before = rise
        assert (await world.actuator.give_up(world.pool, Role.DECODE, 1)).ok
        assert await world.workers() == before

    @pytest.mark.parametrize("status", [409, 403, 500])
    async def test_one_that_was_to_be_given_up_and_stayed_is_not_the_first_to_go_later(
        self, world: KubernetesWorld, status: int
    ) -> None:
        await world.hold_starts()
        assert (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        world.server.fail("update", "deployments/scale", status, times=3)
        with suppress(ActuatorError):
            assert not (await world.actuator.give_up(world.pool, Role.DECODE, 1)).ok
        world.server.faults.clear()
        await world.let_start()
        chosen = await removal(world)
        assert (await world.actuator.act(world.pool, chosen)).ok
        assert chosen.worker not in await world.workers()
        assert not any(DELETION_COST in pod["metadata"].get("annotations", {}) for pod in world.pods("decode"))

    async def test_role_labels_follow_the_workers(self, world: KubernetesWorld) -> None:
        id, _ = await one_of(world, Role.DECODE)
        moved = world.record(world.pod_of(id), Role.PREFILL)
        await world.registry.heartbeat(moved, LEASE_MS)
        await world.actuator.starting(world.pool)
        roles = {pod["metadata"]["name"]: pod["metadata"]["labels"][ROLE] for pod in world.pods("decode")}
        assert sorted(roles.values()) == ["decode", "decode", "prefill"]
        assert roles[world.pod_of(id)["metadata"]["name"]] == "prefill"
        asked = world.server.asked.count(("patch", "pods"))
        await world.actuator.starting(world.pool)
        assert world.server.asked.count(("patch", "pods")) == asked

    async def test_labels_that_may_not_be_written_hinder_nothing(self, world: KubernetesWorld) -> None:
        world.server.rules = [rule | {"verbs": ["list", "get", "update"]} for rule in RULES]
        assert await world.actuator.starting(world.pool) == []


class TestHowItIsFound:
    async def test_a_kubeconfig_file_leads_to_the_cluster(
        self, world: KubernetesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context = {"cluster": "c", "user": "u", "namespace": "llm"}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": world.server.url}}],
            "users": [{"name": "u", "user": {"token": ApiServer.TOKEN}}],
        }
        path = tmp_path / "config"
        path.write_text(json.dumps(kubeconfig))
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        actuator = kubernetes.open_actuator("", self._context(world))
        assert (await actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
        await actuator.close()

    async def test_without_a_cluster_it_says_what_to_set(
        self, world: KubernetesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        actuator = kubernetes.open_actuator("", self._context(world))
        outcome = await actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))
        assert not outcome.ok
        assert "KUBECONFIG" in outcome.detail

    def test_without_the_client_it_says_what_to_install(
        self, world: KubernetesWorld, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kubernetes, "find_spec", lambda name: None)
        with pytest.raises(SettingsError, match=r"vllm-pd\[kubernetes\]"):
            kubernetes.open_actuator("", self._context(world))

    @staticmethod
    def _context(world: KubernetesWorld) -> ActuatorContext:
        roles = MemoryRoles(STORE_NAMESPACE, world.store)
        return ActuatorContext("redis://127.0.0.1:1", STORE_NAMESPACE, world.registry, roles, 60.0, 120.0)
