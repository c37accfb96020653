"""The suite of wanted roles on every store."""

from __future__ import annotations

from tests.conformance.roles import RolesConformance


class TestRoles(RolesConformance):
    pass
