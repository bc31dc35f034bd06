"""Cross entropy over a part of a vocabulary: logits are read once in the forward, and overwritten in the backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FORWARD_BLOCK = 8192
_BACKWARD_BLOCK = 4096


def local_stats(logits: Tensor, target: Tensor, mine: Tensor, *, num_real: int, sums: bool) -> Tensor:
    """``[N, C] -> fp32 [3, N]``: log-sum-exp of the real columns, the target's logit or 0, and the sum of the real columns.

    Args:
        logits: contiguous rows.
        target: ``[N]`` a column in each row.
        mine: ``[N]`` whether it is this row's label.
        num_real: columns that count.
        sums: whether the sum is wanted; it is 0 otherwise.
    """
    num, columns = logits.shape
    stats = logits.new_empty((3, num), dtype=torch.float32)
    if num:
        block = min(_FORWARD_BLOCK, triton.next_power_of_2(max(1, num_real)))
        with torch.cuda.device_of(logits):
            _cross_entropy_stats[(num,)](
                *(logits, target, mine, stats, num, columns, num_real),
                SUMS=sums,
                BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )
    return stats


def gradient(
    logits: Tensor,
    target: Tensor,
    *,
    lse: Tensor,
    of_softmax: Tensor,
    of_target: Tensor,
    of_all: Tensor | None,
    num_real: int,
    out: Tensor,
) -> None:
    """``out = of_softmax * exp(logits - lse) - of_all``, plus ``of_target`` in the target's column; 0 beyond ``num_real``.

    Args:
        logits: ``[N, C]``, contiguous rows.
        target: ``[N]``.
        lse: fp32 ``[N]``, as the other factors.
        of_softmax: by which the softmax counts.
        of_target: by which the target counts.
        of_all: what is taken off each real column.
        num_real: columns that count.
        out: ``[N, C]``; may be ``logits`` itself.
    """
    num, columns = logits.shape
    if not num or not columns:
        return
    block = min(_BACKWARD_BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device_of(logits):
        _cross_entropy_gradient[(num, triton.cdiv(columns, block))](
            *(logits, target, lse, of_softmax, of_target, lse if of_all is None else of_all, out),
            *(columns, num_real),
            SPREADS=of_all is not None,
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )


@triton.jit
def _cross_entropy_stats(logits, target, mine, stats, num, width, num_real, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    columns = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    scaled = tl.zeros((BLOCK,), dtype=tl.float32)  # sums of exp(x - largest), by lane
    summed = tl.zeros((BLOCK,), dtype=tl.float32)
    for offset in range(0, num_real, BLOCK):
        inside = offset + columns < num_real
        x = tl.load(start + offset + columns, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(x, axis=0))
        # Where all was -inf so far, nothing has to be scaled; -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        scaled = scaled * tl.exp(largest - base) + tl.exp(x - base)
        largest = higher
        if SUMS:
            summed += tl.where(inside, x, 0.0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(stats + row, base + tl.log(tl.sum(scaled, axis=0)))
    own = tl.load(mine + row).to(tl.int1)
    label = tl.load(start + tl.load(target + row), mask=own, other=0.0).to(tl.float32)
    tl.store(stats + num + row, label)
    tl.store(stats + 2 * num + row, tl.sum(summed, axis=0))


@triton.jit
def _cross_entropy_gradient(
    logits,
    target,
    lse,
    of_softmax,
    of_target,
    of_all,
    out,
    width,
    num_real,
    SPREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(of_softmax + row)
    # A row without weight has gradient zero, whatever its logits are.
    grad = tl.where(weight == 0.0, 0.0, tl.exp(x - tl.load(lse + row)) * weight)
    if SPREADS:
        grad -= tl.load(of_all + row)
    grad += tl.where(columns == tl.load(target + row), tl.load(of_target + row), 0.0)
    tl.store(out + row * width + columns, tl.where(columns < num_real, grad, 0.0), mask=inside)
