"""What is done to whom: every fault of the matrix as a blow, what follows it while the load goes on, and its repair."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tests.faults.cluster import Cluster, Member, eventually
from tests.faults.link import Link
from tests.faults.phases import Phase
from tests.faults.shot import Outcome, Shot
from vllm_pd.graph import proc_tree
from vllm_pd.graph.proc_tree import ProcessId
from vllm_pd.graph.process import ManagedProcess
from vllm_pd.state.base import Role


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds."""

    silent: float = 20.0
    """A stopped process stays stopped, and a stalled link stalled."""
    slow: float = 10.0
    down: float = 8.0
    """A store that was killed is away, and half as long a network."""
    after: float = 6.0
    """The load goes on after everything was done; twice as long where somebody died."""


FULL = Pace()
QUICK = Pace(silent=7.0, slow=3.0, down=2.0, after=2.0)
DRAIN_S = 45.0
"""What a process may take to leave after SIGTERM: its grace is 30 s."""
_SLICE_S = 0.05
_SLOW_SHARE = 4
_LINK_LATENCY_S = 0.05


class Target(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    STORE = "store"
    NETWORK = "network"


class Fault(StrEnum):
    KILL = "SIGKILL"
    STOP = "SIGSTOP 20 s"
    TERM = "SIGTERM"
    RESTART = "restart"
    RESET = "connection reset"
    SLOW = "slow"
    ENGINE_KILL = "SIGKILL of the engine only"
    ENGINE_STOP = "SIGSTOP of the engine only, 20 s"


MATRIX = [
    *[(target, fault) for target in Target for fault in list(Fault)[:6]],
    *[(target, fault) for target in (Target.PREFILL, Target.DECODE) for fault in list(Fault)[6:]],
]

NETWORK_MEANING = {
    Fault.KILL: "refuses everything for 4 s",
    Fault.STOP: "passes nothing for 20 s",
    Fault.TERM: "closes its connections in order",
    Fault.RESTART: "is down for a moment",
    Fault.RESET: "resets its connections",
    Fault.SLOW: "takes 50 ms for each 4 KiB, for 10 s",
}
"""What a link does in place of a process's signal."""


@dataclass(slots=True)
class Injection:
    """`strike` is quick; each of `then` runs after it, with its delay in seconds counted from the one before."""

    strike: Callable[[], None]
    then: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    victims: frozenset[str] = frozenset()
    """Names of the workers it hits."""


def plan(cluster: Cluster, target: Target, fault: Fault, victim: Member | None, pace: Pace = FULL) -> Injection:
    """The injection for a cell of the matrix; `victim` is the worker it concerns, if any."""
    if target in (Target.PREFILL, Target.DECODE):
        assert victim is not None
        made = _worker(cluster, fault, victim, pace)
        made.victims = frozenset({victim.name})
        return made
    if target is Target.ROUTER:
        return _router(cluster, fault, pace)
    if target is Target.STORE:
        return _store(cluster, fault, pace)
    # One half of the cluster is behind the bad link, so that everybody can still be served.
    half = [cluster.of_role(role)[-1] for role in (Role.PREFILL, Role.DECODE)]
    made = _links([member.link for member in half if member.link is not None], fault, pace)
    made.victims = frozenset(member.name for member in half)
    return made


def _worker(cluster: Cluster, fault: Fault, victim: Member, pace: Pace) -> Injection:
    process, link = victim.process, victim.link

    def killed() -> None:
        victim.signal(signal.SIGKILL)
        # Its port refuses from now on, as it would without the link before it.
        if link is not None:
            link.down()

    def ended() -> None:
        assert eventually(lambda: not process.is_running, DRAIN_S), f"{victim.name} did not end after SIGTERM"
        if link is not None:
            link.down()

    def back() -> None:
        process.kill()
        cluster.restart(victim)
        cluster.wait_for(victim)

    if fault is Fault.KILL:
        return Injection(killed, [(2 * pace.after, lambda: None)])
    if fault is Fault.STOP:
        return Injection(
            lambda: victim.signal(signal.SIGSTOP),
            [(pace.silent, lambda: victim.signal(signal.SIGCONT)), (pace.after, lambda: None)],
        )
    if fault is Fault.TERM:
        return Injection(process.terminate, [(0.0, ended), (pace.after, lambda: None)])
    if fault is Fault.RESTART:
        return Injection(process.terminate, [(0.0, ended), (0.0, back), (pace.after, lambda: None)])
    if fault is Fault.SLOW:
        return Injection(lambda: None, [(0.0, lambda: _starve(victim.family, pace)), (pace.after, lambda: None)])
    if fault is Fault.RESET:
        return _links([link] if link is not None else [], fault, pace)
    engine = victim.engine()
    assert engine, f"{victim.name} has no engine process"
    if fault is Fault.ENGINE_KILL:
        return Injection(lambda: proc_tree.send(engine, signal.SIGKILL), [(2 * pace.after, lambda: None)])
    return Injection(
        lambda: proc_tree.send(engine, signal.SIGSTOP),
        [(pace.silent, lambda: proc_tree.send(engine, signal.SIGCONT)), (pace.after, lambda: None)],
    )


def _router(cluster: Cluster, fault: Fault, pace: Pace) -> Injection:
    router = cluster.router
    assert router is not None
    leader = proc_tree.identify(router.pid)
    assert leader is not None
    family = proc_tree.family(leader)

    def started_again() -> None:
        router.kill()
        cluster.start_router()
        cluster.front.heal()

    def killed() -> None:
        proc_tree.send(family, signal.SIGKILL)
        cluster.front.down()

    def ended() -> None:
        assert eventually(lambda: not router.is_running, DRAIN_S), "the router did not end after SIGTERM"

    if fault is Fault.KILL:
        return Injection(killed, [(1.0, started_again), (pace.after, lambda: None)])
    if fault is Fault.STOP:
        return Injection(
            lambda: proc_tree.send(family, signal.SIGSTOP),
            [(pace.silent, lambda: proc_tree.send(family, signal.SIGCONT)), (pace.after, lambda: None)],
        )
    if fault is Fault.TERM:
        return Injection(router.terminate, [(0.0, ended), (0.0, started_again), (pace.after, lambda: None)])
    if fault is Fault.RESTART:
        # An impatient supervisor.
        return Injection(router.terminate, [(1.0, killed), (0.0, started_again), (pace.after, lambda: None)])
    if fault is Fault.SLOW:
        return Injection(lambda: None, [(0.0, lambda: _starve(family, pace)), (pace.after, lambda: None)])
    return _links([cluster.front], fault, pace)


def _store(cluster: Cluster, fault: Fault, pace: Pace) -> Injection:
    store, link = cluster.store, cluster.store_link

    def killed() -> None:
        store.kill()
        link.down()

    def stopped() -> None:
        store.stop()
        link.down()

    def started() -> None:
        store.start()
        link.heal()

    quiet = (pace.after, lambda: None)
    if fault is Fault.KILL:
        return Injection(killed, [(pace.down, started), quiet])
    if fault is Fault.STOP:
        return Injection(store.pause, [(pace.silent, store.resume), quiet])
    if fault is Fault.TERM:
        return Injection(stopped, [(pace.down / 2, started), quiet])
    if fault is Fault.RESTART:
        return Injection(killed, [(0.0, started), quiet])
    return _links([link], fault, pace)


def _links(links: list[Link], fault: Fault, pace: Pace) -> Injection:
    def each(name: str, *args: float) -> Callable[[], None]:
        def run() -> None:
            for link in links:
                getattr(link, name)(*args)

        return run

    quiet = (pace.after, lambda: None)
    if fault is Fault.KILL:
        return Injection(each("down"), [(pace.down / 2, each("heal")), quiet])
    if fault is Fault.STOP:
        return Injection(each("stall"), [(pace.silent, each("heal")), quiet])
    if fault is Fault.TERM:
        return Injection(each("close_all"), [quiet])
    if fault is Fault.RESTART:
        return Injection(each("down"), [(0.2, each("heal")), quiet])
    if fault is Fault.RESET:
        return Injection(each("reset"), [(0.5, each("reset")), (0.5, each("reset")), quiet])
    return Injection(each("slow", _LINK_LATENCY_S), [(pace.slow, each("heal")), quiet])


def _starve(processes: frozenset[ProcessId], pace: Pace) -> None:
    """Let the processes run a quarter of the time, for a while."""
    end = time.monotonic() + pace.slow
    pause = threading.Event()
    try:
        while time.monotonic() < end:
            proc_tree.send(processes, signal.SIGSTOP)
            pause.wait(_SLICE_S * (_SLOW_SHARE - 1))
            proc_tree.send(processes, signal.SIGCONT)
            pause.wait(_SLICE_S)
    finally:
        proc_tree.send(processes, signal.SIGCONT)


def repair(cluster: Cluster) -> None:
    """Bring everything back that does not run, and wait until the router uses all of it."""
    cluster.store.start()
    cluster.store_link.heal()
    dead = [member for member in cluster.members if not _is_well(member)]
    for member in dead:
        member.process.kill()
        cluster.restart(member)
    for member in dead:
        cluster.wait_for(member)
    if cluster.router is not None and not cluster.router.is_running:
        cluster.start_router()
    cluster.front.heal()
    cluster.wait_whole()


def _is_well(member: Member) -> bool:
    """Whether it runs with all of its processes; a server whose engine died ends by itself."""
    process: ManagedProcess = member.process
    return process.is_running and all(proc_tree.is_alive(each) for each in member.family)


def allowed(target: Target, fault: Fault, shot: Shot, phase: Phase | None) -> bool:
    """Whether a request may have ended as it did.

    Args:
        phase: where it was at the blow; None: it was not under way.
    """
    outcome = shot.outcome
    if outcome in (Outcome.OK, Outcome.LEFT):
        return True
    if outcome is Outcome.ENDED:
        # Nothing can go on exactly with it, and the client has a part already.
        return target in (Target.DECODE, Target.NETWORK) and shot.stream and not shot.can_continue and bool(shot.first)
    if target is not Target.ROUTER:
        return False
    # One router is all there is: while it is away nobody is served, and what it held in memory goes with it.
    if fault is Fault.TERM:
        # The link before it takes connections that it cannot pass on, and resets them.
        is_refused = outcome is Outcome.UNREACHABLE or (outcome is Outcome.BROKEN and not shot.status)
        return (is_refused and phase is None) or (outcome is Outcome.REFUSED and shot.status == 503)
    if fault in (Fault.KILL, Fault.RESTART):
        return outcome in (Outcome.UNREACHABLE, Outcome.BROKEN) or (outcome is Outcome.REFUSED and shot.status == 503)
    return fault is Fault.RESET and outcome is Outcome.BROKEN
