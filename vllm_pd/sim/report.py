"""What a simulation shows, per cell: times to the first token and between tokens, cache hits, how even the load was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from vllm_pd.routing.split_rule import Disagg
from vllm_pd.sim.cluster import ITL_RESOLUTION, Run


@dataclass(frozen=True, slots=True)
class Report:
    """One cell: a policy, a cluster and an arrival speed. Times in milliseconds, over the requests that were served."""

    policy: str
    cluster: str
    """`4` workers, or `2P+2D`."""
    disagg: str
    """By which rule requests are split; "" where no worker only prefills."""
    split: float
    """Part of the requests that were."""
    speed: float
    requests: int
    refused: int
    """Requests that no worker's cache can hold; they are in no other figure."""
    unfinished: int
    """Requests that never ended. Not 0 means that something is wrong: the simulation waits for all."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_curve: tuple[float, ...]
    """Percentiles 0, 1, ..., 100."""
    request_mean: float
    """From its arrival to its last token."""
    itl_mean: float
    """Over all tokens but the first of each request, pauses by preemption included."""
    itl_p50: float
    """Of single gaps; the pause of a preempted request is not one."""
    itl_p99: float
    hit_gpu: float
    """Part of all prompt tokens found in the GPU cache of the worker that computed the prompt; then CPU and SSD."""
    hit_cpu: float
    hit_ssd: float
    share_max: float
    """Requests of the worker with most, over the mean; with P/D the larger of both roles."""
    busy_max: float
    """The same of the seconds computed."""
    utilization: float
    """Mean part of the time that a worker computed."""
    preemptions: int
    makespan_s: float
    """From the first arrival to the last token."""
    output_tokens_per_s: float

    @property
    def label(self) -> str:
        """The policy, with the rule unless that is the router's default."""
        return f"{self.policy}, {self.disagg}" if self.disagg not in ("", Disagg.AUTO) else self.policy

    @property
    def hits(self) -> float:
        return self.hit_gpu + self.hit_cpu + self.hit_ssd

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarize(run: Run) -> Report:
    """The figures of one run."""
    config, served = run.config, run.served
    ttfts = sorted(request.ttft * 1000 for request in served)
    curve = tuple(percentile(ttfts, q) for q in range(101))
    prompt = sum(request.prompt for request in served) or 1
    gaps = sum(request.output - 1 for request in served)
    stream_seconds = sum(request.finished - request.first_token for request in served)
    groups = [range(config.workers)] if config.workers else []
    if config.prefill or config.decode:
        groups += [range(config.workers, config.workers + config.prefill)]
        groups += [range(config.workers + config.prefill, len(config.roles))]
    counts = [0] * len(config.roles)
    for request in served:
        counts[request.worker] += 1
        if request.prefiller >= 0:
            counts[request.prefiller] += 1
    outputs = sum(request.output for request in served)
    span = run.makespan or 1.0
    return Report(
        policy=config.policy,
        cluster=cluster_name(config.workers, config.prefill, config.decode),
        disagg=str(config.rule.name) if config.prefill else "",
        split=sum(request.prefiller >= 0 for request in served) / (len(served) or 1),
        speed=config.speed,
        requests=len(served),
        refused=run.refused,
        unfinished=run.unfinished,
        ttft_mean=sum(ttfts) / len(ttfts) if ttfts else 0.0,
        ttft_p50=curve[50],
        ttft_p90=curve[90],
        ttft_p99=curve[99],
        ttft_curve=curve,
        request_mean=sum(request.finished - request.arrived for request in served) * 1000 / (len(served) or 1),
        itl_mean=stream_seconds * 1000 / gaps if gaps else 0.0,
        itl_p50=_weighted_percentile(run, 50),
        itl_p99=_weighted_percentile(run, 99),
        hit_gpu=sum(request.gpu for request in served) / prompt,
        hit_cpu=sum(request.cpu for request in served) / prompt,
        hit_ssd=sum(request.ssd for request in served) / prompt,
        share_max=max((_uneven([counts[i] for i in group]) for group in groups), default=0.0),
        busy_max=max((_uneven([run.busy[i] for i in group]) for group in groups), default=0.0),
        utilization=sum(run.busy) / len(run.busy) / span,
        preemptions=run.preemptions,
        makespan_s=run.makespan,
        output_tokens_per_s=outputs / span,
    )


def cluster_name(workers: int, prefill: int, decode: int) -> str:
    parts = [str(workers)] if workers else []
    if prefill or decode:
        parts.append(f"{prefill}P+{decode}D")
    return "+".join(parts)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank, of values in ascending order; 0 when there are none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 100) - 1))]


def _weighted_percentile(run: Run, q: float) -> float:
    total = sum(run.gaps.values())
    seen = 0
    for gap, count in sorted(run.gaps.items()):
        seen += count
        if seen * 100 >= q * total:
            return gap * ITL_RESOLUTION * 1000
    return 0.0


def _uneven(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 0.0


_COLUMNS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("policy", lambda r: r.policy),
    ("workers", lambda r: r.cluster),
    ("disagg", lambda r: r.disagg or "-"),
    ("speed", lambda r: f"x{r.speed:g}"),
    ("split", lambda r: f"{r.split:.0%}"),
    ("TTFT mean", lambda r: f"{r.ttft_mean:.0f}"),
    ("p50", lambda r: f"{r.ttft_p50:.0f}"),
    ("p90", lambda r: f"{r.ttft_p90:.0f}"),
    ("p99", lambda r: f"{r.ttft_p99:.0f}"),
    ("request", lambda r: f"{r.request_mean:.0f}"),
    ("ITL mean", lambda r: f"{r.itl_mean:.1f}"),
    ("p99", lambda r: f"{r.itl_p99:.1f}"),
    ("hit GPU", lambda r: f"{r.hit_gpu:.1%}"),
    ("CPU", lambda r: f"{r.hit_cpu:.1%}"),
    ("SSD", lambda r: f"{r.hit_ssd:.1%}"),
    ("share max", lambda r: f"{r.share_max:.2f}"),
    ("busy", lambda r: f"{r.utilization:.0%}"),
    ("preempted", lambda r: str(r.preemptions)),
    ("refused", lambda r: str(r.refused)),
    ("unfinished", lambda r: str(r.unfinished)),
    ("ends", lambda r: f"{r.makespan_s:.0f} s"),
)


def table(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    """The head, then one row a report; times in ms."""
    return [tuple(name for name, _ in _COLUMNS), *(tuple(cell(report) for _, cell in _COLUMNS) for report in reports)]
