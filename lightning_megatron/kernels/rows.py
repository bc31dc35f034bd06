"""Adding rows to rows: the gradient of an embedding, straight into its sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def add_sorted_rows(total: Tensor, rows: Tensor, order: Tensor, values: Tensor) -> None:
    """``total[rows[i]] += values[order[i]]`` for each i with ``rows[i] >= 0``; ``rows`` ascend. Deterministic.

    Args:
        total: ``[R, H]``, contiguous.
        rows: ``[N]`` int64, sorted.
        order: ``[N]`` int64.
        values: ``[N, H]``.
    """
    num, width = values.shape
    if num == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    values = values if values.stride(1) == 1 else values.contiguous()
    with torch.cuda.device_of(total):
        _add_sorted_rows[(num, triton.cdiv(width, block))](
            total, rows, order, values, num, width, values.stride(0), BLOCK=block, num_warps=4
        )


@triton.jit
def _add_sorted_rows(total, rows, order, values, num, width, stride, BLOCK: tl.constexpr):
    # The first program of a run of equal rows adds them all up, so that no two write to the same place.
    index = tl.program_id(0)
    row = tl.load(rows + index)
    before = tl.load(rows + tl.maximum(index - 1, 0))
    if (row >= 0) & ((index == 0) | (before != row)):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        place = total + row * width + columns
        summed = tl.load(place, mask=inside, other=0.0)
        position = index
        same = row
        while same == row:
            source = tl.load(order + position)
            summed += tl.load(values + source * stride + columns, mask=inside, other=0.0).to(summed.dtype)
            position += 1
            same = tl.load(rows + tl.minimum(position, num - 1))
            same = tl.where(position < num, same, -1)
        tl.store(place, summed, mask=inside)
