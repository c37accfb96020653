"""Measurements with one command each: `python -m benchmarks.NAME [--json] [--quick]`."""
