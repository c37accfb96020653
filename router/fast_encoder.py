"""fastokens' tokenizers, kept from growing.

fastokens remembers the tokens of every piece of text that it has met, up to some hundred thousand pieces however long
they are. Words of a language fill that to tens of megabytes; texts without spaces, which a client can send as it
likes, to tens of gigabytes. So after some text a tokenizer is replaced by a fresh one, loaded beside.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from vllm_pd.router.encoder import Encode, TokenIds

RENEW_CHARS = 4 * 1024 * 1024
"""Text after which a tokenizer is replaced. It remembers about ten bytes for each character that it never met. Loading
one takes a few tenths of a second of another core."""

_log = logging.getLogger(__name__)


def load_fast(tokenizer_json: bytes, renew_chars: int = RENEW_CHARS) -> Encode | None:
    """fastokens' tokenizer of a `tokenizer.json`; None when it is not installed or does not support this one."""
    if sys.byteorder != "little":
        return None
    try:
        return _Renewed(tokenizer_json, renew_chars)
    except ImportError:
        return None
    except Exception as e:  # the Rust library raises bare Exception
        _log.debug("fastokens does not support a tokenizer: %s", e)
        return None


class _Renewed:
    """Safe to call from several threads: what they count is a limit that may be missed by a text or two."""

    def __init__(self, tokenizer_json: bytes, renew_chars: int) -> None:
        self._json = tokenizer_json.decode()
        self._renew_chars = renew_chars
        self._chars = 0
        self._tokenizer = _load(self._json)
        self._renewing: threading.Thread | None = None

    def __call__(self, text: str) -> TokenIds:
        self._chars += len(text)
        if self._chars > self._renew_chars and self._renewing is None:
            # Loading takes tenths of a second without Python's lock.
            self._renewing = threading.Thread(target=self._renew, name="vllm_pd_fastokens", daemon=True)
            self._renewing.start()
        # This call makes no list of numbers, which takes longer than to tokenize.
        return TokenIds("I", self._tokenizer.encode_batch_flat([text])[0])

    def _renew(self) -> None:
        self._tokenizer = _load(self._json)
        self._chars = 0
        self._renewing = None


def _load(tokenizer_json: str) -> Any:
    import fastokens

    tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
