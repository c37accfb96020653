"""What a simulation with changing workers shows: how many requests met both targets, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from vllm_pd.sim.cluster import Served
from vllm_pd.sim.planned_run import PlannedRun
from vllm_pd.sim.report import cluster_name, percentile


@dataclass(frozen=True, slots=True)
class PlannedReport:
    """One cell. Times in milliseconds over the requests that ended, unless said otherwise."""

    planner: str
    """`sla fixed`, `dynamo-load scale`, or `static`."""
    cluster: str
    """At the beginning."""
    cold_start_s: float
    arrivals: int
    attained: float
    """Fraction of all arrivals that met both targets: what was turned away, lost or not ended did not."""
    ttft_attained: float
    itl_attained: float
    ended: int
    turned_away: int
    lost: int
    """Answers that broke off and could not be continued."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    """Of the requests' means."""
    itl_p99: float
    handed_over: int
    moves: int
    moves_per_hour: float
    move_mean_s: float
    undone: int
    starts: int
    removed: int
    given_up: int
    died: int
    gpu_hours: float
    """Of workers from when they were asked for until they were gone, up to the last arrival."""
    workers_mean: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarize_planned(planned: PlannedRun) -> PlannedReport:
    """The figures of one run."""
    config, served = planned.config, planned.run.served
    arrivals = planned.arrivals or 1
    ttfts = sorted(request.ttft for request in served)
    itls = sorted(mean_itl(request) for request in served)
    hours = planned.horizon / 3600 or 1.0
    cluster = config.cluster
    moves = planned.moves
    return PlannedReport(
        planner=f"{config.planner.rule} {config.planner.mode}" if config.planner else "static",
        cluster=cluster_name(cluster.workers, cluster.prefill, cluster.decode),
        cold_start_s=config.life.cold_start,
        arrivals=planned.arrivals,
        attained=sum(meets(request, config.ttft_s, config.itl_s) for request in served) / arrivals,
        ttft_attained=sum(request.ttft <= config.ttft_s for request in served) / arrivals,
        itl_attained=sum(mean_itl(request) <= config.itl_s for request in served) / arrivals,
        ended=len(served),
        turned_away=planned.turned_away + planned.run.refused,
        lost=planned.lost,
        ttft_p50=percentile(ttfts, 50) * 1000,
        ttft_p99=percentile(ttfts, 99) * 1000,
        itl_p50=percentile(itls, 50) * 1000,
        itl_p99=percentile(itls, 99) * 1000,
        handed_over=planned.handed_over,
        moves=len(moves),
        moves_per_hour=len(moves) / hours,
        move_mean_s=sum(moves) / len(moves) if moves else 0.0,
        undone=planned.undone,
        starts=planned.starts,
        removed=planned.removed,
        given_up=planned.given_up,
        died=planned.died,
        gpu_hours=planned.gpu_seconds / 3600,
        workers_mean=planned.gpu_seconds / (planned.horizon or 1.0),
    )


def mean_itl(request: Served) -> float:
    """Seconds between two tokens of a request, pauses included; 0 for an answer of one token."""
    return (request.finished - request.first_token) / (request.output - 1) if request.output > 1 else 0.0


def meets(request: Served, ttft_s: float, itl_s: float) -> bool:
    """Whether a request that has ended met both targets."""
    return request.ttft <= ttft_s and mean_itl(request) <= itl_s


_COLUMNS: tuple[tuple[str, Callable[[PlannedReport], str]], ...] = (
    ("planner", lambda r: r.planner),
    ("workers", lambda r: r.cluster),
    ("cold start", lambda r: f"{r.cold_start_s:g} s"),
    ("met both", lambda r: f"{r.attained:.1%}"),
    ("TTFT", lambda r: f"{r.ttft_attained:.1%}"),
    ("ITL", lambda r: f"{r.itl_attained:.1%}"),
    ("TTFT p50", lambda r: f"{r.ttft_p50:.0f}"),
    ("p99", lambda r: f"{r.ttft_p99:.0f}"),
    ("ITL p50", lambda r: f"{r.itl_p50:.1f}"),
    ("p99", lambda r: f"{r.itl_p99:.1f}"),
    ("GPU hours", lambda r: f"{r.gpu_hours:.2f}"),
    ("mean", lambda r: f"{r.workers_mean:.1f}"),
    ("moves/h", lambda r: f"{r.moves_per_hour:.1f}"),
    ("each", lambda r: f"{r.move_mean_s:.0f} s"),
    ("undone", lambda r: str(r.undone)),
    ("started", lambda r: str(r.starts)),
    ("removed", lambda r: str(r.removed)),
    ("given up", lambda r: str(r.given_up)),
    ("died", lambda r: str(r.died)),
    ("handed over", lambda r: str(r.handed_over)),
    ("lost", lambda r: str(r.lost)),
    ("turned away", lambda r: str(r.turned_away)),
    ("not ended", lambda r: str(r.arrivals - r.ended - r.lost - r.turned_away)),
)


def planned_table(reports: Sequence[PlannedReport]) -> list[tuple[str, ...]]:
    """The head, then one row a report; times in ms unless a unit is given."""
    return [tuple(name for name, _ in _COLUMNS), *(tuple(cell(report) for _, cell in _COLUMNS) for report in reports)]
