"""The suite of wanted roles on every kind of store."""

from __future__ import annotations

import pytest

from tests.conformance.roles import RolesConformance
from tests.conformance.servers import KINDS


@pytest.mark.parametrize("harness", KINDS, indirect=True)
class TestRoles(RolesConformance):
    pass
