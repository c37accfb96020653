"""The registry suite on every store."""

from __future__ import annotations

from tests.conformance.registry import RegistryConformance


class TestRegistry(RegistryConformance):
    pass
