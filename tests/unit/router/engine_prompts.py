"""vLLM's own way from a request to token ids, in this process: no engine, no server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from vllm_pd.agent.tokenizer_files import Rendering, served_tokenizer_files
from vllm_pd.state.base import TokenizerFiles


class EnginePrompts:
    """The renderer of an API server that serves `model` with some flags."""

    def __init__(self, model: Path, rendering: Rendering | None = None) -> None:
        from vllm.renderers.online_renderer import OnlineRenderer

        rendering = rendering or Rendering()
        self._config, renderer = _renderer(model)
        self._renderer = OnlineRenderer(
            self._config.model_config,
            renderer,
            request_logger=None,
            chat_template=rendering.chat_template,
            chat_template_content_format=rendering.content_format,  # type: ignore[arg-type]
            exclude_tools_when_tool_choice_none=rendering.drops_unused_tools,
            enable_auto_tools=True,
            default_chat_template_kwargs=dict(rendering.template_kwargs),
        )
        self._rendering = rendering

    def files(self) -> TokenizerFiles:
        """What this server's agent publishes."""
        files = served_tokenizer_files(self._config.model_config, self._rendering)
        assert files is not None
        return files

    def token_ids(self, body: bytes) -> list[int] | None:
        """Ids of the prompt, or None when the server refuses the request."""
        return asyncio.run(self._token_ids(json.loads(body)))

    async def _token_ids(self, data: dict[str, Any]) -> list[int] | None:
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.exceptions import VLLMValidationError

        try:
            if "messages" in data:
                found = await self._renderer.render_chat(ChatCompletionRequest.model_validate(data))
                inputs = found[1] if isinstance(found, tuple) else None
            else:
                inputs = await self._renderer.render_completion(CompletionRequest.model_validate(data))
        except (ValidationError, VLLMValidationError, ValueError, TypeError):
            return None
        return list(inputs[0]["prompt_token_ids"]) if isinstance(inputs, list) else None


_made: dict[Path, tuple[Any, Any]] = {}


def _renderer(model: Path) -> tuple[Any, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers.registry import renderer_from_config

    if model not in _made:
        config = EngineArgs(model=str(model), enforce_eager=True).create_engine_config()
        _made[model] = (config, renderer_from_config(config))
    return _made[model]
