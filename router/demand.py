"""What one request asks for, as far as its placement is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_pd.errors import SettingsError
from vllm_pd.router.decision import PromptKind, Reason, bypass_by_request
from vllm_pd.router.explanation import EXPLAIN_HEADER
from vllm_pd.router.prompt_blocks import PromptBlocks
from vllm_pd.router.request_fields import RequestFields
from vllm_pd.router.settings import RouterSettings
from vllm_pd.routing import policies
from vllm_pd.routing.policies.base import Policy
from vllm_pd.routing.split_rule import SplitRule, split_rule
from vllm_pd.state.base import PoolId

DISAGG_HEADER = "x-vllm-pd-disagg"
POLICY_HEADER = "x-vllm-pd-policy"
TEMPERATURE_HEADER = "x-vllm-pd-temperature"
HIGHEST_TEMPERATURE = 1000.0
_LOW_LIMIT = 64
NEW_POOL = "new_pool"
"""Why a prompt is unknown, beside the reasons of `prompt_reading`."""


class BadOverride(ValueError):
    """A header that overrides a setting has a value that cannot be used; the text says what can."""


@dataclass(slots=True)
class Demand:
    """One request."""

    request: str
    """Its id."""
    path: str
    model: str | None
    kind: PromptKind | None
    fields: RequestFields | None
    policy: Policy
    temperature: float
    session: str
    explain: bool
    forbidden: Reason | None
    """Which property of the request forbids a split."""
    rule: SplitRule
    """When it is split, if nothing forbids it."""
    prompts: Mapping[PoolId, PromptBlocks] = field(default_factory=dict)

    def prompt(self, pool: PoolId) -> PromptBlocks:
        """The prompt as `pool` sees it; unknown for one that its workers became part of since it was read."""
        found = self.prompts.get(pool)
        return found or PromptBlocks(max((prompt.tokens for prompt in self.prompts.values()), default=0), (), NEW_POOL)

    @property
    def silent(self) -> bool:
        """Whether the first byte of the answer is not the first token."""
        return self.fields is None or not self.fields.stream

    @property
    def expected_output(self) -> int:
        """Tokens of the answer, 0 if unknown. A limit says how long it gets only where it is low."""
        if self.fields is None:
            return 0
        limit = self.fields.max_completion_tokens
        if limit is None:
            limit = self.fields.max_tokens
        return limit if limit is not None and 0 < limit <= _LOW_LIMIT else 0


class DemandReader:
    """Reads demands: what the settings say, and the headers that override it."""

    def __init__(self, settings: RouterSettings) -> None:
        self._policy = policies.policy(settings.policy, settings.weights)
        self._temperature = settings.temperature
        self._rule = settings.split_rule
        limit = settings.max_local_prefill_tokens
        self._max_local = limit if isinstance(limit, int) else None
        self._obeys_headers = settings.allow_overrides
        self._session_header = settings.session_header

    def read(
        self,
        request: str,
        path: str,
        model: str | None,
        kind: PromptKind | None,
        fields: RequestFields | None,
        headers: Mapping[str, str],
    ) -> Demand:
        """What a request asks for. `headers` by lower-case names.

        Raises:
            BadOverride: see there.
        """
        policy, temperature, rule = self._policy, self._temperature, self._rule
        if self._obeys_headers:
            name = headers.get(POLICY_HEADER)
            if name is not None and name != policy.name:
                try:
                    policy = policies.policy(name)
                except SettingsError as e:
                    raise BadOverride(f"Header {POLICY_HEADER}: {e}") from None
            text = headers.get(TEMPERATURE_HEADER)
            if text is not None:
                temperature = _temperature(text)
            name = headers.get(DISAGG_HEADER)
            if name is not None and name != rule.name:
                try:
                    rule = split_rule(name, self._max_local)
                except SettingsError as e:
                    raise BadOverride(f"Header {DISAGG_HEADER}: {e}") from None
        return Demand(
            request,
            path,
            model,
            kind,
            fields,
            policy,
            temperature,
            headers.get(self._session_header, ""),
            headers.get(EXPLAIN_HEADER) == "1",
            bypass_by_request(fields, kind),
            rule,
        )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= HIGHEST_TEMPERATURE:
        raise BadOverride(
            f"Header {TEMPERATURE_HEADER} must be a number from 0 to {HIGHEST_TEMPERATURE:g}, got {text[:64]!r}."
        )
    return value
