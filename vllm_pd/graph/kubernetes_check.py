"""What of a graph cannot be so on Kubernetes, and what must not be in a manifest: everybody may read those. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.graph import kubernetes_parts as parts
from vllm_pd.graph import program_args
from vllm_pd.graph.kubernetes_options import KubernetesOptions
from vllm_pd.graph.model import Component, Graph, Store
from vllm_pd.layered import redact

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
"""Of a Service, and of a pod's host: the strictest of those that are named after a component."""
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_SECRET_NAME = re.compile(
    r"(.*_)?(TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY)", re.IGNORECASE
)
_SECRET_VALUE = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY
    | \b(Bearer|Basic)[ ]+[\w.~+/=-]{16,}
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}                                      # a JSON web token
    | (?<![\w-])(
        hf_[A-Za-z0-9]{30,}
        | (ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{30,} | github_pat_\w{40,} | glpat-[\w-]{20,}
        | sk-[\w-]{20,} | nvapi-[\w-]{30,} | xox[abeoprs]-[\w-]{10,} | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,}
        | (AKIA|ASIA)[A-Z0-9]{16} | AIza[\w-]{35}
      )(?![\w-])
    """,
    re.VERBOSE,
)
"""Credentials that tell themselves."""


def check(graph: Graph, options: KubernetesOptions) -> None:
    """Raises SettingsError."""
    names = [component.label for component in graph.components]
    for component in (*graph.components, graph.store or Store()):
        if not _NAME.fullmatch(name := parts.name_of(graph, component)):
            raise SettingsError(
                f"{name} is to be the name of a Service, too: it must begin with a letter and have at most 63 of them; "
                "give the graph, or the component, another name."
            )
        _check_told(component)
    for name in options.resources:
        if name not in names:
            raise SettingsError(f"kubernetes: resources names {name!r}, and components are {', '.join(names)}.")
    if not _LABEL.fullmatch(graph.namespace):
        raise SettingsError(
            f"The namespace {graph.namespace!r} is to be a Kubernetes label, too; use 1 to 63 letters, digits, dots, "
            "dashes and underscores, a letter or digit first and last."
        )
    for workers in graph.workers:
        if options.gpu_resource and workers.gpus != int(workers.gpus):
            raise SettingsError(
                f"gpus of {workers.label} is {workers.gpus:g}, and a pod gets whole GPUs; set gpus: 1, and share them "
                "with the device plugin's time slicing or MIG (kubernetes: gpu_resource)."
            )
        if program_args.value_of(workers.args, "--shutdown-timeout"):
            raise SettingsError(
                f"args of {workers.label} hold --shutdown-timeout; on Kubernetes give kubernetes: drain_s."
            )


def no_secrets(component: Component, env: Mapping[str, str]) -> None:
    """Refuse settings that went into these variables because they are secret. Raises SettingsError."""
    if env:
        raise SettingsError(
            f"settings of {component.label} hold a secret, which would be in the manifests for all to read; name the "
            f"variable {next(iter(env))} in its secrets instead."
        )


def is_credential(text: str) -> bool:
    """Whether a text shows by itself that it is, or holds, a password or a key."""
    return bool(_SECRET_VALUE.search(text)) or any("://" in word and redact(word) != word for word in text.split())


def _check_told(component: Component) -> None:
    for variable, value in component.env.items():
        if _SECRET_NAME.fullmatch(variable):
            raise SettingsError(
                f"env of {component.label} holds {variable}, which would be in the manifests for all to read; name it "
                "in its secrets instead."
            )
        if is_credential(str(value)):
            raise SettingsError(
                f"{variable} in env of {component.label} looks like a password or key, which would be in the manifests "
                "for all to read; name it in its secrets instead."
            )
    for where, said in (("args", component.args), ("settings", component.settings)):
        if any(is_credential(text) for text in _texts(said)):
            raise SettingsError(
                f"{where} of {component.label} hold what looks like a password or key, which would be in the manifests "
                "for all to read; where its program has a variable for it, name that in its secrets instead."
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value
