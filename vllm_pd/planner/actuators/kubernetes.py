"""The actuator `kubernetes`: adds workers by scaling a Deployment or StatefulSet, and removes exactly the one that is
meant.

Kubernetes chooses whom it deletes when replicas are reduced. The pod of the worker that is to go therefore gets the
lowest deletion cost first, and nothing is reduced while Kubernetes would still take another: one that is not ready, or
any during a rollout. The pod then ends as every pod does: on SIGTERM its worker leaves the store, routers send it
nothing more, and what it has begun finishes within the pod's grace period.

Replicas are read and written with their version: what a person or another planner changes in between wins. Before a
planner scales a workload it writes its leadership's number (its term) into an annotation of it, also with the version
that it read, and gives way to a larger one. So once a planner has scaled a workload, none of an older leadership does,
however long it stood still in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vllm_pd.errors import ActuatorError, DeposedError, SettingsError, StoreError
from vllm_pd.planner.actuator import Outcome
from vllm_pd.planner.actuators import kubernetes_model as model
from vllm_pd.planner.actuators.context import ActuatorContext
from vllm_pd.planner.actuators.known_start import another_start
from vllm_pd.planner.actuators.kubernetes_cluster import Cluster, Conflict, NotKnown, Refused, Unanswered
from vllm_pd.planner.actuators.kubernetes_model import Pod, Seen, Workload
from vllm_pd.planner.mandate import ANYBODY, Mandate
from vllm_pd.planner.model import Action, AddAction, MoveAction, RemoveAction, StartView
from vllm_pd.state.base import PoolId, Registry, Role, WorkerRecord

if TYPE_CHECKING:
    from vllm_pd.planner.actuators.kubernetes_client import OfficialCluster

logger = logging.getLogger(__name__)

_WRITES = 3
"""How often a change is tried when only something else about the workload, its status say, changed in between."""


class _Changed(Refused):
    """Somebody else scaled the workload meanwhile."""

    def __init__(self, workload: Workload, before: int, now: int) -> None:
        super().__init__(
            f"Somebody else set the replicas of {workload} from {before} to {now} meanwhile; that stands, and the next "
            "step looks again."
        )
        self.before, self.now = before, now


Change = Callable[[int], int]
"""From the replicas there are to those wanted. Raises Refused."""


class KubernetesActuator:
    """Scales the workloads of one Kubernetes namespace, and keeps the role labels of their pods.

    Args:
        connect: gives the cluster, at the first use. Raises SettingsError, Refused or Unanswered.
        registry: where the workers are registered. Stays open.
        deadline_s: of one call of a method, seconds.
        mandate: in whose name it acts.
    """

    name = "kubernetes"

    def __init__(
        self,
        connect: Callable[[], Awaitable[Cluster]],
        registry: Registry,
        *,
        deadline_s: float,
        mandate: Mandate = ANYBODY,
    ) -> None:
        self._connect = connect
        self._cluster: Cluster | None = None
        self._registry = registry
        self._deadline_s = deadline_s
        self._mandate = mandate
        self._label_refusal = ""

    def can(self, action: Action) -> bool:
        return isinstance(action, AddAction | RemoveAction)

    async def act(self, pool: PoolId, action: Action) -> Outcome:
        match action:
            case AddAction():
                return await self._bounded(self._add(pool, action))
            case RemoveAction():
                return await self._bounded(self._remove(pool, action))
            case MoveAction():
                return Outcome(False, "Kubernetes starts and ends pods; roles are moved by the actuator roles.")

    async def starting(self, pool: PoolId) -> Sequence[StartView]:
        """Pods whose worker has not registered, and replicas that have no pod yet. On the way the role labels of the
        pods are brought up to date."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._starting(pool)
        except NotKnown as e:
            await self.close()
            raise ActuatorError(str(e)) from None
        except (Refused, Conflict, Unanswered, SettingsError, StoreError) as e:
            raise ActuatorError(str(e)) from None
        except TimeoutError:
            raise ActuatorError(self._late) from None

    async def give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        return await self._bounded(self._give_up(pool, role, count))

    async def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await cluster.close()

    @property
    def _late(self) -> str:
        return f"The Kubernetes API server took longer than {self._deadline_s:g} s; what came of it is not known."

    async def _bounded(self, work: Awaitable[Outcome]) -> Outcome:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work
        except NotKnown as e:
            # The next use connects anew, with the credentials that there are then.
            await self.close()
            return Outcome(False, str(e))
        except (Refused, Conflict, SettingsError) as e:
            return Outcome(False, str(e))
        except (Unanswered, StoreError) as e:
            raise ActuatorError(str(e)) from None
        except TimeoutError:
            raise ActuatorError(self._late) from None

    async def _open(self) -> Cluster:
        if self._cluster is None:
            self._cluster = await self._connect()
        return self._cluster

    async def _look(self) -> tuple[Cluster, Seen, list[WorkerRecord]]:
        cluster = await self._open()
        seen = await cluster.look()
        return cluster, seen, model.records_of(await self._registry.snapshot())

    async def _add(self, pool: PoolId, action: AddAction) -> Outcome:
        cluster, seen, records = await self._look()
        fitting = [w for w in model.workloads_of(pool, seen, records) if w.starts_as is action.role]
        if not fitting:
            raise Refused(
                f"No Deployment or StatefulSet starts {action.role} workers of pool {pool}; give one, and its pod "
                f"template, the label {model.STARTS_AS}={action.role}."
            )
        free = [w for w in fitting if not w.is_held and w.replicas < w.most]
        if not free:
            raise Refused(" ".join(_closed(w) for w in fitting))
        workload = max(free, key=lambda w: w.most - w.replicas)

        def more(replicas: int) -> int:
            if replicas >= workload.most:
                raise Refused(_closed(workload))
            return min(replicas + action.count, workload.most)

        before, after = await self._rescale(cluster, pool, await self._claim(cluster, pool, workload), more)
        short = action.count - (after - before)
        limit = f" {short} fewer than asked for: {model.MAX} is {workload.most}." if short else ""
        return Outcome(True, f"{workload} goes from {before} to {after} replicas.{limit}")

    async def _remove(self, pool: PoolId, action: RemoveAction) -> Outcome:
        cluster, seen, _ = await self._look()
        pod = model.pod_of(action.worker, action.epoch, seen.pods)
        if pod is not None and pod.is_terminating:
            return Outcome(True, f"Pod {pod.name} is ending already; it has {pod.grace_s} s for what it has begun.")
        if (refused := await another_start(self._registry, pool, action)) is not None:
            return refused
        if pod is None or (workload := seen.owner(pod)) is None:
            raise Refused(
                f"No pod of a workload with the label {model.STARTS_AS} serves as {action.worker}; it runs elsewhere, "
                "or its pod was deleted."
            )
        if model.is_on_its_way(pod, workload, seen):
            return Outcome(True, f"{workload} was reduced for pod {pod.name} already.")
        if workload.is_held:
            raise Refused(_closed(workload))
        if why := model.obstacle(pod, workload, seen):
            raise Refused(f"{action.worker} stays for now: {why}.")
        # Before pods are marked: of two planners only the newer one gets beyond this.
        workload = await self._claim(cluster, pool, workload)
        await self._clear_stale(cluster, pool, workload, pod, seen)
        await self._mark(cluster, pool, pod)

        def one_less(replicas: int) -> int:
            if replicas <= workload.least:
                raise Refused(f"{workload} has {replicas} replicas and {model.MIN} is {workload.least}.")
            return replicas - 1

        try:
            before, after = await self._rescale(cluster, pool, workload, one_less)
        except _Changed as e:
            if e.now > e.before:
                await self._unmark(cluster, pod)
                raise
            # Whoever reduced them, and for whichever reason: this pod is the one that goes.
            before, after = e.before, e.now
        except (Refused, Conflict):
            await self._unmark(cluster, pod)
            raise
        return Outcome(
            True,
            f"{workload} goes from {before} to {after} replicas, and pod {pod.name} goes first; it has {pod.grace_s} s "
            "for what it has begun.",
        )

    async def _starting(self, pool: PoolId) -> Sequence[StartView]:
        cluster, seen, records = await self._look()
        by_pod = model.serving(records, seen.pods)
        views = []
        for workload in model.workloads_of(pool, seen, records):
            pods, missing = model.waiting(workload, seen, by_pod.keys())
            if pods or missing:
                # What has no pod yet was asked for after everything that has one.
                longest = max((model.waited_s(pod, seen) for pod in pods), default=0.0)
                views.append(StartView(workload.starts_as, len(pods) + missing, longest))
        await self._label(cluster, [(pod, by_pod[pod.uid].role) for pod in seen.pods if pod.uid in by_pod])
        return views

    async def _give_up(self, pool: PoolId, role: Role, count: int) -> Outcome:
        cluster, seen, records = await self._look()
        up = model.serving(records, seen.pods)
        said: list[str] = []
        for workload in model.workloads_of(pool, seen, records):
            if workload.starts_as is not role or count <= 0:
                continue
            pods, missing = model.to_give_up(workload, seen, up.keys(), count)
            less = min(len(pods) + missing, max(0, workload.replicas - workload.least))
            if not less:
                continue
            if workload.is_held:
                raise Refused(_closed(workload))
            claimed = await self._claim(cluster, pool, workload)
            if claimed.replicas != workload.replicas:
                raise _Changed(workload, workload.replicas, claimed.replicas)
            marked: list[Pod] = []

            def fewer(replicas: int, by: int = less) -> int:
                return replicas - by

            try:
                for pod in pods:
                    # One that comes up in this moment is still the one that goes.
                    await self._mark(cluster, pool, pod)
                    marked.append(pod)
                before, after = await self._rescale(cluster, pool, claimed, fewer)
            except (Refused, Conflict):
                # They stay, and must not be the first to go later.
                for pod in marked:
                    await self._unmark(cluster, pod)
                raise
            said.append(f"{workload} goes from {before} to {after} replicas.")
            count -= less
        return Outcome(True, " ".join(said) or f"No {role} worker is on its way any more.")

    async def _claim(self, cluster: Cluster, pool: PoolId, workload: Workload) -> Workload:
        """The workload as it is now, with the planner's leadership written on it.

        Raises:
            DeposedError: a newer leadership is on it.
        """
        for _ in range(_WRITES):
            now = await cluster.read(workload)
            term, there = self._mandate.term(pool), now.term_of(pool)
            if term and there > term:
                raise DeposedError(
                    f"{workload} was scaled in a later leadership of pool {pool} ({there}, this planner's is {term}); "
                    f"if that was with a store of another clock, remove its annotation {model.TERM}."
                )
            if term == there or not term:
                return now
            await self._mandate.confirm(pool)
            try:
                return await cluster.annotate(now, {model.TERM: f"{pool}/{term}"})
            except Conflict:
                continue
        raise _restless(workload)

    async def _rescale(self, cluster: Cluster, pool: PoolId, workload: Workload, change: Change) -> tuple[int, int]:
        """Replicas before and after. `workload`: as just claimed.

        Raises:
            Refused: `change` does not want it, or somebody else changed the replicas meanwhile.
            DeposedError: another planner leads by now.
        """
        before = workload.replicas
        after = before
        for tried in range(_WRITES):
            if tried and workload.replicas == after != before:
                # By this write, whose answer was lost on the way, or by somebody who wants the same.
                return before, after
            if workload.replicas != before:
                raise _Changed(workload, before, workload.replicas)
            after = change(before)
            await self._mandate.confirm(pool)
            try:
                await cluster.set_scale(workload, after)
                return before, after
            except Conflict:
                workload = await self._claim(cluster, pool, workload)
        raise _restless(workload)

    async def _clear_stale(self, cluster: Cluster, pool: PoolId, workload: Workload, chosen: Pod, seen: Seen) -> None:
        """A planner that ended between two steps may have left a mark on a pod that then stayed."""
        for pod in seen.of(workload):
            stale = model.LEAVING in pod.labels and not model.is_on_its_way(pod, workload, seen)
            if stale and pod.uid != chosen.uid:
                await self._mandate.confirm(pool)
                await self._unmark(cluster, pod)

    async def _mark(self, cluster: Cluster, pool: PoolId, pod: Pod) -> None:
        """So that Kubernetes takes it first among those that are as ready as it is."""
        await self._mandate.confirm(pool)
        cost = {model.DELETION_COST: model.LOWEST_COST}
        await cluster.mark(pod, labels={model.LEAVING: "true"}, annotations=cost)

    async def _unmark(self, cluster: Cluster, pod: Pod) -> None:
        try:
            await cluster.mark(pod, labels={model.LEAVING: None}, annotations={model.DELETION_COST: None})
        except (Refused, Conflict, Unanswered) as e:
            # It only means that this pod would be the first to go; the next removal clears it.
            logger.warning("The mark of pod %s could not be taken back: %s", pod.name, e)

    async def _label(self, cluster: Cluster, roles: Sequence[tuple[Pod, Role]]) -> None:
        """For people only: what goes wrong is said once and changes nothing."""
        for pod, role in roles:
            if pod.labels.get(model.ROLE) == role or pod.is_terminating:
                continue
            try:
                await cluster.mark(pod, labels={model.ROLE: str(role)})
            except Conflict:
                continue
            except (Refused, Unanswered) as e:
                if str(e) != self._label_refusal:
                    self._label_refusal = str(e)
                    logger.warning("The role label of pod %s is out of date: %s", pod.name, e)
                return


