"""A cluster from a description: components and their links (`model`), files (`read`), checks (`check`), processes on
this machine (`processes`, `supervisor`, `launcher`), and the local clusters of tests (`local`).
"""

from vllm_pd.graph.model import (
    Chain,
    Decode,
    Frontend,
    Graph,
    Limits,
    Planner,
    Prefill,
    RestartRule,
    Router,
    Store,
    Worker,
)

__all__ = [
    "Chain",
    "Decode",
    "Frontend",
    "Graph",
    "Limits",
    "Planner",
    "Prefill",
    "RestartRule",
    "Router",
    "Store",
    "Worker",
]
