"""What the SSD tier is told, parsed once. Needs neither vllm nor torch: a mistake shows before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.block_io.choose import IOBackend
from vllm_pd.kv_offload.segments.config import MAX_SEGMENT_BYTES, READERS
from vllm_pd.kv_offload.segments.folder import unusable
from vllm_pd.layered import nearest
from vllm_pd.tier_choices import DEFAULT_WRITES_PER_DAY

MIB = 1 << 20
GIB = 1 << 30
ROOT_NAME = "vllm-pd-kv-2"
"""Folder under the given path; the number is raised when the layout below it changes."""

_FLOOR_SHARE = 20
"""The default floor is this part of the file system: most get slow when they are nearly full."""


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """The option `ssd`. Sizes in bytes, times in seconds.

    Attributes:
        path: folder; created if absent, files go to a folder of our own inside it.
        budget_bytes: what everything below `root` may take, over all models and servers using it.
        identity: what of the engine's settings changes the bytes of a block, see `ssd_namespace.model_identity`.
        floor_bytes: free space that is kept on the file system; None is 5% of it, at least 1 GiB.
        backend: what moves the bytes.
        segment_bytes: largest size of a segment file.
        readers: threads that load.
        load_deadline_s: a block that is not there by then is computed.
        writes_per_day: how many times its size the tier may write in a day before blocks that are seen for the first
            time are left out; those seen before are always written.
    """

    path: Path
    budget_bytes: int
    identity: str
    floor_bytes: int | None = None
    backend: IOBackend = IOBackend.AUTO
    segment_bytes: int = MAX_SEGMENT_BYTES
    readers: int = READERS
    load_deadline_s: float = 10.0
    writes_per_day: float = DEFAULT_WRITES_PER_DAY

    @property
    def root(self) -> Path:
        return self.path / ROOT_NAME

    @classmethod
    def parse(cls, raw: Any) -> SsdConfig:
        """From `{"path": ..., "gib": ..., "identity": ..., ...}`; see `_KEYS` for all of them.

        Raises:
            SettingsError: one sentence that says what to change.
        """
        if not isinstance(raw, Mapping):
            raise SettingsError(f"ssd must be an object with path and gib, got {raw!r}.")
        unknown = sorted(set(raw) - set(_KEYS))
        if unknown:
            raise SettingsError(
                f"ssd has the unknown key {unknown[0]!r}{nearest(str(unknown[0]), list(_KEYS))}; "
                f"known keys are {', '.join(_KEYS)}."
            )
        return cls(
            **{
                field: read(f"ssd.{key}", raw.get(key))
                for key, (field, read) in _KEYS.items()
                if field in _REQUIRED or raw.get(key) is not None
            }
        )

    def check_place(self) -> None:
        """
        Raises:
            SettingsError: the budget is more than the file system under `path` has, or that cannot be told.
        """
        place = self.path.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            total = total_bytes(place)
        except OSError as e:
            raise unusable(self.path, e) from None
        if self.budget_bytes > total:
            raise SettingsError(
                f"The SSD tier of {self.budget_bytes / GIB:g} GiB does not fit the file system of {self.path}, which "
                f"has {total / GIB:.1f} GiB in all; lower --pd-ssd-gib."
            )

    def floor(self) -> int:
        """The floor in bytes; `path` exists. Raises OSError."""
        if self.floor_bytes is not None:
            return self.floor_bytes
        return max(GIB, total_bytes(self.path) // _FLOOR_SHARE)


def total_bytes(path: Path) -> int:
    """Size of the file system that `path` is on. Raises OSError."""
    info = os.statvfs(path)
    return info.f_blocks * info.f_frsize


def _folder(name: str, raw: Any) -> Path:
    if not isinstance(raw, str) or not raw.strip():
        raise SettingsError(f"{name} must name a folder, got {raw!r}.")
    return Path(raw).expanduser()


def _identity(name: str, raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise SettingsError(
            f"{name} must say which model the blocks are of, got {raw!r}; --kv-connector pd fills it in, so use that."
        )
    return raw


def _backend(name: str, raw: Any) -> IOBackend:
    return IOBackend.parse(raw, name)


def _number(*, above: float = -1.0, least: float = 0.0) -> Callable[[str, Any], float]:
    def read(name: str, raw: Any) -> float:
        valid = isinstance(raw, int | float) and not isinstance(raw, bool) and least <= raw < float("inf")
        if not valid or raw <= above:
            bound = f"above {above:g}" if above >= least else f"of at least {least:g}"
            raise SettingsError(f"{name} must be a number {bound}, got {raw!r}.")
        return float(raw)

    return read


def _size(unit: int, *, above: float = -1.0) -> Callable[[str, Any], int]:
    number = _number(above=above)
    return lambda name, raw: int(number(name, raw) * unit)


def _whole(name: str, raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 1:
        raise SettingsError(f"{name} must be a whole number of at least 1, got {raw!r}.")
    return raw


_KEYS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "path": ("path", _folder),
    "gib": ("budget_bytes", _size(GIB, above=0.0)),
    "identity": ("identity", _identity),
    "free_gib": ("floor_bytes", _size(GIB)),
    "backend": ("backend", _backend),
    "segment_mib": ("segment_bytes", _size(MIB, above=0.0)),
    "readers": ("readers", _whole),
    "load_deadline_s": ("load_deadline_s", _number(above=0.0)),
    "writes_per_day": ("writes_per_day", _number()),
}
"""What the option's keys set, and how each is read."""

_REQUIRED = {"path", "budget_bytes", "identity"}

assert {field for field, _ in _KEYS.values()} == {field.name for field in fields(SsdConfig)}
