"""Main values of many weights rounded to e4m3 in one pass over memory, each weight by a factor of its own.

Note [Factors of the step before]
A weight's factor follows from its largest value, on all ranks that share it, so it is known when all values have been read.
But factors are powers of two, and from one step to the next one mostly stays the same: a first launch rounds by the factors
of the step before and takes the largest values; when the new factors are known, a second one leaves at once where they are
those, and rounds again elsewhere. What is written in the end does not depend on the factors of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_CHUNK = 8 * _BLOCK  # elements of one weight that a program rounds
_WARPS = 8


@triton.jit
def _narrow_mains(
    chunks_ptr,
    factors_ptr,
    before_ptr,
    largest_ptr,
    AGAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = chunks_ptr + 4 * tl.program_id(0)
    number = tl.load(row + 3)
    factor = tl.load(factors_ptr + number)
    is_needed = True
    if AGAIN:
        is_needed = factor != tl.load(before_ptr + number)
    if is_needed:
        wide = tl.load(row).to(tl.pointer_type(tl.float32))
        narrow = tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv))
        numel = tl.load(row + 2)
        if ALIGNED:
            wide = tl.multiple_of(wide, 16)
            narrow = tl.multiple_of(narrow, 16)
            numel = tl.multiple_of(numel, 16)
        largest = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in tl.static_range(0, CHUNK, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(wide + at, mask=at < numel, other=0.0)
            largest = tl.maximum(largest, tl.abs(value))
            rounded = (value * factor).to(tl.bfloat16).to(tl.float32)
            tl.store(narrow + at, rounded.to(tl.float8e4nv), mask=at < numel)
        if not AGAIN:
            tl.atomic_max(largest_ptr + number, tl.max(largest, axis=0))


class NarrowMains:
    """Rounds shards of weights that stay where they are. See ``Rounding`` in ``optim/narrow.py``.

    Args:
        parts: the fp32 values, ``[n]``, the bytes, ``[n]``, and the number of the weight, of each shard.
        num_weights: how many weights there are.
        device: where they are.
    """

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, int]], num_weights: int, device: torch.device) -> None:
        chunks = [
            (wide.data_ptr() + 4 * first, narrow.data_ptr() + first, min(wide.numel() - first, _CHUNK), number)
            for wide, narrow, number in parts
            for first in range(0, wide.numel(), _CHUNK)
        ]
        self._parts, self._num_weights = list(parts), num_weights  # whose memory is read and written
        self._chunks = torch.tensor(chunks, dtype=torch.int64, device=device).view(-1, 4)
        numbers = [(wide.data_ptr(), narrow.data_ptr(), wide.numel()) for wide, narrow, _ in parts]
        self._aligned = all(number % 16 == 0 for of_part in numbers for number in of_part)

    def round(self, before: Tensor) -> Tensor:
        """See ``Rounding``."""
        largest = torch.zeros(self._num_weights, device=self._chunks.device)
        self._launch(before, before, largest, again=False)
        return largest

    def round_again(self, factors: Tensor, before: Tensor) -> None:
        """See ``Rounding``."""
        self._launch(factors, before, before, again=True)

    def _launch(self, factors: Tensor, before: Tensor, largest: Tensor, *, again: bool) -> None:
        if self._chunks.shape[0] == 0:
            return
        with torch.cuda.device(self._chunks.device):
            _narrow_mains[(self._chunks.shape[0],)](
                *(self._chunks, factors, before, largest),
                AGAIN=again,
                ALIGNED=self._aligned,
                CHUNK=_CHUNK,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
