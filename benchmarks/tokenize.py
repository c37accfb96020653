"""What it costs a router to know the blocks of a prompt: rendering, tokenizing and hashing, CPU time per request.

`naive` renders and tokenizes the whole prompt with the `tokenizers` library and hashes it as vLLM does. `pieces` is
the router's way with the same library: what earlier requests had is looked up. `fast` is that with fastokens. All
three give the same block keys, which is checked for every request. The model is SmolLM2, the chats are like those of
`router_overhead`: about 30 KB of JSON. Times are medians of the best of five rounds.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Report, Target, parse_arguments, percentile, progress
from scripts.models import smollm2_dir
from vllm_pd.block_hash import KEY_BYTES, BlockHasher
from vllm_pd.router.decision import PromptKind
from vllm_pd.router.encoder import FIRST_CHECKS
from vllm_pd.router.model_folder import read_tokenizer_files
from vllm_pd.router.prompt_blocks import PromptBlocks, PromptHasher
from vllm_pd.router.prompt_tokenizer import PromptTokenizer
from vllm_pd.router.request_fields import RequestFields, read_fields
from vllm_pd.state.base import PoolSpec

BLOCK = 32
SPEC = PoolSpec("smollm2", "main", "bfloat16", "bfloat16", "cpu/auto", BLOCK, "sha256_cbor", "any")
NEW_TURN_US = 150.0
PIECES_NEW_TURN_US = 750.0
ROUNDS = 5

Body = dict[str, Any]
Make = Callable[[], Body]


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind: how each is made, and one that is sent before them."""

    name: str
    make: Make
    before: Make | None = None


class Texts:
    """Words as they occur in the modules of the standard library, in an order of their own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        folder = Path(sysconfig.get_path("stdlib"))
        found = " ".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))[:40])
        self._words = sorted(set(re.findall(r"[ -~]{2,12}", found)))[::7]

    def known(self, size: int) -> str:
        """Words that recur."""
        return self._joined(size, lambda: self._random.choice(self._words))

    def unseen(self, size: int) -> str:
        """Random letters."""
        return self._joined(size, lambda: "".join(self._random.choices("etaoinshrdlu", k=self._random.randint(2, 11))))

    def _joined(self, size: int, word: Callable[[], str]) -> str:
        out: list[str] = []
        while size > 0:
            out.append(word())
            size -= len(out[-1]) + 1
        return " ".join(out)


def cases(texts: Texts) -> list[Case]:
    """Every kind of request."""
    history = [{"role": "user" if n % 2 == 0 else "assistant", "content": texts.known(3000)} for n in range(9)]
    system = {"role": "system", "content": texts.known(500)}

    def chat(*messages: Body) -> Body:
        return {"model": "m", "messages": list(messages)}

    def turn(text: str) -> Body:
        return {"role": "user", "content": text}

    same = chat(system, *history[:-1], turn(texts.known(1500)))
    return [
        Case("small, 20 words", lambda: chat(turn(texts.known(110)))),
        Case("big, repeated", lambda: same, lambda: same),
        Case("big, new turn", lambda: chat(system, *history[:-1], turn(texts.known(1500))), lambda: same),
        Case(
            "big, new turn of unseen words", lambda: chat(system, *history[:-1], turn(texts.unseen(1500))), lambda: same
        ),
        Case("big, new start", lambda: chat({**system, "content": texts.known(500)}, *history), lambda: same),
        Case("big, all new", lambda: chat(*(turn(texts.known(3000)) for _ in range(9)))),
    ]


class Naive:
    """Nothing kept, nothing clever."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._root = BlockHasher(BLOCK).root
        self.encode_us: list[float] = []

    def blocks(self, fields: RequestFields) -> PromptBlocks:
        text = self._tokenizer.render(fields)
        began = time.process_time()
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        self.encode_us.append((time.process_time() - began) * 1e6)
        keys, parent = [], self._root
        for at in range(0, len(ids) - BLOCK + 1, BLOCK):
            parent = _sha256_cbor((parent, tuple(ids[at : at + BLOCK]), None))
            keys.append(parent[:KEY_BYTES])
        return PromptBlocks(len(ids), keys)


