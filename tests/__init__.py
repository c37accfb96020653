"""A package, so that pytest puts the repository root on the path and tests can import `scripts` and `benchmarks`."""
