"""Cross entropy over a part of a vocabulary, and the gradient of the logits, written over them.

Note [Lanes]
What bounds these kernels is memory, so its pipe must not run dry: no thread waits for others while a row is swept. A row is
read in tiles ``[LANES, STEPS, 16 bytes]`` whose lanes are threads (Triton deals out the first dim first), and each lane keeps
a maximum and a sum of its own; they are joined once a row. Exponentials come from a unit that gives 16 a clock, an eighth of
what the others give, so that a lane scales its sum once a tile and not once an element, and powers are of two.

Note [Second look at a row]
Losses and gradients in one kernel look at a row twice: for its log-sum-exp, and to write the gradient over it. The second
look goes backwards, from what has just been read, and finds in the cache what is still there: with one row of 256 KB on each
of 132 multiprocessors all of it, in 50 MB.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_BACKWARD_BLOCK = 4096


@dataclass(frozen=True)
class Sweep:
    """How a row is swept.

    Args:
        warps: that work on a row.
        steps: pieces of 16 bytes that each thread reads at once.
        programs_per_sm: rows that a multiprocessor works on at once, by programs that take one row after the other; 0 for
            one program a row.
    """

    warps: int
    steps: int
    programs_per_sm: int = 0


STATS = Sweep(warps=8, steps=4)
LOSSES = Sweep(warps=32, steps=4)


def local_stats(logits: Tensor, target: Tensor, mine: Tensor, *, num_real: int, sums: bool, sweep: Sweep = STATS) -> Tensor:
    """``[N, C] -> fp32 [3, N]``: log-sum-exp of the real columns, the target's logit or 0, and the sum of the real columns.

    Args:
        logits: contiguous rows.
        target: ``[N]`` a column in each row.
        mine: ``[N]`` whether it is this row's label.
        num_real: columns that count.
        sums: whether the sum is wanted; it is 0 otherwise.
        sweep: how rows are swept.
    """
    num, columns = logits.shape
    stats = logits.new_empty((3, num), dtype=torch.float32)
    if num:
        with torch.cuda.device_of(logits):
            _cross_entropy_stats[_grid(logits, sweep)](
                *(logits, target, mine, stats, num, columns, num_real),
                SUMS=sums,
                **_tile(logits, sweep),
            )
    return stats


def losses_with_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    num_real: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    sweep: Sweep = LOSSES,
) -> Tensor:
    """Losses ``[N, C], [N] -> fp32 [N]`` over a whole vocabulary; ``logits`` become the gradient of each row's loss.

    Args:
        logits: contiguous rows; written over. 0 beyond ``num_real``, and in rows that do not count.
        labels: columns, ``ignore_index`` for rows that do not count.
        num_real: columns that count.
        ignore_index: see ``labels``.
        label_smoothing: see ``tensor_parallel.cross_entropy``.
        z_loss: likewise.
        sweep: how rows are swept.
    """
    num, columns = logits.shape
    losses = logits.new_empty(num, dtype=torch.float32)
    if num:
        with torch.cuda.device_of(logits):
            _cross_entropy_losses[_grid(logits, sweep)](
                *(logits, labels, losses, num, columns, num_real),
                *(ignore_index, 1.0 - label_smoothing, label_smoothing / num_real, z_loss),
                SMOOTHS=label_smoothing > 0.0,
                SQUARES=z_loss != 0.0,
                **_tile(logits, sweep),
            )
    return losses


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


def scale_rows(x: Tensor, factors: Tensor, *, out: Tensor) -> None:
    """``out = x * factors[:, None]``, computed in fp32 and rounded once: ``[N, H], fp32 [N]``. ``out`` may be ``x`` itself."""
    num, size = x.shape
    if not num or not size:
        return
    block = min(4096, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):
        _cross_entropy_scale[(num, triton.cdiv(size, block))](
            *(x, factors, out, size),
            BLOCK=block,
            num_warps=min(8, max(1, block // 512)),
        )


def _grid(logits: Tensor, sweep: Sweep) -> tuple[int]:
    num = logits.shape[0]
    if not sweep.programs_per_sm or not logits.is_cuda:
        return (num,)
    return (min(num, sweep.programs_per_sm * torch.cuda.get_device_properties(logits.device).multi_processor_count),)


def _tile(logits: Tensor, sweep: Sweep) -> dict[str, int]:
    """Sizes of a tile, see Note [Lanes], no wider than rows need."""
    width = 16 // logits.element_size()
    warps = max(1, min(sweep.warps, triton.next_power_of_2(triton.cdiv(logits.shape[1], 32 * width))))
    return {"STEPS": sweep.steps, "LANES": 32 * warps, "WIDTH": width, "num_warps": warps}


@triton.jit
def _places(STEPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of a tile from its first."""
    lanes, steps, inner = tl.arange(0, LANES), tl.arange(0, STEPS), tl.arange(0, WIDTH)
    return lanes[:, None, None] * WIDTH + steps[None, :, None] * (LANES * WIDTH) + inner[None, None, :]


