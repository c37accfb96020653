"""The suite of the prefill queue on every kind of store."""

from __future__ import annotations

import pytest

from tests.conformance.prefill_queue import PrefillQueueConformance
from tests.conformance.prefill_queue_losses import PrefillQueueLosses
from tests.conformance.servers import KINDS


@pytest.mark.parametrize("harness", KINDS, indirect=True)
class TestPrefillQueue(PrefillQueueConformance, PrefillQueueLosses):
    pass
