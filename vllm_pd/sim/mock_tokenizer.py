"""Tokenizers of mock workers: a model's own, or a toy one that needs no files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.state.base import TokenizerFiles

_ROLES = ("system", "user", "assistant", "tool")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ANSWER = (
    " A mock worker has no model, so it tells the same old story again and again: the quick brown fox jumps over the"
    " lazy dog, the dog gets up, and both run around seven hills until it is time for the next sentence."
)


def toy_files() -> TokenizerFiles:
    """One token for each byte and each role, and a template in which every turn continues the one before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*(f"<|{role}|>" for role in _ROLES), "<|end|>"])
    return TokenizerFiles(tokenizer.to_str().encode(), chat_template=_TEMPLATE, content_format="string")


class MockTokenizer:
    """Tokenizes as the router does, and tells an endless story.

    Args:
        folder: of a model, or its tokenizer.json; None for the toy.

    Raises:
        SettingsError: there is no tokenizer.json.
        ValueError: it cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.files = read_tokenizer_files(folder) if folder is not None else toy_files()
        self.prompts = PromptTokenizer(self.files)
        tokenizer = tokenizers.Tokenizer.from_buffer(self.files.tokenizer_json)
        self._story: list[int] = tokenizer.encode(_ANSWER, add_special_tokens=False).ids
        self._pieces = [
            tokenizer.decode(self._story[: i + 1])[len(tokenizer.decode(self._story[:i])) :]
            for i in range(len(self._story))
        ]
        self._tokenizer = tokenizer

    def answer(self, count: int, told: int = 0) -> list[int]:
        """Ids of `count` tokens of the story, behind the first `told` of them."""
        start = told % len(self._story)
        return (self._story * ((start + count) // len(self._story) + 1))[start : start + count]

    def told(self, ids: Sequence[int]) -> int:
        """With how many tokens of the story, from its beginning on, `ids` ends."""
        story, most = self._story, 0
        for place in [i for i, token in enumerate(story) if ids and token == ids[-1]]:
            back = 0
            while back < len(ids) and ids[-1 - back] == story[(place - back) % len(story)]:
                back += 1
                if (place - back + 1) % len(story) == 0:
                    most = max(most, back)
        return most

    def answer_text(self, start: int, end: int) -> str:
        """The text of tokens `start` to `end` of the story."""
        pieces = self._pieces
        return "".join(pieces[i % len(pieces)] for i in range(start, end))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
