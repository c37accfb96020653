"""Texts on which two tokenizers must agree before one is trusted in the other's place.

Always the same for one tokenizer: scripts, white space, digits, code, broken characters, every added token in several
surroundings, and texts made of the tokenizer's own vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import tokenizers

MAX_ADDED = 400
"""Added tokens that are tried; some vocabularies reserve a thousand of one form."""

_TEXTS = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n \n\t\t \r\n\r\r x",
    "Hello, world! How's it going? I'll say we've DON'T can'T it's",
    "  two in front,  two within, two behind  ",
    "The year 2024, 3.14159, 1,234,567.89, 0xDEADBEEF, 1e-10, ½ ² ٣٤ 一二三 १२३",
    "def f(x: int) -> dict:\n    return {'a': [1, 2], \"b\": x ** 2}  # note\n\n\n\tif (a&&b||!c){d<<=3;}//€",
    "https://example.org/a/b?c=d&e=%20f#g user@mail.example <b>bold</b> &amp; \\n \\u00e9",
    "Grüße, naïve façade, Ærøskøbing, žluťoučký kůň, Ελληνικά, русский текст, עברית, العربية",
    "हिन्दी में लिखा, ภาษาไทย, 日本語のテキスト。漢字とかな、カタカナ！ 中文，标点。 한국어 문장",
    "e\u0301 A\u030a \u1e9b\u0323 ﬁ ﷺ Ǆ İstanbul ß ſ K",
    "🙂🙃 👩‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️‍🔥 \U0001f600\U0001f600\U0001f600",
    "\u00a0\u2003\u3000\u200b\u200c\u200d\u2060\ufeff|\u2028\u2029\x0b\x0c\x85",
    "\x00\x01\x02\x1b[31m\x7f\x80\x9f\ufffd\uffff\U0010ffff\ue000",
    "a" * 700,
    " " * 300,
    "=" * 200 + "-" * 77 + "\n" * 40,
    "ab" * 300 + "1" * 300,
    "word " * 400,
)
_RANGES = (
    (0x20, 0x7F),
    (0x20, 0x7F),
    (0x61, 0x7B),
    (0x30, 0x3A),
    (0x09, 0x0E),
    (0xA0, 0x250),
    (0x300, 0x370),
    (0x370, 0x530),
    (0x590, 0x700),
    (0x900, 0xA00),
    (0x2000, 0x2070),
    (0x3000, 0x3100),
    (0x4E00, 0x4F00),
    (0xAC00, 0xAD00),
    (0x1F300, 0x1F700),
)


def proof_texts(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """About a thousand texts, 150 KB."""
    draw = random.Random(0)
    texts = list(_TEXTS)
    texts.extend(_of_ranges(draw, 350))
    texts.extend(_of_vocabulary(draw, tokenizer, 250))
    texts.extend(_of_added_tokens(draw, tokenizer))
    texts.append("\n".join(draw.sample(texts, 60)))
    return texts


def chats(tokenizer: tokenizers.Tokenizer, separator: str, texts: Sequence[str]) -> list[str]:
    """Texts with many added tokens, `separator` above all, and some of `texts` in between."""
    draw = random.Random(1)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    found = []
    for _ in range(120):
        parts = [draw.choice(("", draw.choice(texts)))]
        for _ in range(draw.randint(1, 6)):
            parts += [separator, draw.choice(("", "\n", " ", *draw.choices(texts, k=5)))]
            parts += [draw.choice(added)] * draw.randint(0, 1) + [draw.choice(("", "\n", "  ", draw.choice(texts)))]
        found.append("".join(parts))
    return found


def differing(
    texts: Iterable[str], one: Callable[[str], Iterable[int]], other: Callable[[str], Iterable[int]]
) -> str | None:
    """The first text whose tokens are not the same, or None."""
    return next((text for text in texts if list(one(text)) != list(other(text))), None)


def _of_ranges(draw: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        ranges = draw.choices(_RANGES, k=draw.randint(1, 4))
        yield "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(draw.randint(1, 80)))


def _of_vocabulary(draw: random.Random, tokenizer: tokenizers.Tokenizer, count: int) -> Iterator[str]:
    size = tokenizer.get_vocab_size()
    for _ in range(count):
        ids = [draw.randrange(size) for _ in range(draw.randint(1, 40))]
        yield tokenizer.decode(ids, skip_special_tokens=draw.random() < 0.5)


def _of_added_tokens(draw: random.Random, tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for content in draw.sample(added, min(MAX_ADDED, len(added))):
        around = draw.choice(("a", " ", "\n", "é", "1", ".", content))
        yield draw.choice((content, content + content, f"x {content} y", f" {content}\n"))
        yield f"{around}{content}{around}"
        yield content[:-1] + draw.choice(added) + content[1:] + content.upper()
