"""Whether a graph can be started on this machine now: what can be known before anything is started or loaded."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_pd.errors import GraphError
from vllm_pd.graph.model import Component, Frontend, Graph, Store
from vllm_pd.graph.ports import LOOPBACK, can_bind
from vllm_pd.graph.processes import Launch

_PATH_BEGINS = ("/", "./", "../", "~")


def check_models(graph: Graph) -> None:
    """Raises GraphError when a model that is named as a folder is not there: vLLM would say so much later."""
    for workers in graph.workers:
        model = graph.model_of(workers)
        if model.startswith(_PATH_BEGINS) and not Path(model).exists():
            hint = "; write the whole path, ~ stays as it is" if model.startswith("~") else ""
            raise GraphError(f"{workers.label} is to serve {model}, which is not there{hint}.")


def check_port(name: str, component: Component, port: int) -> None:
    """Raises GraphError when somebody else has the port at which an instance called `name` is to listen; 0: none."""
    host = component.host if isinstance(component, Frontend) else LOOPBACK
    if port and isinstance(component, Frontend | Store) and not can_bind(port, host):
        raise GraphError(
            f"Port {port} of {name} is taken; end what uses it, or choose another one "
            f"(--set {component.label}.port=NUMBER, 0 for a free one)."
        )


def check_program(launch: Launch) -> None:
    """Raises GraphError when there is no such program."""
    program = Path(launch.command[0])
    if not os.access(program, os.X_OK):
        extra = (
            "install vLLM beside vllm-pd (its options could not be checked either)"
            if program.name == "vllm"
            else "install vllm-pd anew"
        )
        raise GraphError(f"{launch.name} needs the program {program}, which is not there; {extra}.")
