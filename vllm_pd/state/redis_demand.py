"""Demand reports in Redis (or Valkey, 6.2 or newer): one HASH per pool, each field with an end of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple

import msgspec

from vllm_pd.state import scripts
from vllm_pd.state.base import PoolId
from vllm_pd.state.demand import BOUNDS_S, DemandReport
from vllm_pd.state.keys import Keys
from vllm_pd.state.redis_calls import RedisCalls

_decoder = msgspec.msgpack.Decoder(DemandReport)


def encode_report(report: DemandReport) -> bytes:
    return msgspec.msgpack.encode(report)


def decode_report(data: bytes) -> DemandReport:
    """Raises ValueError when `data` is no report, or holds what no router can have counted."""
    report = _decoder.decode(data)
    spreads = (report.ttft, report.itl, report.answer_itl)
    if any(len(spread.counts) != len(BOUNDS_S) + 1 for spread in spreads):
        raise ValueError("its histograms have other buckets than this version's")
    counts = [report.arrivals, report.finished, report.prompt_tokens, report.uncached_tokens, report.output_tokens]
    counts.append(report.finished_output_tokens)
    if min(counts) < 0 or any(min(spread.counts) < 0 for spread in spreads):
        raise ValueError("a total is below 0")
    figures = [spread.sum_s for spread in spreads] + list(astuple(report.rates) if report.rates is not None else ())
    if not all(math.isfinite(figure) for figure in figures):
        raise ValueError("a figure is not finite")
    return report


class RedisDemandBoard:
    """Implements `DemandBoard` over redis-py.

    Args:
        url: store URL.
        namespace: clusters of different namespaces share a store without seeing each other.
        timeout_s: deadline of one call.

    Raises:
        SettingsError: malformed URL or namespace.
    """

    def __init__(self, url: str, namespace: str, *, timeout_s: float = 0.5) -> None:
        self._keys = Keys(namespace)
        self._calls = RedisCalls(url, timeout_s=timeout_s, longest_s=timeout_s)

    @property
    def malformed_total(self) -> int:
        """Entries of the store that were skipped because they could not be read, since the start."""
        return self._calls.malformed_total

    async def publish(self, pool: PoolId, router: str, report: DemandReport, ttl_ms: int) -> None:
        data = encode_report(report)
        async with self._calls.answer():
            await scripts.PUBLISH.run(self._calls.client, [self._keys.demand(pool)], [router, ttl_ms, data])

    async def read(self, pool: PoolId) -> Mapping[str, DemandReport]:
        key = self._keys.demand(pool)
        async with self._calls.answer():
            now, flat = await scripts.FIELDS.run(self._calls.client, [key], [])
        reports, bad = {}, []
        for router, value in zip(flat[0::2], flat[1::2], strict=True):
            ends, _, data = value.partition(b":")
            try:
                if int(ends) > int(now):
                    reports[router.decode()] = decode_report(data)
            except ValueError:
                bad.append(f"{key} {router!r}")
        self._calls.report(bad)
        return dict(sorted(reports.items()))

    async def close(self) -> None:
        await self._calls.close()
