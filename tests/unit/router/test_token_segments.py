"""Where texts may be cut, and when fastokens is trusted."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vllm_pd.router.encoder import CHECK_EVERY_S, FIRST_CHECKS, Encode, Encoder, TokenIds
from vllm_pd.router.fast_encoder import load_fast
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.token_segments import TokenSegments, find_separator
from vllm_pd.router.tokenizer_proof import chats, differing, proof_texts
from vllm_pd.state import TokenizerFiles

SAMPLE = "<a>x<b>y<a>z"


def plain(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, special=True, **flags)


def test_chats_are_cut_at_the_added_token_that_occurs_most() -> None:
    assert find_separator([plain("<b>"), plain("<a>"), plain("<c>")], SAMPLE) == "<a>"
    assert find_separator([plain("<c>")], SAMPLE) is None
    assert find_separator([], SAMPLE) is None


@pytest.mark.parametrize(
    "token",
    [
        plain("<a>", lstrip=True),
        plain("<a>", rstrip=True),
        plain("<a>", single_word=True),
        AddedToken("<a>", normalized=True),
        plain(" <a>"),
        plain("x"),
    ],
)
def test_tokens_that_are_matched_under_conditions_are_not_cut_at(token: AddedToken) -> None:
    others = [AddedToken("xx", normalized=True)] if token.content == "x" else []
    assert find_separator([token, *others], SAMPLE) is None


@pytest.mark.parametrize("other", ["<a>x", "y<a>", "<", "a>b", "b<a", "<a><a>"])
def test_tokens_of_which_a_part_may_be_anothers_are_not_cut_at(other: str) -> None:
    assert find_separator([plain("<a>"), plain(other)], "<a>..<a>") != "<a>"


def test_tokens_that_overlap_themselves_are_not_cut_at() -> None:
    assert find_separator([plain("aba")], "aba aba") is None


def _metaspace(prepend: str) -> Tokenizer:
    """As SentencePiece models come: a space in front, once or before every piece."""
    alphabet = {c: n for n, c in enumerate("▁abcdefghijklmnopqrstuvwxyz<>|\n", 5)}
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, **alphabet}, [], unk_token="<unk>"))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([plain("<|im|>"), plain("<s>")])
    return tokenizer


TEMPLATE = "{% for m in messages %}<|im|>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("prepend", ["always", "never", "first", "normalizer"])
@pytest.mark.parametrize(
    "text", ["", "ab", " ab", "<|im|>", "<|im|><|im|> x", "ab<|im|>cd  <s> e<|im|> ", "<s><|im|>a"]
)
def test_tokenizers_that_put_a_space_in_front_are_cut_right_or_not_at_all(prepend: str, text: str) -> None:
    tokenizer = _metaspace(prepend)
    ours = PromptTokenizer(TokenizerFiles(tokenizer.to_str().encode(), b"", TEMPLATE))
    assert [id for piece in ours.segments.cut(text) for id in ours.segments.ids(piece)] == (
        tokenizer.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_real_models_are_cut_at_their_turns_and_agree_with_fastokens(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("fastokens")
    model: Path = request.getfixturevalue(f"{name}_model")
    content = (model / "tokenizer.json").read_bytes()
    tokenizer, fast = tokenizers.Tokenizer.from_buffer(content), load_fast(content)
    assert fast is not None
    texts = proof_texts(tokenizer)
    assert len(texts) > 600
    assert differing(texts, Encoder(tokenizer).exact, fast) is None
    assert differing(chats(tokenizer, "<|end|>", texts), Encoder(tokenizer).exact, fast) is None
    files = TokenizerFiles(content, b"", (model / "chat_template.jinja").read_text())
    assert PromptTokenizer(files).segments.separator == {"tiny": "<|end|>", "smollm2": "<|im_start|>"}[name]


# An encoder with something fast that can be wrong.


@pytest.fixture
def tokenizer(tiny_model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def wrong_on(tokenizer: tokenizers.Tokenizer, word: str) -> Encode:
    exact = Encoder(tokenizer).exact

    def encode(text: str) -> TokenIds:
        return TokenIds("I", [7]) if word in text else exact(text)

    return encode


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_differs_on_the_proof_is_never_used(
    tokenizer: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder(tokenizer, wrong_on(tokenizer, "Grüße"), proof_texts(tokenizer))
    assert not encoder.fast
    assert encoder.mismatches == 1
    assert "differ at the start" in caplog.text
    assert encoder.encode("Grüße") == encoder.exact("Grüße")


def test_what_turns_out_to_be_wrong_while_serving_is_given_up_and_forgotten(
    tokenizer: tokenizers.Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Encoder(tokenizer, wrong_on(tokenizer, "secret"), proof_texts(tokenizer))
    segments = TokenSegments(encoder, "<|end|>")
    assert encoder.fast
    with caplog.at_level(logging.WARNING):
        assert segments.ids("a secret") == TokenIds("I", [7])
        eventually(lambda: not encoder.fast)
    eventually(lambda: encoder.generation == 1)
    assert segments.ids("a secret") == encoder.exact("a secret")
    assert encoder.mismatches == 1
    assert "differ while serving" in caplog.text
    assert "secret" not in caplog.text


def test_the_first_texts_are_compared_and_then_one_a_second(tokenizer: tokenizers.Tokenizer) -> None:
    clock, compared = Clock(), []

    class Watched(Encoder):
        def exact(self, text: str) -> TokenIds:
            compared.append(text)
            return super().exact(text)

    encoder = Watched(tokenizer, wrong_on(tokenizer, "never"), clock=clock)
    for n in range(FIRST_CHECKS):
        encoder.encode(f"text {n}")
        eventually(lambda n=n: len(compared) > n and encoder.idle)  # type: ignore[misc]
    encoder.encode("within the second")
    clock.now += CHECK_EVERY_S
    encoder.encode("after it")
    eventually(lambda: len(compared) == FIRST_CHECKS + 1)
    assert compared[-1] == "after it"


def test_an_unsupported_tokenizer_has_no_fast_one() -> None:
    pytest.importorskip("fastokens")
    assert load_fast(b"{}") is None


def test_memory_of_a_fast_tokenizer_is_bounded_whatever_texts_it_is_sent() -> None:
    pytest.importorskip("fastokens")
    content = unsplit_tokenizer()
    fast = load_fast(content, renew_chars=500_000)
    assert fast is not None
    chance = random.Random(5)
    exact = tokenizers.Tokenizer.from_buffer(content)

    def texts(count: int) -> None:
        for i in range(count):
            text = "".join(chance.choices("abcdefgh", k=2000))
            ids = fast(text)
            assert i % 50 or list(ids) == exact.encode(text, add_special_tokens=False).ids

    texts(2000)
    before = resident_mib()
    texts(4000)
    # Without a limit it remembers 80 MiB of these.
    assert resident_mib() - before < 30


def unsplit_tokenizer() -> bytes:
    """Of bytes, for which every text is one piece."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer.to_str().encode()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
