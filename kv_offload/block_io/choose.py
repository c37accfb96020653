"""Which way bytes go: NIXL where it is installed and proves itself, else threads."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from vllm_pd.errors import SettingsError
from vllm_pd.kv_offload.block_io.aligned import ALIGNMENT, AlignedMemory, open_file
from vllm_pd.kv_offload.block_io.base import BlockIO, OpenFile
from vllm_pd.kv_offload.block_io.merge import Request
from vllm_pd.kv_offload.block_io.nixl_agent import NixlAgent
from vllm_pd.kv_offload.block_io.nixl_io import NixlIO
from vllm_pd.kv_offload.block_io.thread_io import ThreadIO
from vllm_pd.layered import nearest

logger = logging.getLogger(f"vllm.{__name__}")

SAFE_VERSION = (1, 5)
"""Before it, NIXL's POSIX backend took a short read for a success, and reported a failure while other requests of the
batch were still moving bytes."""

PROBE_REQUESTS = 32
PROBE_BYTES = 16 * ALIGNMENT


class IOBackend(StrEnum):
    """`AUTO` is NIXL where it works and threads elsewhere; the others are that one or an error."""

    AUTO = "auto"
    NIXL = "nixl"
    THREADS = "threads"

    @classmethod
    def parse(cls, raw: object, name: str) -> IOBackend:
        """The member called `raw`.

        Args:
            name: the option's, for the message.

        Raises:
            SettingsError: there is none.
        """
        known = [member.value for member in cls]
        if raw in known:
            return cls(str(raw))
        raise SettingsError(f"{name} must be one of {', '.join(known)}, got {raw!r}{nearest(str(raw), known)}.")


def choose(backend: IOBackend, folder: Path) -> BlockIO:
    """The backend for files in `folder`, which exists; says in one log line which it is and why.

    Raises:
        SettingsError: NIXL was asked for and does not work here.
        OSError: the folder cannot be written to.
    """
    if backend is IOBackend.THREADS:
        logger.info("Block files in %s are read and written with threads, as asked for.", folder)
        return ThreadIO()
    reason = why_not_nixl(folder)
    if reason is None:
        logger.info("Block files in %s are read and written with NIXL (POSIX backend, O_DIRECT).", folder)
        return NixlIO()
    if backend is IOBackend.NIXL:
        raise SettingsError(f"NIXL cannot be used for block files in {folder}: {reason}; use auto or threads.")
    logger.info("Block files in %s are read and written with threads: %s.", folder, reason)
    return ThreadIO()


def why_not_nixl(folder: Path) -> str | None:
    """None if NIXL is new enough and moves bytes to and from files in `folder` rightly; else what is wrong.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        file = open_file(path, create_bytes=PROBE_REQUESTS * PROBE_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # What a full disk holds can be read all the same.
        return "the disk has no room to try it out"
    try:
        # At once, so that nothing stays behind if this process ends here.
        path.unlink()
        if not file.direct:
            return "the file system does not support O_DIRECT"
        if (installed := _version()) < SAFE_VERSION:
            return (
                f"NIXL {'.'.join(map(str, installed))} takes a short read for a success, 1.5 or newer is needed"
                if installed
                else "NIXL is not installed"
            )
        try:
            agent = NixlAgent()
        except OSError as error:
            return str(error.strerror)
        try:
            return None if _moves(agent, file) else "a probe transfer through NIXL failed"
        finally:
            agent.close()
    finally:
        file.close()


def _version() -> tuple[int, ...]:
    """Of the installed NIXL; empty where there is none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("nixl"))
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in found.groups()) if found else (0,)


def _moves(agent: NixlAgent, file: OpenFile) -> bool:
    """Whether what is written is what is read back."""
    size = PROBE_REQUESTS * PROBE_BYTES
    memory = AlignedMemory(size)
    data = secrets.token_bytes(size)
    requests = [
        Request(file, offset, PROBE_BYTES, [index], [(memory.address + offset, PROBE_BYTES)])
        for index, offset in enumerate(range(0, size, PROBE_BYTES))
    ]
    fds = {file: file.acquire()}
    try:
        memory.view[:] = data
        written = agent.transfer("WRITE", requests, fds)
        memory.view[:] = bytes(size)
        return written and agent.transfer("READ", requests, fds) and memory.view == data
    finally:
        file.release()
