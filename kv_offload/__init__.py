"""Tiers below GPU memory: the offloading spec and worker that vLLM's OffloadingConnector runs."""
