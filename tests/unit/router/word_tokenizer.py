"""A tokenizer of one token a word, `<s>` in front when special tokens are asked for, and a template for it."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import models, pre_tokenizers, processors

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}{% if extra_words %} x y z{% endif %}"
)
CONFIG = json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}).encode()


def word_tokenizer() -> bytes:
    """Its `tokenizer.json`."""
    vocab = {"<s>": 0, "?": 1, "word": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str().encode()
