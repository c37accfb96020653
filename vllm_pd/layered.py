"""Layered settings: flag > environment > file > default, parsed once into a frozen dataclass.

A settings class is a frozen dataclass whose fields carry `setting(...)` metadata. `resolve` merges the layers and
remembers where each value came from, so that `vllm-pd config` can show it. Pure: the caller reads files and
`os.environ`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_pd.errors import SettingsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field is named and read.

    Attributes:
        help: one sentence for `--help`.
        env: environment variable that mirrors it, or "" for none.
        flag: command-line flag that sets it, or "" for none.
        parse: turns a string (flag, environment) or a YAML/JSON value into the field's value; raises ValueError
            with a phrase that completes "NAME ...".
        secret: shown as `***` by `describe`.
    """

    help: str
    env: str
    flag: str
    parse: Callable[[Any], Any]
    secret: bool = False


def setting(
    *, help: str, parse: Callable[[Any], Any], default: Any, env: str = "", flag: str = "", secret: bool = False
) -> Any:
    """Declare a field of a settings dataclass; see `Setting`. A class as `default` is called for each object."""
    metadata = {"setting": Setting(help, env, flag, parse, secret)}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


class SecretUrl(str):
    """A URL whose `repr` hides the password: vLLM logs its arguments and configuration by `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact(str(self)))


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """A settings object and, per field, which layer gave the value: flag, environment, file or default."""

    value: T
    source: Mapping[str, str]

    def describe(self) -> list[tuple[str, str, str]]:
        """Rows of (field, value as text, source), secrets and passwords in URLs hidden."""
        rows = []
        for name, spec in settings_of(type(self.value)).items():
            raw = getattr(self.value, name)
            rows.append((name, "***" if spec.secret and raw else redact(str(raw)), self.source[name]))
        return rows


def settings_of(cls: type) -> dict[str, Setting]:
    """Field name to `Setting`, in declaration order."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(cls) if "setting" in f.metadata}


_SECRET_OPTION = re.compile(r"([?&][^=&]*(?:password|secret|token)[^=&]*=)[^&]*", re.IGNORECASE)


def redact(text: str) -> str:
    """Hide the passwords of a URL, before the host and among the options behind the question mark.

    `redis://user:secret@host` becomes `redis://user:***@host`, also when the scheme was forgotten.
    """
    text = _SECRET_OPTION.sub(r"\1***", text)
    scheme, sep, rest = text.partition("://")
    if not sep:
        scheme, rest = "", text
    if "@" not in rest:
        return text
    userinfo, _, host = rest.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    return f"{scheme}{sep}{user}{':***' if colon else ''}@{host}"


def nearest(name: str, known: list[str]) -> str:
    """` (did you mean X?)`, or an empty string when nothing is close."""
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {str(match[0])!r}?)" if match else ""


def normalise_key(key: str) -> str:
    """`pd-cpu-gib`, `pd_cpu_gib`, `cpu-gib` and `cpu_gib` all name the field `cpu_gib`."""
    return key.strip().replace("-", "_").removeprefix("pd_")


def check_keys(data: Mapping[str, Any], known: list[str], where: str) -> dict[str, Any]:
    """Normalise the keys of a file or JSON layer.

    Raises:
        SettingsError: a key is not in `known`; the message names the nearest one.
    """
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = normalise_key(str(key))
        if name not in known:
            raise SettingsError(
                f"{where} has the unknown key {key!r}{nearest(name, known)}; known keys are {', '.join(known)}."
            )
        if name in out:
            raise SettingsError(f"{where} sets {name!r} twice; keep one of the spellings.")
        out[name] = value
    return out


def resolve(
    cls: type[T],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "the settings file",
) -> Resolved[T]:
    """Merge the layers into `cls`. A `None` in `flags` or `file`, or an empty variable, counts as not given.

    Raises:
        SettingsError: unknown key in `file`, or a value that its field's `parse` rejects.
    """
    specs = settings_of(cls)
    flags, environ = flags or {}, environ or {}
    from_file = check_keys(file or {}, list(specs), file_name)
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, spec in specs.items():
        if flags.get(name) is not None:
            raw, layer, label = flags[name], "flag", spec.flag
        elif spec.env and environ.get(spec.env):
            raw, layer, label = environ[spec.env], "environment", spec.env
        elif from_file.get(name) is not None:
            raw, layer, label = from_file[name], "file", f"{name} in {file_name}"
        else:
            source[name] = "default"
            continue
        try:
            values[name] = spec.parse(raw)
        except (ValueError, TypeError) as e:
            raise SettingsError(f"{label} {e}.") from None
        source[name] = layer
    return Resolved(cls(**values), source)


# Parsers. Each accepts the string of a flag or variable and the native value of YAML or JSON.


def text(raw: Any) -> str:
    """A non-empty string."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"must be a non-empty text, got {raw!r}")
    return raw.strip()


def number(low: float, *, exclusive: bool = False, high: float | None = None) -> Callable[[Any], float]:
    """A number of at least `low` (above it, if `exclusive`) and at most `high`."""

    def parse(raw: Any) -> float:
        try:
            value = float(raw) if not isinstance(raw, bool) else float("nan")
        except (TypeError, ValueError):
            value = float("nan")
        if not (value > low if exclusive else value >= low) or (high is not None and value > high):
            bound = f"{'above' if exclusive else 'at least'} {low:g}" + (f" and at most {high:,.0f}" if high else "")
            raise ValueError(f"must be a number {bound}, got {raw!r}")
        return value

    return parse


def integer(low: int, high: int | None = None) -> Callable[[Any], int]:
    """A whole number in [low, high]."""

    def parse(raw: Any) -> int:
        value = number(low, high=high)(raw)
        if value != int(value):
            raise ValueError(f"must be a whole number, got {raw!r}")
        return int(value)

    return parse


def choice(*names: str) -> Callable[[Any], str]:
    """One of `names`; the error names the nearest."""

    def parse(raw: Any) -> str:
        if raw not in names:
            raise ValueError(f"must be one of {', '.join(names)}, got {raw!r}{nearest(str(raw), list(names))}")
        return str(raw)

    return parse


def log_level(raw: Any) -> str:
    """Parse the name of a level, in whatever case."""
    return choice("debug", "info", "warning", "error")(str(raw).lower())


def boolean(raw: Any) -> bool:
    """True/false, yes/no, on/off, 1/0."""
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be true or false, got {raw!r}")
