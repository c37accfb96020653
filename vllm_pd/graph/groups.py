"""The components of a graph while it runs: which instances each has, who waits for whom, how all of it is.

Nothing here starts or ends anything; that is the supervisor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_pd.errors import GraphError
from vllm_pd.graph import processes, program_args
from vllm_pd.graph.instance import Instance
from vllm_pd.graph.machine import Machine, Place, free_place
from vllm_pd.graph.model import Component, Graph, Kind, Workers
from vllm_pd.graph.ports import LOOPBACK
from vllm_pd.graph.status import ComponentStatus, InstanceStatus, Phase
from vllm_pd.layered import nearest

_GOES_FIRST = [Phase.GIVEN_UP, Phase.BACKOFF, Phase.WAITING, Phase.STARTING, Phase.UNREADY, Phase.READY]


@dataclass(slots=True)
class Group:
    """The instances of one component, those that are leaving among them."""

    component: Component
    needs: frozenset[str]
    """Names of the components that must be there before this one."""
    instances: list[Instance] = field(default_factory=list)
    has_begun: bool = False
    """Whether what it needs was there once; what is lost later is not waited for by those that run."""

    @property
    def name(self) -> str:
        return self.component.label

    @property
    def staying(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.is_leaving]

    def first_to_go(self) -> list[Instance]:
        """Those that stay: first what does not work, then the newest."""
        return sorted(self.staying, key=_worth)


class Groups:
    """All components that are processes, in the order in which they are started."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        components = (component for wave in processes.order(graph) for component in wave)
        self._by_name = {c.label: Group(c, processes.needs(graph, c)) for c in components}

    def __iter__(self) -> Iterator[Group]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Group:
        return self._by_name[name]

    @property
    def instances(self) -> list[Instance]:
        return [instance for group in self for instance in group.instances]

    def of_kind(self, kind: Kind) -> list[Instance]:
        return [i for group in self if group.component.kind is kind for i in group.instances]

    def scalable(self, name: str) -> tuple[Group, Workers]:
        """The group called `name`. Raises GraphError when there is none, or when its size cannot be changed."""
        group = self._by_name.get(name)
        if group is None:
            raise GraphError(f"There is no component {name!r}{self.nearest(name)}.")
        if not isinstance(group.component, Workers):
            raise GraphError(f"{name} is a {group.component.kind}; only workers can be scaled.")
        if self._graph.store is None:
            raise GraphError(
                "The graph has no store, so its frontend knows only the workers that it was started with; "
                "add store: {} to its components."
            )
        return group, group.component

    def free_spots(self, group: Group, component: Workers, count: int, machine: Machine) -> list[tuple[int, Place]]:
        """Numbers and places for further instances; those that are leaving keep theirs until they are gone.

        Raises:
            GraphError: the machine has no room for so many.
        """
        taken = [instance.spot.place for instance in self.instances]
        numbers = {i.spot.number for i in group.instances}
        spots: list[tuple[int, Place]] = []
        for _ in range(count):
            number = next(n for n in range(len(numbers) + 1) if n not in numbers)
            numbers.add(number)
            try:
                place = free_place(machine, taken, gpus=component.gpus, cores=component.cores)
            except GraphError as e:
                raise GraphError(
                    f"{processes.instance_name(component, number)} has no place on this machine: {e}."
                ) from None
            taken.append(place)
            spots.append((number, place))
        return spots

    def worker_urls(self) -> list[tuple[Workers, str]]:
        """Of the workers that stay."""
        return [
            (group.component, f"http://{LOOPBACK}:{instance.spot.port}")
            for group in self
            if isinstance(group.component, Workers)
            for instance in group.staying
        ]

    def nearest(self, name: str) -> str:
        """` (did you mean X?)`, of the names of components and instances."""
        return nearest(name, [*self._by_name, *(instance.name for instance in self.instances)])

    # Who waits for whom.

    def waits_for(self, name: str) -> str:
        """What a component still waits for; "" when its instances may start."""
        group = self._by_name[name]
        if group.has_begun:
            return ""
        for needed in sorted(group.needs):
            staying = self._by_name[needed].staying
            if not staying:
                continue
            if self._is_lost(needed):
                return f"{needed}, which does not come up"
            if unsettled := [i.name for i in staying if not i.is_settled]:
                return ", ".join(unsettled)
            if not any(i.is_up for i in staying):
                return needed
        group.has_begun = True
        return ""

    def _is_stuck(self, name: str) -> bool:
        """Whether something that a component needs will not come up by itself."""
        return any(self._is_lost(needed) for needed in self._by_name[name].needs)

    def _is_lost(self, name: str) -> bool:
        staying = self._by_name[name].staying
        return bool(staying) and all(
            i.phase is Phase.GIVEN_UP or (i.phase is Phase.WAITING and self._is_stuck(name)) for i in staying
        )

    # How they are.

    def instance_statuses(self) -> tuple[InstanceStatus, ...]:
        return tuple(
            instance.status(is_stuck=instance.phase is Phase.WAITING and self._is_stuck(group.name))
            for group in self
            for instance in group.instances
        )

    def component_statuses(self) -> tuple[ComponentStatus, ...]:
        return tuple(self._component_status(group) for group in self)

    def _component_status(self, group: Group) -> ComponentStatus:
        component, staying = group.component, group.staying
        limits = component.limits if isinstance(component, Workers) and self._graph.store is not None else None
        return ComponentStatus(
            name=component.label,
            kind=component.kind,
            wanted=len(staying),
            ready=sum(i.phase is Phase.READY for i in staying),
            model=self._graph.model_of(component) if isinstance(component, Workers) else "",
            min=limits.min if limits else 0,
            max=limits.max if limits else 0,
        )

    def any_failed(self) -> bool:
        """Whether something that is wanted has failed since it was last well."""
        return any(instance.failures for group in self for instance in group.staying)

    def model(self) -> str:
        """What clients name: the first served name of the workers that answer."""
        for workers in self._graph.workers:
            if workers.role.decodes:
                served = program_args.value_of(workers.args, "--served-model-name")
                return served or self._graph.model_of(workers)
        return ""


def _worth(instance: Instance) -> tuple[int, int]:
    place = _GOES_FIRST.index(instance.phase) if instance.phase in _GOES_FIRST else 0
    return place, -instance.spot.number
