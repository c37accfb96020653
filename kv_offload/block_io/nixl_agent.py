"""One NIXL agent with the POSIX backend: a queue of the kernel's (libaio) that one thread at a time uses."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from vllm_pd.kv_offload.block_io.base import OpenFile
from vllm_pd.kv_offload.block_io.merge import Request
from vllm_pd.kv_offload.block_io.pace import Pace

BACKEND = "POSIX"
NAME = "vllm-pd-block-io"

QUEUE = 1024
"""Requests that an agent holds. NIXL's default of 65,536 takes 12 MB."""

KERNEL_QUEUE, PER_LOOK = 256, 64
"""Requests that the kernel has at a time, and those that one look at a transfer hands on to it and takes back."""

# The POSIX backend asks that memory and files are registered and does nothing with it: all addresses are registered
# once, which saves the bookkeeping of who has which memory. Files are registered for one transfer each, so that a
# descriptor's number is never remembered beyond the file's life.
_ALL_MEMORY = [(4096, (1 << 56) - 4096, 0, "")]
_WHOLE_FILE = 1 << 62

Operation = Literal["READ", "WRITE"]


class NixlAgent:
    """Not for several threads at once.

    Raises:
        OSError: NIXL is not installed (ENOSYS); it has no POSIX backend, or the kernel gives it no queue (EIO).
    """

    def __init__(self) -> None:
        self._paces: dict[Operation, Pace] = {"READ": Pace(), "WRITE": Pace()}
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise OSError(errno.ENOSYS, f"NIXL is not installed ({error})") from error
        _quiet()
        try:
            # Without a progress thread, which would spin on a core: this backend moves on when it is looked at.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(NAME, config)
            options = {"ios_pool_size": str(QUEUE), "kernel_queue_size": str(KERNEL_QUEUE)}
            self._agent.create_backend(BACKEND, options)
            self._agent.register_memory(_ALL_MEMORY, "DRAM", [BACKEND])
        # NIXL's errors have no base of their own.
        except Exception as error:
            raise OSError(errno.EIO, f"NIXL's POSIX backend does not start ({error!r})") from error

    @property
    def usable(self) -> bool:
        """False once a transfer left the queue in an unknown state, and after `close`."""
        return self._agent is not None

    def transfer(self, operation: Operation, requests: Sequence[Request], fds: Mapping[OpenFile, int]) -> bool:
        """Move all `requests` at once; blocks until none is under way.

        Args:
            requests: at most `QUEUE`, each with one range of memory.
            fds: an open descriptor of each file.

        Returns:
            True if every byte was moved. False if anything failed; NIXL does not tell what.
        """
        memory = np.array([(*request.memory[0], 0) for request in requests], np.uint64)
        ranges = np.array([(request.offset, request.length, fds[request.file]) for request in requests], np.uint64)
        files = [(0, _WHOLE_FILE, fd, "") for fd in sorted({fds[request.file] for request in requests})]
        agent = self._agent
        try:
            registered = agent.register_memory(files, "FILE", [BACKEND])
        except Exception:
            return False
        try:
            return self._transfer(
                operation,
                agent.get_xfer_descs(memory, "DRAM"),
                agent.get_xfer_descs(ranges, "FILE"),
                requests,
            )
        finally:
            if self.usable:
                agent.deregister_memory(registered, [BACKEND])

    def _transfer(self, operation: Operation, memory: Any, ranges: Any, requests: Sequence[Request]) -> bool:
        agent = self._agent
        try:
            handle = agent.initialize_xfer(operation, memory, ranges, NAME)
        except Exception:
            return False
        try:
            state = agent.transfer(handle)
            moved = self._wait(handle, state, self._paces[operation], requests)
        except BaseException as error:
            # Some requests may be in flight and others in the queue, to be submitted with the next batch.
            _release(handle)
            del handle
            self.close()
            if isinstance(error, Exception):
                return False
            raise
        _release(handle)
        return moved

    def _wait(self, handle: Any, state: str, pace: Pace, requests: Sequence[Request]) -> bool:
        # Before the kernel's queue may be done, or half empty where more is to be handed on to it.
        first = requests[: KERNEL_QUEUE // 2] if len(requests) > KERNEL_QUEUE else requests
        looks = -(-min(len(requests), KERNEL_QUEUE) // PER_LOOK)
        size = sum(request.length for request in first)
        began = time.monotonic()
        for pause in pace.pauses(size):
            if state != "PROC":
                break
            time.sleep(pause)
            try:
                for _ in range(looks):
                    state = self._agent.check_xfer_state(handle)
                    if state != "PROC":
                        break
            except Exception:
                # From 1.5 on (`choose` takes no older one) NIXL says so when nothing is under way any more, and drops
                # what it had not begun.
                return False
        if state == "DONE" and first is requests:
            pace.took(size, time.monotonic() - began)
        return state == "DONE"

    def close(self) -> None:
        """Destroys the queue; returns when the kernel has finished or given up everything that was in it."""
        agent, self._agent = self._agent, None
        if agent is not None:
            # NIXL's own object: the Python one may live on in a traceback.
            agent.agent = None


def _release(handle: Any) -> None:
    # A request that is not over cannot be released; the queue's end, which follows, waits for it.
    with contextlib.suppress(Exception):
        handle.release()


def _quiet() -> None:
    """NIXL's Python part tells stdout of every agent; there is one per reader."""
    log = logging.getLogger("nixl")
    if log.level in (logging.NOTSET, logging.INFO):
        log.setLevel(logging.WARNING)
