"""The suite of the prefill queue on every store."""

from __future__ import annotations

from tests.conformance.prefill_queue import PrefillQueueConformance


class TestPrefillQueue(PrefillQueueConformance):
    pass
