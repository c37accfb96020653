"""Launching a cluster of local processes: store, workers, router."""
