"""How long a modelled engine takes for each thing it does. Times are seconds, lengths are tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self

from vllm_pd.errors import SettingsError
from vllm_pd.routing.model import Rates

KV_BYTES_PER_TOKEN = 131_072
"""Of an 8-billion-parameter model with grouped-query attention in 16 bits; the load times below follow from it."""


class PrefillSample(NamedTuple):
    """One measured prefill, alone on the worker."""

    uncached: int
    cached: int
    seconds: float


class StepSample(NamedTuple):
    """One measured decode step."""

    running: int
    kv_usage: float
    """Fraction of KV blocks in use, 0 to 1."""
    seconds: float


@dataclass(frozen=True, slots=True)
class TimingModel:
    """The defaults are the formula that Dynamo's mocker publishes for one GPU.

    A step that computes `n` new tokens of a prompt, after `e` tokens of it that were computed in earlier steps and
    `c` that came from a cache, takes `prefill_base` once, plus for each such prompt
    `prefill_token * n + prefill_square * n * (e + n / 2) + cached_square * n * c`; if it also decodes, plus
    `max(decode_min, decode_base + decode_kv * p + decode_kv_square * p * p + decode_sequence * s)` for `s` sequences
    in a cache of which the fraction `p` is in use. So a prompt takes the same time whole or in chunks, apart from the
    fixed part. The published formula has no term for cached tokens and none for the number of sequences.
    """

    prefill_base: float = 16.50142e-3
    prefill_token: float = 1.518344e-5
    prefill_square: float = 2 * 4.209989e-10
    cached_square: float = 0.0
    decode_min: float = 1e-3
    decode_base: float = 5.74e-3
    decode_kv: float = 54.01e-3
    decode_kv_square: float = -25.74e-3
    decode_sequence: float = 0.0
    cpu_token: float = KV_BYTES_PER_TOKEN / 25e9
    """To bring the KV of one token from host memory to the GPU, and from SSD."""
    ssd_token: float = KV_BYTES_PER_TOKEN / 5e9
    transfer_base: float = 0.005
    """Hand-over of a remote prefill: fixed part, and per token."""
    transfer_token: float = KV_BYTES_PER_TOKEN / 64e9

    def prefill(self, new: int, earlier: int, cached: int) -> float:
        """What one prompt adds to a step, without `prefill_base`."""
        return new * (self.prefill_token + self.prefill_square * (earlier + new / 2) + self.cached_square * cached)

    def whole_prefill(self, new: int, cached: int = 0) -> float:
        """A prompt alone on an idle engine, in one step."""
        return self.prefill_base + self.prefill(new, 0, cached)

    def decode(self, kv_usage: float, sequences: int) -> float:
        """The decode part of a step."""
        seconds = (
            self.decode_base
            + (self.decode_kv + self.decode_kv_square * kv_usage) * kv_usage
            + self.decode_sequence * sequences
        )
        return max(self.decode_min, seconds)

    def rates(self, block_size: int) -> Rates:
        """The same in the terms of the router, as exactly as they allow."""
        return Rates(
            prefill_base=self.prefill_base,
            prefill_token=self.prefill_token,
            prefill_square=self.prefill_square,
            step_base=self.decode_base,
            step_sequence=self.decode_sequence,
            cpu_block=self.cpu_token * block_size,
            ssd_block=self.ssd_token * block_size,
            transfer_base=self.transfer_base,
            transfer_block=self.transfer_token * block_size,
        )

    def save(self, path: Path) -> None:
        """Write as JSON, readable by `load`. Raises OSError."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; fields that are left out keep their defaults. Raises SettingsError."""
        try:
            values = json.loads(path.read_text())
        except OSError as e:
            raise SettingsError(f"The timing file {path} cannot be read: {e.strerror}.") from None
        except ValueError as e:
            raise SettingsError(f"The timing file {path} is not JSON: {e}.") from None
        known = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise SettingsError(
                f"The timing file {path} must be one JSON object with some of: {', '.join(sorted(known))}."
            )
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise SettingsError(f"{name} in the timing file {path} must be a number of seconds.")
        return cls(**values)


def fit(
    prefills: Sequence[PrefillSample], steps: Sequence[StepSample] = (), base: TimingModel | None = None
) -> TimingModel:
    """The model that explains measurements of one worker best.

    Relative errors are minimized, and no prefill term may be negative. What was not measured keeps the value of
    `base`. Raises SettingsError when there are too few different samples to tell the terms apart.
    """
    values = asdict(base or TimingModel())
    if prefills:
        rows = [(1.0, float(u), u * u / 2.0, float(u * c)) for u, c, _ in prefills]
        found = _least_squares(rows, [seconds for _, _, seconds in prefills], "prefill")
        values |= zip(("prefill_base", "prefill_token", "prefill_square", "cached_square"), found, strict=True)
    if steps:
        found = _least_squares(
            [(1.0, p, float(s)) for s, p, _ in steps], [seconds for _, _, seconds in steps], "decode"
        )
        values |= zip(("decode_base", "decode_kv", "decode_sequence"), found, strict=True)
        values["decode_kv_square"] = 0.0
        values["decode_min"] = min(values["decode_min"], *(seconds for _, _, seconds in steps))
    return TimingModel(**values)


def _least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float], what: str) -> list[float]:
    """Non-negative coefficients of the columns that minimize the relative error; unneeded columns get 0."""
    if len(rows) < 3 or len(set(rows)) < 2:
        raise SettingsError(f"Fitting {what} times takes at least 3 samples of different sizes; {len(rows)} are given.")
    if min(seconds) <= 0:
        raise SettingsError(f"A {what} sample has a time that is not above 0 s; remove it.")
    width = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(width)]
    weighted = [[row[i] / scale[i] / s for i in range(width)] for row, s in zip(rows, seconds, strict=True)]
    free = list(range(width))
    while True:
        found = _solve(weighted, free)
        worst = min(free, key=lambda i: found[i])
        if found[worst] >= 0 or len(free) == 1:
            return [max(found.get(i, 0.0), 0.0) / scale[i] for i in range(width)]
        free.remove(worst)


def _solve(rows: Sequence[Sequence[float]], columns: Sequence[int]) -> dict[int, float]:
    """Ordinary least squares of 1 on some columns: normal equations, Gauss-Jordan, a touch of ridge."""
    n = len(columns)
    matrix = [[sum(row[i] * row[j] for row in rows) for j in columns] + [sum(row[i] for row in rows)] for i in columns]
    for k in range(n):
        matrix[k][k] *= 1 + 1e-9
    for k in range(n):
        pivot = max(range(k, n), key=lambda r: abs(matrix[r][k]))
        matrix[k], matrix[pivot] = matrix[pivot], matrix[k]
        if matrix[k][k] == 0:
            continue
        matrix[k] = [value / matrix[k][k] for value in matrix[k]]
        for r in range(n):
            if r != k and matrix[r][k]:
                factor = matrix[r][k]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[k], strict=True)]
    return {column: matrix[k][n] for k, column in enumerate(columns)}
