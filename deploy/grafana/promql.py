"""PromQL that several panels write in the same way.

Routers that share a store say the same of workers, queues and blocks: of those the largest is taken, not the sum.
Rates of what has not happened yet have no series; such queries end in a zero, so that a panel is never empty for joy.
"""

from __future__ import annotations

_RANGE = "[$__rate_interval]"
POOL = 'pool=~"$pool"'
WORKER = 'worker=~"$worker"'
OF_WORKERS = f"{POOL}, {WORKER}"
"""Of series that were scraped from workers."""
FAILED = 'status=~"5.."'
FROM_CACHES = 'source!="local_compute"'
INFERENCE = 'endpoint!~"/health|/ready|/metrics|/v1/models|/v1/sd|/v1/explain|/v1/roles|/v1/planner|other"'


def rate(counter: str, labels: str = "") -> str:
    """Growth a second of each series."""
    return f"rate({counter}{{{labels}}}{_RANGE})" if labels else f"rate({counter}{_RANGE})"


def total(counter: str, labels: str = "") -> str:
    """Growth a second of all series together, 0 when there is none."""
    return f"sum({rate(counter, labels)}) or vector(0)"


def by(label: str, counter: str, labels: str = "") -> str:
    """Growth a second by `label`."""
    return f"sum by ({label}) ({rate(counter, labels)})"


def troubles(label: str, counter: str, labels: str = "") -> str:
    """Likewise for what should not happen: a line at 0 with the value `none` as long as it has not."""
    return f'{by(label, counter, labels)} or label_replace(vector(0), "{label}", "none", "", "")'


def quantile(q: float, histogram: str, labels: str = "", *, per: str = "") -> str:
    """Of a histogram, over all series or per label."""
    groups = f"le, {per}" if per else "le"
    return f"histogram_quantile({q:g}, sum by ({groups}) ({rate(f'{histogram}_bucket', labels)}))"


def mean(histogram: str, labels: str = "", *, per: str = "") -> str:
    """Sum by count of a histogram."""
    group = f" by ({per})" if per else ""
    parts = (f"sum{group} ({rate(f'{histogram}_{end}', labels)})" for end in ("sum", "count"))
    return " / ".join(parts)


def share(part: str, whole: str) -> str:
    """The sum over `part` in that over `whole`, 0 while there is nothing."""
    return f"((sum({part}) or vector(0)) / (sum({whole}) > 0)) or vector(0)"


def ratio(part: str, whole: str, label: str) -> str:
    """Likewise by `label`, without those that have nothing."""
    return f"sum by ({label}) ({part}) / (sum by ({label}) ({whole}) > 0)"


def of_stores(metric: str, labels: str, *keep: str) -> str:
    """A gauge that every router of a store shows."""
    return f"max by ({', '.join(keep)}) ({metric}{{{labels}}})"


def count_of_role(role: str) -> str:
    """How many workers have it."""
    worker = of_stores("vllm_pd_router_worker_info", f'{POOL}, role="{role}"', "worker")
    return f"count({worker}) or vector(0)"