def _sha256_cbor(value: Any) -> bytes:
    import cbor2

    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def measure(
    case: Case, blocks: Callable[[RequestFields], PromptBlocks], count: int
) -> Iterator[tuple[RequestFields, PromptBlocks, float]]:
    """Each request with what came out and its CPU time in microseconds."""
    if case.before is not None:
        blocks(_fields(case.before()))
    for fields in [_fields(case.make()) for _ in range(count)]:
        began = time.process_time()
        found = blocks(fields)
        yield fields, found, (time.process_time() - began) * 1e6


def _fields(body: Body) -> RequestFields:
    fields = read_fields(json.dumps(body).encode())
    assert fields is not None
    return fields


def run(count: int, report: Report) -> None:
    """Fill in the report."""
    files = read_tokenizer_files(smollm2_dir())
    plain, fast = PromptTokenizer(files, fast=False), PromptTokenizer(files)
    variants = {"pieces": plain, "fast": fast} if fast.encoder.fast else {"pieces": plain}
    if not fast.encoder.fast:
        report.notes.append("fastokens was not measured: it is not installed (pip install 'vllm-pd[fast]')")
    new_turn: dict[str, float] = {}
    for case in cases(Texts(0)):
        progress(f"{case.name} ...")
        naive = Naive(plain)
        sample = list(measure(case, naive.blocks, max(5, count // 20)))
        whole = _middle([took for _, _, took in sample])
        report.results.append(_row(case, "naive", sample, plain, whole, encode=_middle(naive.encode_us)))
        for name, tokenizer in variants.items():
            hasher = PromptHasher(SPEC, tokenizer)
            _settle(hasher)
            found = list(measure(case, lambda fields, hasher=hasher: _as_the_router(hasher, fields), count))
            for fields, got, _ in found:
                if got != naive.blocks(fields):
                    raise SystemExit(f"{name} gave other blocks than vLLM's way for a request of {case.name!r}")
            took = _middle([each for _, _, each in found])
            report.results.append(_row(case, name, found, tokenizer, took))
            if case.name == "big, new turn":
                new_turn[name] = took
    report.targets.append(Target.at_most("new turn, CPU us per request", new_turn.get("fast"), NEW_TURN_US))
    report.targets.append(
        Target.at_most("new turn without fastokens, CPU us per request", new_turn.get("pieces"), PIECES_NEW_TURN_US)
    )


def _as_the_router(hasher: PromptHasher, fields: RequestFields) -> PromptBlocks:
    hasher.cheap(fields, PromptKind.CHAT)
    return hasher.blocks(fields, PromptKind.CHAT)


def _settle(hasher: PromptHasher) -> None:
    """Let the first texts be compared in the background before anything is measured."""
    texts = Texts(1)
    for _ in range(2 * FIRST_CHECKS):
        hasher.blocks(_fields({"messages": [{"role": "user", "content": texts.known(200)}]}), PromptKind.CHAT)
        time.sleep(0.002)


def _row(
    case: Case,
    name: str,
    found: Sequence[tuple[RequestFields, PromptBlocks, float]],
    tokenizer: PromptTokenizer,
    took: float,
    encode: float | None = None,
) -> dict[str, Any]:
    render = _middle([_timed(lambda fields=fields: tokenizer.render(fields)) for fields, _, _ in found])
    return {
        "requests": case.name,
        "way": name,
        "tokens": found[0][1].tokens,
        "render_us": render,
        "tokenize_us": encode,
        "rest_us": took - render - (encode or 0.0),
        "total_us": took,
    }


def _timed(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1e6


def _middle(values: Sequence[float]) -> float:
    """Median of the best of `ROUNDS` rounds: other programs on the machine only ever add."""
    size = max(1, len(values) // ROUNDS)
    return min(percentile(values[at : at + size], 50) for at in range(0, len(values) - size + 1, size))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(__doc__ or "", argv)
    report = Report("tokenize")
    gc.freeze()
    run(60 if args.quick else 300, report)
    report.show(as_json=args.json)
    return 0 if all(target.ok for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
