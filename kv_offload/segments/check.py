"""Looks at the folder of a store from outside, also while a server uses it: sizes, contents, and clearing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NamespaceStat:
    """One namespace.

    Attributes:
        name: of its folder.
        about: what its server wrote about it (model, dtype, ...); empty when it wrote nothing.
        pid: the process that uses it; None when nobody does.
        segments: files; `sealed` of them are finished.
        bytes: of those files.
        blocks: that a server would find at start; keys that occur twice are counted once.
        block_bytes: 0 when there is no readable segment.
        oldest, newest: when a segment was begun, seconds since 1970; None without segments.
        problems: one sentence per file that cannot be used.
    """

    name: str
    about: Mapping[str, str]
    pid: int | None
    segments: int
    sealed: int
    bytes: int
    blocks: int
    block_bytes: int
    oldest: float | None
    newest: float | None
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FolderStat:
    """All namespaces under a root, largest first, and the file system they are on."""

    root: Path
    namespaces: tuple[NamespaceStat, ...]
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What reading every block of a namespace showed.

    Attributes:
        good: blocks whose checksum is right.
        corrupt: blocks whose checksum is wrong: a server would find them missing.
        unreadable: blocks that could not be read.
        unfinished: blocks at the end of a segment that is just being written; says nothing bad.
        vanished: segments that a server evicted meanwhile.
        problems: one sentence per file that cannot be used or has bad blocks.
    """

    name: str
    good: int
    corrupt: int
    unreadable: int
    unfinished: int
    vanished: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.corrupt or self.unreadable or self.problems)


@dataclass(frozen=True, slots=True)
class ClearResult:
    """What was removed of a namespace, or why nothing was: `refused` is a sentence naming the process that uses it."""

    name: str
    segments: int
    bytes: int
    refused: str


def namespaces(root: Path) -> list[str]:
    """Names of the namespaces under `root`: folders that a store made.

    Raises:
        SettingsError: `root` is not a folder or cannot be read.
    """
    raise NotImplementedError


def stat(root: Path) -> FolderStat:
    """Sizes and counts, from headers and footers; block contents are not read. Changes nothing.

    Raises:
        SettingsError: `root` is not a folder or cannot be read.
    """
    raise NotImplementedError


def verify(root: Path, name: str, progress: Callable[[int, int], None] | None = None) -> VerifyResult:
    """Read every block and compare its checksum. Changes nothing; a server that uses the folder is not disturbed.

    Args:
        progress: called with bytes done and bytes in all, after each segment.

    Raises:
        SettingsError: no such namespace.
    """
    raise NotImplementedError


def clear(root: Path, name: str) -> ClearResult:
    """Remove a namespace, unless a process uses it.

    Raises:
        SettingsError: no such namespace, or a file cannot be removed.
    """
    raise NotImplementedError
