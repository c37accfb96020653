"""Whether to prefill elsewhere, as NVIDIA Dynamo decides it: its first releases' rule and that of 1.x."""

from __future__ import annotations


def old_remote(prompt: int, hit_rate: float, queue: float, *, max_local: int = 1000, max_queue: float = 2) -> bool:
    """Dynamo 0.1 and 0.2, `examples/llm/components/disagg_router.py`: whether the prompt goes to the prefill queue.

    Args:
        prompt: tokens.
        hit_rate: part of the prompt that the decode worker holds, 0 to 1.
        queue: requests in the prefill queue.
        max_local: `max-local-prefill-length`; only a longer rest goes.
        max_queue: `max-prefill-queue-size`; only into a shorter queue.
    """
    return int(prompt * (1 - hit_rate)) > max_local and queue < max_queue


def new_bypass(
    prompt: int,
    overlap_blocks: int,
    block_size: int,
    *,
    prefill_busy: bool | None = None,
    decode_busy: bool | None = None,
    threshold: int = 2048,
    ratio: float = 0.7,
) -> bool:
    """Dynamo 1.x, `lib/kv-router/src/conditional_disagg.rs`: whether the decode worker prefills itself.

    Its policy `isl_bounding` knows no `prefill_busy`, `prefill_load` is a `threshold` of 0, `isl_or_load` is both.

    Args:
        overlap_blocks: leading blocks of the prompt that the chosen decode worker holds on its GPU.
        prefill_busy: whether more waits at the chosen prefill worker than it is to have; None if not known.
        decode_busy: whether the decode worker is too full to prefill; None if not known.
        threshold: tokens; what is computed must be below it,
        ratio: and below this part of the prompt.
    """
    if decode_busy:
        return False
    rest = max(0, prompt - overlap_blocks * block_size)
    return (rest < threshold and rest / max(prompt, 1) < ratio) or bool(prefill_busy)
