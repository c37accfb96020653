"""Turns the engine's KV events on where a store is configured: what the block index is made from.

They name the tokens of every prompt, so they go through Unix sockets in a folder that only this user can enter. Where
an engine of this server runs on another host, vLLM picks a TCP port on that host instead and tells the API server.
A `--kv-events-config` of the user's own stays as it is; the agent then reads along.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm_pd import vllm_compat as compat
from vllm_pd.agent.kv_events import INT_HASHES_ENV

logger = logging.getLogger("vllm.vllm_pd")

FOLDER_ENV = "_VLLM_PD_KV_EVENTS"
"""`<pid>:<folder>`: the folder of our own, for the child processes of the one that made it."""
TOPIC = "vllm-pd"

_PREFIX = "vllm-pd-kv-"
# A rank of vLLM adds "_dp<rank>" to endpoints with "inproc" in them, and refuses any other that is not TCP.
_LIVE, _REPLAY = "inproc-live", "inproc-replay"
_LOCK = "lock"
_YOUNG_S = 60.0
# The path of a Unix socket has at most 107 bytes.
_LONGEST_BASE = 60
_ANY_PORT = "tcp://*:0"

_held: list[int] = []
"""Locks on our folders, kept as long as this process and its children live."""


def publish_kv_events(engine_args: Any, *, last_rank: int, local: bool) -> bool:
    """Have the engine publish its KV events. Returns whether the agent can index them.

    Args:
        last_rank: the highest data-parallel rank that this process starts.
        local: whether every engine that this server talks to runs on this host.
    """
    given = engine_args.kv_events_config
    if given is not None and not (given.enable_kv_cache_events and given.publisher == "zmq"):
        logger.warning(
            "vllm-pd: --kv-events-config turns KV events off, so the block index does not cover this worker and "
            "routers choose it by load only; drop the flag to be indexed."
        )
        return False
    if os.environ.setdefault(INT_HASHES_ENV, "0") != "0":
        logger.warning(
            "vllm-pd: %s is set, so the block index does not cover this worker and routers choose it by load only; "
            "unset it to be indexed.",
            INT_HASHES_ENV,
        )
        return False
    if given is not None:
        logger.info("vllm-pd: reading along with --kv-events-config; block hashes are published whole, as bytes.")
        return True
    live = replay = _ANY_PORT
    if local:
        folder = _folder()
        if last_rank == 0 or _ranks_have_sockets(f"ipc://{folder}/{_LIVE}"):
            live, replay = f"ipc://{folder}/{_LIVE}", f"ipc://{folder}/{_REPLAY}"
    engine_args.kv_events_config = compat.KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=live, replay_endpoint=replay, topic=TOPIC
    )
    return True


def _ranks_have_sockets(endpoint: str) -> bool:
    """Whether vLLM gives each rank a Unix socket of its own."""
    try:
        return bool(compat.ZmqEventPublisher.offset_endpoint_port(endpoint, 1) != endpoint)
    except ValueError:
        return False


def _folder() -> Path:
    """The folder of this server's sockets: our parent's, or a new one that ends with this process."""
    owner, _, inherited = os.environ.get(FOLDER_ENV, "").partition(":")
    if inherited and owner in (str(os.getppid()), str(os.getpid())):
        return Path(inherited)
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_BASE:
        base = Path("/tmp")
    _remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held.append(lock)
    atexit.register(_remove, folder, os.getpid())
    os.environ[FOLDER_ENV] = f"{os.getpid()}:{folder}"
    return folder


def _remove(folder: Path, maker: int) -> None:
    # A forked child runs this, too.
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(base: Path) -> None:
    """Folders of servers that were killed: nobody holds their lock."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            info = folder.stat()
            # One that is being made has no lock yet.
            if info.st_uid != os.getuid() or time.time() - info.st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(lock)