@triton.jit
def _join(largest, scaled, x):
    """Take a tile into the lanes: the largest, and the sum of ``2 ** (LOG2E * (x - largest))``. See Note [Lanes]."""
    higher = tl.maximum(largest, tl.max(tl.max(x, axis=2), axis=1))
    # Where all was -inf so far, nothing has to be scaled; -inf - -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher) * _LOG2E
    powers = tl.exp2(x * _LOG2E - base[:, None, None])
    return higher, scaled * tl.exp2(largest * _LOG2E - base) + tl.sum(tl.sum(powers, axis=2), axis=1)


@triton.jit
def _log_sum(start, width, num_real, SUMS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Of a row: log-sum-exp to the base of 2, and the sum, of the real columns."""
    TILE: tl.constexpr = STEPS * LANES * WIDTH
    places = _places(STEPS, LANES, WIDTH)
    largest = tl.full((LANES,), float("-inf"), tl.float32)
    scaled = tl.zeros((LANES,), dtype=tl.float32)
    summed = tl.zeros((LANES,), dtype=tl.float32)
    whole = num_real // TILE * TILE
    for offset in range(0, whole, TILE):
        x = tl.load(start + offset + places, eviction_policy="evict_last").to(tl.float32)
        largest, scaled = _join(largest, scaled, x)
        if SUMS:
            summed += tl.sum(tl.sum(x, axis=2), axis=1)
    if whole < num_real:
        # Padding columns are read as well, so that the mask's border is that of rows, which may lie well.
        columns = whole + places
        x = tl.load(start + columns, mask=columns < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest, scaled = _join(largest, scaled, tl.where(columns < num_real, x, float("-inf")))
        if SUMS:
            summed += tl.sum(tl.sum(tl.where(columns < num_real, x, 0.0), axis=2), axis=1)
    top = tl.max(largest, axis=0)
    base = tl.where(top == float("-inf"), 0.0, top) * _LOG2E
    total = tl.sum(scaled * tl.exp2(largest * _LOG2E - base), axis=0)
    return base + tl.log2(total), tl.sum(summed, axis=0)


@triton.jit
def _slope(x, lse, weight, spread):
    return tl.exp2(x.to(tl.float32) * _LOG2E - lse) * weight - spread


@triton.jit
def _cross_entropy_stats(
    logits,
    target,
    mine,
    stats,
    num,
    width,
    num_real,
    SUMS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    for row in range(tl.program_id(0).to(tl.int64), num, tl.num_programs(0)):
        start = logits + row * width
        own = tl.load(mine + row).to(tl.int1)
        label = tl.load(start + tl.load(target + row), mask=own, other=0.0).to(tl.float32)
        lse, summed = _log_sum(start, width, num_real, SUMS, STEPS, LANES, WIDTH)
        tl.store(stats + row, lse * _LN2)
        tl.store(stats + num + row, label)
        tl.store(stats + 2 * num + row, summed)


@triton.jit
def _cross_entropy_losses(
    logits,
    labels,
    losses,
    num,
    width,
    num_real,
    ignore_index,
    of_target,
    of_all,
    of_square,
    SMOOTHS: tl.constexpr,
    SQUARES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    TILE: tl.constexpr = STEPS * LANES * WIDTH
    places = _places(STEPS, LANES, WIDTH)
    last = (width - 1) // TILE * TILE
    for row in range(tl.program_id(0).to(tl.int64), num, tl.num_programs(0)):
        start = logits + row * width
        label = tl.load(labels + row)
        if label == ignore_index:
            tl.store(losses + row, 0.0)
            for offset in range(0, width, TILE):
                columns = offset + places
                zero = tl.zeros((LANES, STEPS, WIDTH), dtype=logits.dtype.element_ty)
                tl.store(start + columns, zero, mask=columns < width, eviction_policy="evict_first")
        else:
            hit = tl.load(start + label).to(tl.float32)  # before the row is written over
            lse, summed = _log_sum(start, width, num_real, SMOOTHS, STEPS, LANES, WIDTH)
            loss = lse * _LN2 - of_target * hit
            weight, spread = 1.0, 0.0
            if SMOOTHS:
                loss -= of_all * summed
                spread = of_all
            if SQUARES:
                loss += of_square * (lse * _LN2) * (lse * _LN2)
                weight = 1.0 + 2.0 * of_square * (lse * _LN2)
            tl.store(losses + row, loss)
            columns = last + places
            x = tl.load(start + columns, mask=columns < width, other=0.0, eviction_policy="evict_first")
            grad = tl.where(columns < num_real, _slope(x, lse, weight, spread), 0.0).to(logits.dtype.element_ty)
            tl.store(start + columns, grad, mask=columns < width, eviction_policy="evict_first")
            for back in range(0, last, TILE):
                columns = (last - TILE - back) + places
                slope = _slope(tl.load(start + columns, eviction_policy="evict_first"), lse, weight, spread)
                if last - back > num_real:  # all of the last tile was padding, and some of this one is
                    slope = tl.where(columns < num_real, slope, 0.0)
                tl.store(start + columns, slope.to(logits.dtype.element_ty), eviction_policy="evict_first")
            tl.debug_barrier()  # the target's column has been written by another thread
            tl.store(start + label, (_slope(hit, lse, weight, spread) - of_target).to(logits.dtype.element_ty))


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


@triton.jit
def _cross_entropy_scale(x, factors, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    scaled = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + row)
    tl.store(out + row * size + columns, scaled, mask=inside)