def _restless(workload: Workload) -> Refused:
    return Refused(f"{workload} changed {_WRITES} times while it was to be scaled; it is tried at the next step.")


def _closed(workload: Workload) -> str:
    if workload.is_held:
        return f"{workload} is held by a person; remove its annotation {model.HOLD} to have it scaled."
    return f"{workload} has {workload.replicas} replicas and {model.MAX} is {workload.most}."


def open_actuator(argument: str, context: ActuatorContext) -> KubernetesActuator:
    """`argument` is the Kubernetes namespace; "" stands for that of this pod, or of the kubeconfig file.

    Raises:
        SettingsError: the client is not installed, or the namespace of the store does not fit into a label.
    """
    if find_spec("kubernetes") is None:
        raise SettingsError("The actuator kubernetes needs the Kubernetes client: pip install 'vllm-pd[kubernetes]'.")
    from vllm_pd.planner.actuators.kubernetes_client import OfficialCluster, connect, selector_for

    selector = selector_for(context.namespace)

    async def cluster() -> OfficialCluster:
        settings, namespace = await connect(namespace=argument)
        # Several requests make one call of the actuator.
        return OfficialCluster(settings, namespace, selector=selector, deadline_s=context.deadline_s / 2)

    return KubernetesActuator(cluster, context.registry, deadline_s=context.deadline_s, mandate=context.mandate)
