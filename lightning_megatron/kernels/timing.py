"""Which of several ways to the same result is the fastest on a GPU under full load, and whether it is the same."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ROUNDS, _BLOCK_S, _MARGIN, _MOST = 3, 0.1, 1.06, 4
_TOLERANCE = 1e-2  # of the norm: rounding to bf16 is some 2e-3


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """A tensor, or several of them, as several."""
    return result if isinstance(result, tuple) else (result,)


def agrees(way: Callable[[], Any], expected: Sequence[Tensor]) -> bool:
    """Whether a way has these results within the rounding of 16 bits."""
    try:
        found = tensors_of(way())
    except RuntimeError:
        return False
    norm = torch.linalg.vector_norm
    same = all(bool(norm(one - other) <= _TOLERANCE * norm(other)) for one, other in zip(found, expected, strict=True))
    if not same:
        sizes = [list(tensor.shape) for tensor in expected]
        warnings.warn(
            f"A kernel of this project gave another result than the library, of {sizes}; it is not used.", stacklevel=2
        )
    return same


def times_of(run: Callable[[int], Any], number: int) -> dict[int, float]:
    """Seconds of those that are nearly the fastest, each timed in turn for ``_BLOCK_S`` several times; the median."""
    quick = {}
    for algorithm in range(number):
        try:
            quick[algorithm] = _seconds(run, algorithm, 3)
        except RuntimeError:
            continue  # proposed, and refused
    best = min(quick.values(), default=0.0)
    near = sorted((algorithm for algorithm in quick if quick[algorithm] <= best * _MARGIN), key=lambda i: quick[i])[:_MOST]
    times: dict[int, list[float]] = {algorithm: [] for algorithm in near}
    for _ in range(_ROUNDS):
        for algorithm in near:
            times[algorithm].append(_seconds(run, algorithm, max(3, int(_BLOCK_S / best))))
    return {algorithm: statistics.median(times[algorithm]) for algorithm in near}


def _seconds(run: Callable[[int], Any], algorithm: int, repeats: int) -> float:
    run(algorithm)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run(algorithm)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats / 1e3
