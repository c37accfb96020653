"""How registry values look in the store, and how what several writers wrote becomes one picture. Pure.

Records are JSON, so that an operator can read them with any Redis client; loads and tokenizer files are msgpack.
Decoders refuse anything of another shape and ignore fields that a newer version added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from vllm_pd.state.base import (
    Epoch,
    RegistrySnapshot,
    Role,
    RouterWork,
    TokenizerFiles,
    WorkerId,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from vllm_pd.state.roles import WantedRole

_record_decoder = msgspec.json.Decoder(WorkerRecord)
_loads_decoder = msgspec.msgpack.Decoder(dict[int, WorkerLoad])
_work_decoder = msgspec.msgpack.Decoder(dict[str, tuple[int, int]])
_tokenizer_decoder = msgspec.msgpack.Decoder(TokenizerFiles)


def encode_record(record: WorkerRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_record(data: bytes) -> WorkerRecord:
    """Raises ValueError when `data` is no record."""
    return _record_decoder.decode(data)


def encode_loads(loads: Mapping[int, WorkerLoad]) -> bytes:
    return msgspec.msgpack.encode(dict(loads))


def decode_loads(data: bytes) -> dict[int, WorkerLoad]:
    """Raises ValueError when `data` is no load entry."""
    return _loads_decoder.decode(data)


def encode_work(work: Mapping[WorkerId, RouterWork]) -> bytes:
    return msgspec.msgpack.encode({worker: (each.prefill_tokens, each.requests) for worker, each in work.items()})


def decode_work(data: bytes) -> dict[WorkerId, RouterWork]:
    """Raises ValueError when `data` is not a router's work."""
    return {WorkerId(worker): RouterWork(*each) for worker, each in _work_decoder.decode(data).items()}


def encode_wish(wanted: WantedRole) -> str:
    """A wish from its role on; its end and its epoch stand before it. Raises ValueError when `by` has a colon."""
    if ":" in wanted.by:
        raise ValueError(f"who wishes must be named without a colon, not {wanted.by!r}")
    return f"{wanted.role}:{wanted.timeout_ms}:{wanted.by}:{wanted.id}"


def decode_wish(data: bytes) -> tuple[int, WantedRole]:
    """When it ends, ms of the store's clock, and the wish. Raises ValueError when `data` is none."""
    ends, epoch, role, timeout_ms, by, id = data.decode().split(":", 5)
    return int(ends), WantedRole(Role(role), Epoch(int(epoch)), id, by, int(timeout_ms))


def encode_tokenizer(files: TokenizerFiles) -> bytes:
    return msgspec.msgpack.encode(files)


def decode_tokenizer(data: bytes, sha: str) -> TokenizerFiles | None:
    """The files, or None when they are malformed or are not the content that `sha` names."""
    try:
        files = _tokenizer_decoder.decode(data)
    except ValueError:
        return None
    return files if files.sha == sha else None


def merge_loads(entries: Iterable[Mapping[int, WorkerLoad]]) -> dict[int, WorkerLoad]:
    """The newest load per engine over all writers: an engine's statistics reach whichever front end got its outputs."""
    merged: dict[int, WorkerLoad] = {}
    for entry in entries:
        for engine, load in entry.items():
            if engine not in merged or load.at_ms > merged[engine].at_ms:
                merged[engine] = load
    return dict(sorted(merged.items()))


def by_worker(works: Iterable[tuple[str, Mapping[WorkerId, RouterWork]]]) -> dict[WorkerId, dict[str, RouterWork]]:
    """From router id -> its work to worker -> every router's work on it, in the order of router ids."""
    out: dict[WorkerId, dict[str, RouterWork]] = {}
    for router, work in sorted(works, key=lambda item: item[0]):
        for worker, each in work.items():
            out.setdefault(worker, {})[router] = each
    return out


def assemble(states: Iterable[WorkerState]) -> RegistrySnapshot:
    """One state per worker id, ordered by id.

    A worker that restarted with another model is in its old pool until that lease ends; the newest epoch wins.
    """
    newest: dict[str, WorkerState] = {}
    for state in states:
        known = newest.get(state.record.id)
        if known is None or state.record.epoch > known.record.epoch:
            newest[state.record.id] = state
    return RegistrySnapshot(tuple(newest[id] for id in sorted(newest)))
