"""One thing of vLLM's that we use, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Internal:
    """One thing of vLLM's that we use.

    Attributes:
        alias: name under which `vllm_pd.vllm_compat` offers it.
        module: dotted module that defines it.
        name: attribute of that module (a class, function or object).
        members: attributes, dataclass fields or methods we use; a method with parameters is written
            `method(a, b)` and must accept at least those, by position, after self or cls. `__call__(a)` stands
            for the parameters of a function.
        why: what we do with it.
    """

    alias: str
    module: str
    name: str
    members: tuple[str, ...]
    why: str
