"""The JSON of a mock worker's answers, as vLLM gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_pd.holds import hold_key
from vllm_pd.sim.mock_faults import Faults
from vllm_pd.sim.mock_request import MockRequest
from vllm_pd.sim.mock_worker import Generation, MockWorker


def whole_answer(worker: MockWorker, answer: MockRequest, generation: Generation, faults: Faults) -> dict[str, Any]:
    """An answer in one piece, with what a decode worker needs if it was asked for."""
    text = worker.tokenizer.answer_text(answer.told, answer.told + answer.output)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": answer.finish_reason, "stop_reason": None}
    if answer.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    value: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion" if answer.chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
        "usage": usage_of(answer, generation),
        "kv_transfer_params": None,
    }
    if answer.transfer.get("do_remote_decode"):
        value["kv_transfer_params"] = _spoil(
            worker, worker.hold(answer.id, generation, hold_key(answer.transfer)), faults
        )
        if faults.wrong_prefill == "missing":
            del value["kv_transfer_params"]
    return value


def _spoil(worker: MockWorker, params: Mapping[str, Any], faults: Faults) -> dict[str, Any] | None:
    """Transfer parameters as the faults want them."""
    if faults.wrong_prefill is None:
        return dict(params)
    worker.holds.release(params["remote_request_id"])
    if faults.wrong_prefill == "garbage":
        return {"do_remote_prefill": True, "remote_block_ids": "none", "remote_port": -1}
    return dict(params) if faults.wrong_prefill == "gone" else None


def usage_of(answer: MockRequest, generation: Generation) -> dict[str, Any]:
    """Token counts."""
    assert generation.work is not None
    return {
        "prompt_tokens": len(answer.ids),
        "completion_tokens": generation.generated,
        "total_tokens": len(answer.ids) + generation.generated,
        "prompt_tokens_details": {"cached_tokens": generation.work.cached},
    }


def chunk(answer: MockRequest, content: Any, finish_reason: str | None, ids: list[int] | None = None) -> dict[str, Any]:
    """One event of a stream. `content` is a text, or a chat's delta; `ids` are its tokens where they are asked for."""
    choice: dict[str, Any] = {
        "index": 0,
        "delta" if answer.chat else "text": content,
        "logprobs": None,
        "finish_reason": finish_reason,
    }
    if ids is not None:
        choice["token_ids"] = ids
    return {
        "id": answer.id,
        "object": "chat.completion.chunk" if answer.chat else "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    }


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
