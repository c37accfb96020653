"""Where a text can be cut so that the tokens of the pieces, one after the other, are the tokens of the text.

Tokenizers look for added tokens (`<|im_start|>`, say) before anything else and treat what lies between them apart. So
a text may be cut before each occurrence of an added token that is matched exactly as it is written; chats are cut at
the one that their template writes most often. The pieces' tokens are kept, for what comes again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable

import tokenizers

from vllm_pd.router.encoder import Encoder, TokenIds
from vllm_pd.router.lru import ByteLru

MAX_BYTES = 32 * 1024 * 1024

_ENTRY_BYTES = 400


def find_separator(added: Iterable[tokenizers.AddedToken], sample: str) -> str | None:
    """The added token to cut texts like `sample` at, or None.

    It must be found wherever it is written: matched before normalization, with no conditions or whitespace around it,
    and no part of it may be part of another match.
    """
    tokens = list(added)
    contents = [token.content for token in tokens]
    usable = [
        token.content
        for token in tokens
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and token.content.strip() == token.content != ""
        and not any(_overlap(token.content, other) for other in contents if other != token.content)
        and not _overlaps_itself(token.content)
    ]
    counts = {content: sample.count(content) for content in usable}
    best = max(counts, key=lambda content: counts[content], default=None)
    return best if best is not None and counts[best] else None


def _overlap(one: str, other: str) -> bool:
    if one in other or other in one:
        return True
    shorter = min(len(one), len(other))
    return any(one[-n:] == other[:n] or other[-n:] == one[:n] for n in range(1, shorter))


def _overlaps_itself(text: str) -> bool:
    return any(text[-n:] == text[:n] for n in range(1, len(text)))


class TokenSegments:
    """Cuts texts and tokenizes pieces. Safe to call from several threads.

    Args:
        encoder: tokenizes pieces.
        separator: see `find_separator`; None to leave texts whole.
        max_bytes: of what is kept.
    """

    def __init__(self, encoder: Encoder, separator: str | None, max_bytes: int = MAX_BYTES) -> None:
        self._encoder = encoder
        self.separator = separator
        self._known: ByteLru[tuple[int, str], TokenIds] = ByteLru(max_bytes)
        self._lock = threading.Lock()

    def cut(self, text: str, at: int = 0) -> list[str]:
        """The pieces of what follows `at`, where one begins; each but perhaps the first begins with the separator."""
        rest = text[at:] if at else text
        if self.separator is None:
            return [rest] if rest or not at else []
        first, *others = rest.split(self.separator)
        pieces = [self.separator + piece for piece in others]
        return [first, *pieces] if first else pieces

    def ids(self, piece: str) -> TokenIds:
        """Tokens of a piece that `cut` made."""
        key = (self._encoder.generation, piece)
        with self._lock:
            ids = self._known.get(key)
            if ids is not None:
                self._known.touch((key,))
                return ids
        ids = self._encoder.encode(piece)
        with self._lock:
            self._known.put(key, ids, _ENTRY_BYTES + sys.getsizeof(piece) + ids.itemsize * len(ids))
        return ids

    def knows(self, piece: str) -> bool:
        """Whether `ids` only has to look it up."""
        return (self._encoder.generation, piece) in self._known

    @property
    def kept_bytes(self) -> int:
        """What is kept, about."""
        return self._known.size
