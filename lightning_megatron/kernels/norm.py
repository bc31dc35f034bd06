"""RMSNorm with the residual addition before it, and the gradient with the residual's added, one pass each, fp32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements of rows that a program works on at once
_PROGRAMS_PER_SM = 3
_GAIN_ROWS, _GAIN_COLUMNS = 128, 32  # of the programs' parts, that are summed at once


def rms_norm_forward(hidden: Tensor, added: Tensor | None, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``x = hidden + added`` and its norm: ``[N, H], [N, H], [H] -> [N, H], [N, H], [N]``.

    Returns x (``hidden`` itself if nothing is added), ``x / rms(x) * weight``, and ``1 / rms(x)`` in fp32. All contiguous.
    """
    num, size = hidden.shape
    summed = hidden if added is None else torch.empty_like(hidden)
    normed, scales = torch.empty_like(hidden), hidden.new_empty(num, dtype=torch.float32)
    if num:
        block, rows, warps = _tile(size)
        with torch.cuda.device_of(hidden):
            _norm_forward[(triton.cdiv(num, rows),)](
                *(hidden, hidden if added is None else added, weight, summed, normed, scales),
                *(num, size, eps),
                ADDS=added is not None,
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return summed, normed, scales


def rms_norm_backward(
    of_normed: Tensor, of_summed: Tensor | None, *, summed: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x ``[N, H]``, ``of_summed`` included, and of the weight (fp32 ``[H]``). All contiguous."""
    num, size = summed.shape
    block, rows, warps = _tile(size)
    programs = min(triton.cdiv(num, rows), _PROGRAMS_PER_SM * _num_multiprocessors(summed))
    of_x = torch.empty_like(summed)
    if not num:
        return of_x, summed.new_zeros(size, dtype=torch.float32)
    parts = summed.new_empty((programs, size), dtype=torch.float32)
    with torch.cuda.device_of(summed):
        _norm_backward[(programs,)](
            *(of_normed, of_normed if of_summed is None else of_summed, summed, weight, scales, of_x, parts),
            *(num, size),
            ADDS=of_summed is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
        of_weight = summed.new_empty(size, dtype=torch.float32)
        _norm_gain[(triton.cdiv(size, _GAIN_COLUMNS),)](
            *(parts, of_weight, programs, size), ROWS=_GAIN_ROWS, COLUMNS=_GAIN_COLUMNS, num_warps=4
        )
    return of_x, of_weight


def _num_multiprocessors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 1


def _tile(size: int) -> tuple[int, int, int]:
    """Columns (all of a row), rows, and warps."""
    block = int(triton.next_power_of_2(size))
    return block, max(1, _TILE // block), min(16, max(8, block // 512))


@triton.jit
def _norm_forward(
    hidden, added, weight, summed, normed, scales, num, size, eps, ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows[:, None] < num) & (columns[None, :] < size)
    places = rows[:, None] * size + columns[None, :]
    stored = tl.load(hidden + places, mask=inside, other=0.0)
    if ADDS:
        other = tl.load(added + places, mask=inside, other=0.0)
        stored = (stored.to(tl.float32) + other.to(tl.float32)).to(stored.dtype)
        tl.store(summed + places, stored, mask=inside)
    x = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / size + eps)
    tl.store(scales + rows, scale, mask=rows < num)
    gain = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(normed + places, x * scale[:, None] * gain[None, :], mask=inside)


@triton.jit
def _norm_backward(
    of_normed,
    of_summed,
    summed,
    weight,
    scales,
    of_x,
    parts,
    num,
    size,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    gain = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
    of_gain = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, num, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows[:, None] < num) & (columns[None, :] < size)
        places = rows[:, None] * size + columns[None, :]
        scale = tl.load(scales + rows, mask=rows < num, other=0.0)
        x = tl.load(summed + places, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        grad = tl.load(of_normed + places, mask=inside, other=0.0).to(tl.float32)
        of_gain += grad * x
        grad = grad * gain[None, :]
        result = (grad - x * (tl.sum(grad * x, axis=1) / size)[:, None]) * scale[:, None]
        if ADDS:
            result += tl.load(of_summed + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + places, result, mask=inside)
    tl.store(parts + tl.program_id(0) * size + columns, tl.sum(of_gain, axis=0), mask=columns < size)


@triton.jit
def _norm_gain(parts, of_weight, num, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # The sum of all programs' parts, always in one order.
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    summed = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, num, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < num) & (columns[None, :] < size)
        summed += tl.load(parts + rows[:, None] * size + columns[None, :], mask=inside, other=0.0)
    tl.store(of_weight + columns, tl.sum(summed, axis=0), mask=columns < size)
