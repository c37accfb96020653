"""What a graph says about Kubernetes (its section `kubernetes`), beyond what holds on every machine. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_pd import __version__, layered
from vllm_pd.layered import setting

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")


def _mapping(raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"must be a mapping, got {raw!r}")
    return dict(raw)


def _volume(raw: Any) -> Mapping[str, Any]:
    if len(found := _mapping(raw)) != 1:
        raise ValueError(f"must name one source of a volume, as in {{hostPath: {{path: /mnt/nvme}}}}, got {raw!r}")
    return found


def _resources(raw: Any) -> Mapping[str, Mapping[str, str]]:
    out = {}
    for component, given in _mapping(raw).items():
        wanted = {str(name): str(quantity) for name, quantity in _mapping(given).items()}
        for name, quantity in wanted.items():
            if not _QUANTITY.fullmatch(quantity):
                raise ValueError(f"of {component}: {name} must be a quantity such as 500m or 16Gi, got {quantity!r}")
        out[str(component)] = wanted
    return out


def _list(raw: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(raw, list | tuple):
        raise ValueError(f"must be a list, got {raw!r}")
    return tuple(_mapping(each) for each in raw)


def _or_nothing(parse: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda raw: "" if raw == "" else parse(raw)


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """How a graph is put onto a cluster. Volumes, tolerations and selectors are Kubernetes' own, as in a pod."""

    worker_image: str = setting(
        help="image with vllm and vllm-pd", parse=layered.text, default=f"vllm-pd-worker:{__version__}"
    )
    router_image: str = setting(
        help="image with vllm-pd[kubernetes], for routers and planners",
        parse=layered.text,
        default=f"vllm-pd:{__version__}",
    )
    store_image: str = setting(
        help="image with a Redis-compatible server", parse=layered.text, default="valkey/valkey:8.1-alpine"
    )
    pull_secret: str = setting(help="Secret with which images are pulled", parse=layered.text, default="")
    secret: str = setting(
        help="Secret that holds the store's password and the secrets of components; GRAPH-secrets if not given",
        parse=layered.text,
        default="",
    )
    drain_s: int = setting(
        help="seconds that a pod's requests get to finish when it is taken away",
        parse=layered.integer(1, 86400),
        default=120,
    )
    gpu_resource: str = setting(
        help='name of the GPUs in a pod\'s limits; "" for a cluster without GPUs',
        parse=_or_nothing(layered.text),
        default="nvidia.com/gpu",
    )
    runtime_class: str = setting(help="runtime class of worker pods", parse=layered.text, default="")
    node_selector: Mapping[str, Any] = setting(help="nodes of worker pods, by label", parse=_mapping, default=dict)
    tolerations: tuple[Mapping[str, Any], ...] = setting(
        help="taints that worker pods tolerate", parse=_list, default=()
    )
    resources: Mapping[str, Mapping[str, str]] = setting(
        help="by component: what its pods request, for example {decode: {cpu: 8, memory: 96Gi}}",
        parse=_resources,
        default=dict,
    )
    model_volume: Mapping[str, Any] = setting(
        help="volume with models, mounted at /models and used as cache of the model hub", parse=_volume, default=dict
    )
    ssd_volume: Mapping[str, Any] = setting(
        help="volume of the SSD tier; an emptyDir of its size if not given", parse=_volume, default=dict
    )
    service_type: str = setting(
        help="type of the frontend's Service",
        parse=layered.choice("ClusterIP", "NodePort", "LoadBalancer"),
        default="ClusterIP",
    )
    network_policy: bool = setting(
        help="whether who may reach whom is limited by NetworkPolicies", parse=layered.boolean, default=True
    )
    monitoring_namespace: str = setting(
        help="Kubernetes namespace from which metrics are read",
        parse=_or_nothing(layered.text),
        default="monitoring",
    )
    planner_replicas: int = setting(
        help="planners, of which one leads and the others wait", parse=layered.integer(1, 9), default=1
    )


def read_options(raw: Mapping[str, Any]) -> KubernetesOptions:
    """Raises SettingsError for unknown keys, with the nearest one, and for bad values."""
    return layered.resolve(KubernetesOptions, file=raw, file_name="the section kubernetes").value
