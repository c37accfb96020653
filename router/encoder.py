"""Texts to token ids: by `tokenizers`, or many times faster by `fastokens` where it is known to give the same.

fastokens (optional) is trusted for a tokenizer after it has agreed on a thousand texts, and is watched from then on:
the first texts, and one a second after that, are tokenized by both in the background. A difference ends its use.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import tokenizers

from vllm_pd.router.tokenizer_proof import differing

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array
"""Of type code "I": four bytes a token, where a list takes 36."""

NO_IDS = TokenIds("I")

FIRST_CHECKS = 32
CHECK_EVERY_S = 1.0
MAX_CHECKED_CHARS = 32_768

_log = logging.getLogger(__name__)

Encode = Callable[[str], TokenIds]


class Encoder:
    """Tokenizes texts, none added around them. Safe to call from several threads.

    Args:
        tokenizer: gives what counts.
        fast: the same in fast, if it is to be tried; see `fast_encoder`.
        proof: on which `fast` must agree before it is used; see `proof_texts`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        fast: Encode | None = None,
        proof: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self.generation = 0
        """Grows when earlier results have turned out to be wrong."""
        self.mismatches = 0
        """Texts on which fastokens was wrong."""
        self._fast = fast
        if fast is not None:
            text = differing(proof, self.exact, fast)
            if text is not None:
                self._give_up(text, "at the start")
        self._checks_left = FIRST_CHECKS
        self._next_check = 0.0
        self._checking: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def fast(self) -> bool:
        """Whether fastokens is in use."""
        return self._fast is not None

    @property
    def idle(self) -> bool:
        """Whether no comparison is going on."""
        return self._checking is None or self._checking.done()

    def encode(self, text: str) -> TokenIds:
        """Token ids. Milliseconds for 30 KB, or 0.1 of one where `fast`."""
        fast = self._fast
        if fast is None:
            return self.exact(text)
        ids = fast(text)
        if self._checks_left or self._clock() >= self._next_check:
            self._check(text, ids)
        return ids

    def exact(self, text: str) -> TokenIds:
        """Token ids by `tokenizers`."""
        # Of the library's calls only those for batches let other threads run.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return TokenIds("I", encoded.ids)

    def _check(self, text: str, ids: TokenIds) -> None:
        """Compare in the background, unless a comparison is still going on."""
        if len(text) > MAX_CHECKED_CHARS or not self.idle:
            return
        self._checks_left = max(0, self._checks_left - 1)
        self._next_check = self._clock() + CHECK_EVERY_S
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-check")
        self._checking = self._thread.submit(self._compare, text, ids)

    def _compare(self, text: str, ids: TokenIds) -> None:
        if self._fast is not None and self.exact(text) != ids:
            self._give_up(text, "while serving")
            self.generation += 1

    def _give_up(self, text: str, when: str) -> None:
        self._fast = None
        self.mismatches += 1
        # The text may be a user's: only what it is like is said.
        _log.warning(
            "fastokens and tokenizers differ %s on a text of %d characters; this model's prompts are tokenized by "
            "tokenizers from now on, which takes the router more CPU time.",
            when,
            len(text),
        )
