from __future__ import annotations

import pytest

from scripts.prometheus import NoPrometheusError, Programs, find


@pytest.fixture(scope="session")
def programs() -> Programs:
    """Prometheus and promtool, or the tests that need them are skipped."""
    try:
        return find()
    except NoPrometheusError as e:
        pytest.skip(f"Prometheus is not here: {e}")
