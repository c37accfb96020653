"""From the body of a request to a mock worker to what it asks for."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_pd.block_hash import Lora
from vllm_pd.router.conversation import PromptUnknown
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.sim.mock_worker import MockWorker


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Options(msgspec.Struct):
    """What a request says beyond the prompt."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    priority: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None


class TokenizeOptions(msgspec.Struct):
    """What `/tokenize` is told beyond the prompt."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


@dataclass(slots=True)
class MockRequest:
    """A completion or chat that was read, and what its answer says of itself."""

    id: str
    chat: bool
    model: str
    ids: list[int]
    lora: Lora | None
    salt: str | None
    output: int
    finish_reason: str
    options: _Options
    created: int
    told: int
    """How much of the story the prompt ends with: the answer goes on from there."""

    @property
    def transfer(self) -> dict[str, Any]:
        return self.options.kv_transfer_params or {}

    @property
    def wants_usage(self) -> bool:
        return bool((self.options.stream_options or {}).get("include_usage"))


def read_request(worker: MockWorker, body: bytes, chat: bool, request_id: str | None) -> MockRequest:
    """Read and check a completion or chat. Raises Refused."""
    fields = decode_fields(body)
    try:
        options = msgspec.json.decode(body, type=_Options)
    except msgspec.DecodeError as e:
        raise Refused(400, str(e)) from None
    config = worker.config
    model = fields.model or config.model
    lora = next((lora for lora in config.loras if lora.name == model), None)
    if lora is None and model != config.model:
        raise Refused(404, f"The model `{model}` does not exist.")
    if (fields.n or 1) != 1:
        raise Refused(400, "A mock worker gives one answer to a request (n=1).")
    ids = prompt_ids(worker, fields, chat=chat)
    wanted = options.max_completion_tokens or options.max_tokens
    room = min(config.max_model_len, config.engine.gpu_blocks * config.engine.block_size) - len(ids)
    if room < max(1, wanted or 1):
        raise Refused(
            400,
            f"This model's maximum context length is {config.max_model_len} tokens. However, you requested "
            f"{wanted or 1} output tokens and your prompt contains {len(ids)} input tokens.",
        )
    limit = wanted or room
    told = 0 if chat or _is_text(fields) else worker.tokenizer.told(ids)
    ends = max(1, config.output_tokens - told, options.min_tokens)
    output = limit if options.ignore_eos else min(limit, ends)
    prefix = "chatcmpl" if chat else "cmpl"
    return MockRequest(
        id=f"{prefix}-{request_id or uuid.uuid4().hex}",
        chat=chat,
        model=model,
        ids=ids,
        lora=lora,
        salt=fields.cache_salt,
        output=output,
        finish_reason="length" if output == limit else "stop",
        options=options,
        created=int(time.time()),
        told=told,
    )


def _is_text(fields: RequestFields) -> bool:
    """Whether a completion's prompt is a text, not token ids."""
    return fields.prompt is not msgspec.UNSET and bytes(memoryview(fields.prompt)[:1]) == b'"'


def decode_fields(body: bytes) -> RequestFields:
    """The fields that make the prompt. Raises Refused."""
    fields = read_fields(body)
    if fields is None:
        raise Refused(400, "The body must be a JSON object with fields of the right types.")
    return fields


def prompt_ids(worker: MockWorker, fields: RequestFields, *, chat: bool) -> list[int]:
    """The prompt's token ids. Raises Refused."""
    tokenizer = worker.tokenizer.prompts
    if chat:
        if fields.messages is msgspec.UNSET:
            raise Refused(400, "messages is required")
        try:
            return tokenizer.encode(tokenizer.render(fields), add_special_tokens=bool(fields.add_special_tokens))
        except PromptUnknown as e:
            raise Refused(400, f"A mock worker cannot render this chat: {e.reason}.") from None
    if fields.prompt is msgspec.UNSET:
        raise Refused(400, "prompt is required")
    prompt = json.loads(bytes(fields.prompt))
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=fields.add_special_tokens is not False)
    if not prompt or not isinstance(prompt, list) or not all(isinstance(i, int) and i >= 0 for i in prompt):
        raise Refused(400, "A mock worker takes one prompt a request: a text, or a list of token ids.")
    return prompt
