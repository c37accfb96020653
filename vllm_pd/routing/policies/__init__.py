"""The policies by name, and how a request gets its own weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from vllm_pd.errors import SettingsError
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.policies.dynamo_v01 import DynamoV01
from vllm_pd.routing.policies.dynamo_v04 import DynamoV04
from vllm_pd.routing.policies.dynamo_v1 import DynamoV1
from vllm_pd.routing.policies.least_loaded import LeastLoaded
from vllm_pd.routing.policies.llm_d import LlmD
from vllm_pd.routing.policies.predicted import Predicted
from vllm_pd.routing.policies.prefix import Prefix
from vllm_pd.routing.policies.round_robin import RoundRobin

DEFAULT_POLICY = Predicted.name

_ALL: tuple[Policy, ...] = (
    Predicted(),
    LeastLoaded(),
    RoundRobin(),
    Prefix(),
    DynamoV01(),
    DynamoV04(),
    DynamoV1(),
    LlmD(),
)
POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _ALL})


def policy(name: str, weights: Iterable[tuple[str, float]] = ()) -> Policy:
    """The policy of that name with some of its weights replaced. Raises `SettingsError` naming what there is."""
    found = POLICIES.get(name)
    if found is None:
        raise SettingsError(f"There is no policy {name!r}; choose one of {', '.join(POLICIES)}.")
    given = dict(weights)
    known = weight_names(found)
    unknown = sorted(set(given) - set(known))
    if unknown:
        offered = f"it has {', '.join(known)}" if known else "it has none"
        raise SettingsError(f"The policy {name} has no weight {unknown[0]!r}; {offered}.")
    return dataclasses.replace(found, **given) if given else found  # type: ignore[type-var]


def weight_names(policy: Policy) -> tuple[str, ...]:
    """The weights that the policy has."""
    return tuple(field.name for field in dataclasses.fields(policy))  # type: ignore[arg-type]
