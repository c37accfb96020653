"""What the agent tells Prometheus, in the registry that the server's `/metrics` shows.

Counters are plain integers where the work is done, and are copied from time to time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_pd.agent.cache_feed import CacheFeed
from vllm_pd.agent.prefill_runner import RunnerStats
from vllm_pd.state.base import MoveState, RoleMove
from vllm_pd.state.block_index import Tier

PREFIX = "vllm_pd_agent"

_COUNTERS = {
    "kv_messages": "Messages with KV events that the engine published and the agent took",
    "kv_gaps": "Jumps in the numbers of those messages",
    "kv_replays": "Times that messages were asked for again",
    "kv_losses": "Times that everything known of the engine's cache had to be forgotten",
    "kv_unreadable": "Messages and events that could not be read or used",
    "index_batches": "Batches of changes written to the block index",
    "index_blocks": "Changes of blocks written to the block index",
    "index_announcements": "Times that the whole cache was announced to the block index",
    "index_overflows": "Times that the changes waiting for the store were too many and an announcement replaced them",
    "index_errors": "Writes to the block index that failed",
}
_MOVE_SECONDS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_GAUGES = {
    "waiting_blocks": "Blocks whose change the block index does not have yet",
    "delay_seconds": "How long the newest batch of changes had waited when the block index had it",
}


class AgentMetrics:
    """The metrics of all caches of one worker; label `rank` is the data-parallel rank."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ("rank",)
        self._counters = {
            name: Counter(f"{PREFIX}_{name}", text, labels, registry=registry) for name, text in _COUNTERS.items()
        }
        # With several API servers each process writes to a file of its own, and one of them has the caches.
        self._gauges = {
            name: Gauge(f"{PREFIX}_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent")
            for name, text in _GAUGES.items()
        }
        self._blocks = Gauge(
            f"{PREFIX}_blocks",
            "Blocks that the engine holds on a tier",
            ("rank", "tier"),
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._seen: dict[tuple[str, str], int] = {}
        self._claimed = Counter(
            f"{PREFIX}_prefill_claimed",
            "Prefill jobs taken out of the queue; stolen: they were waiting for another worker",
            ("stolen",),
            registry=registry,
        )
        self._ended = Counter(
            f"{PREFIX}_prefill_ended",
            "Claimed prefill jobs by how they ended here: done, failed, returned (not begun), lost (cancelled, taken)",
            ("how",),
            registry=registry,
        )
        self._unheard = Counter(
            f"{PREFIX}_prefill_unheard",
            "Ends of prefill jobs of which the queue wanted to hear no more, or could not",
            registry=registry,
        )
        texts = {"budget": "that the worker holds at a time", "claimed": "claimed now"}
        self._tokens = {
            name: Gauge(
                f"{PREFIX}_prefill_{name}_tokens",
                f"Prompt tokens of prefill jobs {text}",
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            for name, text in texts.items()
        }

        moves = Counter(
            "vllm_pd_role_moves",
            "Changes of this worker's role that have ended, by how: done, or undone",
            ("outcome",),
            registry=registry,
        )
        # There from the start: a rate needs a zero to grow from.
        self._moves = {state: moves.labels(str(state)) for state in (MoveState.DONE, MoveState.UNDONE)}
        self._move_seconds = Histogram(
            "vllm_pd_role_move_seconds",
            "How long changes of this worker's role took, from the wish to the end",
            registry=registry,
            buckets=_MOVE_SECONDS,
        )

    def note_move(self, move: RoleMove) -> None:
        """A change of the worker's role has ended."""
        self._moves[move.state].inc()
        self._move_seconds.observe(move.took_ms / 1000)

    def update(self, feeds: Iterable[CacheFeed]) -> None:
        """Copy what has happened since the last time."""
        for feed in feeds:
            rank = str(feed.holder.rank)
            for name, value in _counts(feed).items():
                since = value - self._seen.get((rank, name), 0)
                # A cache that left and came back counts from 0 again.
                self._counters[name].labels(rank).inc(since if since >= 0 else value)
                self._seen[rank, name] = value
            self._gauges["waiting_blocks"].labels(rank).set(feed.feeder.waiting)
            self._gauges["delay_seconds"].labels(rank).set(feed.feeder.stats.delay_s)
            for tier in (Tier.GPU, Tier.CPU, Tier.SSD):
                self._blocks.labels(rank, str(tier.name).lower()).set(feed.truth.count(tier))

    def update_prefill(self, budget: int, stats: RunnerStats) -> None:
        """Copy what has happened to prefill jobs since the last time."""
        self._tokens["budget"].set(budget)
        self._tokens["claimed"].set(stats.tokens)
        self._claimed.labels("true").inc(self._since("stolen", stats.stolen))
        self._claimed.labels("false").inc(self._since("not_stolen", stats.claimed - stats.stolen))
        for how, count in stats.ended.items():
            self._ended.labels(str(how)).inc(self._since(f"ended_{how}", count))
        self._unheard.inc(self._since("unheard", stats.unheard))

    def _since(self, name: str, value: int) -> int:
        seen, self._seen["prefill", name] = self._seen.get(("prefill", name), 0), value
        # Another runner of this process, as in a process of mock workers.
        return value - seen if value >= seen else value


def _counts(feed: CacheFeed) -> dict[str, int]:
    written = feed.feeder.stats
    counts = {
        "kv_unreadable": feed.unreadable + feed.truth.ignored,
        "index_batches": written.batches,
        "index_blocks": written.blocks,
        "index_announcements": written.announcements,
        "index_overflows": written.overflows,
        "index_errors": written.errors,
    }
    if feed.source is not None:
        read = feed.source.stats
        counts |= {"kv_messages": read.messages, "kv_gaps": read.gaps, "kv_replays": read.replays}
        counts["kv_losses"] = read.lost
    return counts


@functools.cache
def agent_metrics() -> AgentMetrics:
    """The metrics of this process, made at the first call: a process without an agent has none."""
    return AgentMetrics()
