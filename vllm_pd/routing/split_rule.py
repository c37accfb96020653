"""When a request is split: the rules that can be chosen, each with its parameters.

`plan` applies them to the decode worker that it looks at. A prompt of which that worker lacks less than one block is
never split, by any rule: whole blocks are what is handed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from vllm_pd.errors import SettingsError
from vllm_pd.layered import nearest


class Disagg(StrEnum):
    """Names of the rules."""

    AUTO = "auto"
    """By predicted time: split where the hand-over, the wait for the prefill worker included, costs less than it
    saves, the stall of the sequences that decode meanwhile included."""
    ALWAYS = "always"
    """Split whatever can be, with no look at the time."""
    NEVER = "never"
    THRESHOLD = "threshold"
    """Split what lacks more than `max_local_tokens`, if the prefill worker can start in time."""
    DYNAMO_OLD = "dynamo-old"
    """Of Dynamo's first releases; see `dynamo_rules.old_remote`."""
    DYNAMO_NEW = "dynamo-new"
    """Of Dynamo 1.x; see `dynamo_rules.new_bypass`."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """A rule. Parameters of other rules than `name` mean nothing."""

    name: Disagg = Disagg.ALWAYS
    max_local_tokens: int = 0
    """A decode worker that lacks at most this many tokens of a prompt prefills itself, by every rule."""
    max_wait: float = field(default=10.0, metadata={"rules": (Disagg.AUTO, Disagg.THRESHOLD)})
    """Seconds: it also does if the prefill worker is predicted to begin later than that. 0: however long it takes."""
    stall: float = field(default=0.5, metadata={"rules": (Disagg.AUTO,)})
    """How much a second that one decoding sequence stands still counts against a second of a first token's time."""
    max_queue: float = field(default=2.0, metadata={"rules": (Disagg.DYNAMO_OLD,)})
    """Requests that wait for prefill workers, from which on decode workers prefill themselves."""
    ratio: float = field(default=0.7, metadata={"rules": (Disagg.DYNAMO_NEW,)})
    """Part of the prompt to compute, from which on it is split."""
    prefill_busy: float = field(default=0.0, metadata={"rules": (Disagg.DYNAMO_NEW,)})
    """Tokens waiting at the prefill worker above which it is passed by; 0: never."""
    decode_busy: float = field(default=0.0, metadata={"rules": (Disagg.DYNAMO_NEW,)})
    """Part of the decode worker's blocks in use above which it never prefills itself; 0: no such limit."""


DEFAULT_RULE = SplitRule()
DEFAULT_LIMITS: Mapping[Disagg, int] = {Disagg.DYNAMO_OLD: 1000, Disagg.DYNAMO_NEW: 2048}
"""`max_local_tokens` where none is given: what Dynamo's code has."""


def split_rule(name: str, max_local_tokens: int | None = None, options: Sequence[tuple[str, float]] = ()) -> SplitRule:
    """The rule of this name with these parameters.

    Args:
        max_local_tokens: None where the rule is to find out itself.
        options: pairs of a parameter's name and its value.

    Raises:
        SettingsError: there is no such rule or parameter, or `threshold` has no threshold.
    """
    try:
        disagg = Disagg(name)
    except ValueError:
        known = [str(each) for each in Disagg]
        raise SettingsError(f"There is no rule {name!r}{nearest(name, known)}; choose {', '.join(known)}.") from None
    if disagg is Disagg.THRESHOLD and max_local_tokens is None:
        raise SettingsError(
            "The rule 'threshold' needs its number of tokens: give --max-local-prefill-tokens, "
            "or --disagg auto to have it learned."
        )
    limit = DEFAULT_LIMITS.get(disagg, 0) if max_local_tokens is None else max_local_tokens
    fields = SplitRule.__dataclass_fields__
    usable = [each for each, spec in fields.items() if disagg in spec.metadata.get("rules", ())]
    values: dict[str, float] = {}
    for option, value in options:
        if option not in usable:
            has = f"it has {', '.join(usable)}" if usable else "it has none"
            raise SettingsError(f"The rule {name!r} has no option {option!r}{nearest(option, usable)}; {has}.")
        values[option] = value
    return replace(SplitRule(disagg, limit), **values)  # type: ignore[arg-type]
