"""Losses and gradients of rows of logits that are held in shared memory in between: each is read once and written once.

Note [A row at hand]
A multiprocessor's shared memory takes 229 KB, most of a row of 256 KB. One program a multiprocessor takes one row after the
other. Its tiles are fetched without passing through registers, each tile's fetch begins as soon as its place is free, which
is while the row before is being written, and a thread reads what it has fetched itself. What does not fit is read twice, the
second time from the cache: 27 KB a row. Gluon, the layer under Triton that says where things lie, is at hand in Triton 3.6;
without it rows are swept twice (cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_LOG2E = gl.constexpr(1.4426950408889634)
_LN2 = gl.constexpr(0.6931471805599453)
_RESERVED = 3 << 10  # bytes of shared memory: for the system, and for joining the threads' sums


@dataclass(frozen=True)
class Held:
    """How a row is held.

    Args:
        warps: that work on a row.
        steps: pieces of 16 bytes that each thread has in a tile.
    """

    warps: int
    steps: int


HELD = Held(warps=16, steps=2)


def num_slots(logits: Tensor, num_real: int, held: Held = HELD) -> int:
    """How many tiles of a row are held; 0 where this kernel is of no use."""
    tile = held.warps * 32 * held.steps * 16 // logits.element_size()
    if not logits.is_cuda or logits.shape[1] % 16 or torch.cuda.get_device_capability(logits.device) < (8, 0):
        return 0
    properties: Any = torch.cuda.get_device_properties(logits.device)
    room = properties.shared_memory_per_block_optin - _RESERVED
    return int(min(num_real // tile, room // (tile * logits.element_size())))


def losses_with_gradient(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    *,
    num_real: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    held: Held = HELD,
) -> Tensor:
    """See ``cross_entropy.losses_with_gradient``; ``losses`` ``[N]`` are written and returned. Needs ``num_slots``."""
    num, columns = logits.shape
    if not num:
        return losses
    slots, lanes, width = num_slots(logits, num_real, held), held.warps * 32, 16 // logits.element_size()
    properties = torch.cuda.get_device_properties(logits.device)
    bytes_held = slots * lanes * held.steps * 16 + _RESERVED
    programs = max(1, min(properties.shared_memory_per_multiprocessor // bytes_held, 64 // held.warps))
    with torch.cuda.device_of(logits):
        _cross_entropy_held[(min(num, programs * properties.multi_processor_count),)](
            *(logits, labels, losses, num, columns, num_real),
            *(ignore_index, 1.0 - label_smoothing, label_smoothing / num_real, z_loss),
            SMOOTHS=label_smoothing > 0.0,
            SQUARES=z_loss != 0.0,
            SLOTS=slots,
            STEPS=held.steps,
            LANES=lanes,
            WIDTH=width,
            num_warps=held.warps,
        )
    return losses


@gluon.jit
def _row_of(x):
    """``[LANES]`` as one of ``[STEPS, LANES, WIDTH]``."""
    return gl.expand_dims(gl.expand_dims(x, 0), 2)


@gluon.jit
def _join(largest, scaled, x):
    """As in cross_entropy.py: the largest, and the sum of ``2 ** (LOG2E * (x - largest))``, by lane."""
    higher = gl.maximum(largest, gl.max(gl.max(x, axis=2), axis=0))
    base = gl.where(higher == float("-inf"), 0.0, higher) * _LOG2E
    powers = gl.exp2(x * _LOG2E - _row_of(base))
    return higher, scaled * gl.exp2(largest * _LOG2E - base) + gl.sum(gl.sum(powers, axis=2), axis=0)


@gluon.jit
def _slope(x, lse, weight, spread):
    return gl.exp2(x.to(gl.float32) * _LOG2E - lse) * weight - spread


@gluon.jit
def _cross_entropy_held(
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
    SMOOTHS: gl.constexpr,
    SQUARES: gl.constexpr,
    SLOTS: gl.constexpr,
    STEPS: gl.constexpr,
    LANES: gl.constexpr,
    WIDTH: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([STEPS, 1, WIDTH], [1, 32, 1], [1, LANES // 32, 1], [2, 1, 0])
    by_lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    TILE: gl.constexpr = STEPS * LANES * WIDTH
    HELD: gl.constexpr = SLOTS * TILE
    steps = gl.arange(0, STEPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    inner = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = _row_of(gl.arange(0, LANES, layout=by_lane)) * WIDTH + gl.expand_dims(gl.expand_dims(inner, 0), 1)
    places += gl.expand_dims(gl.expand_dims(steps, 1), 2) * (LANES * WIDTH)
    held = gl.allocate_shared_memory(logits.dtype.element_ty, [SLOTS, STEPS, LANES, WIDTH], plain)
    first, stride = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    last = (width - 1) // TILE * TILE
    for slot in range(SLOTS):
        async_copy.async_copy_global_to_shared(held.index(slot), logits + first * width + slot * TILE + places)
        async_copy.commit_group()
    for row in range(first, num, stride):
        start = logits + row * width
        label = gl.load(labels + row)
        counts = label != ignore_index
        label = gl.where(counts, label, 0)
        hit = gl.load(start + label).to(gl.float32)  # before the row is written over
        largest = gl.full([LANES], float("-inf"), gl.float32, layout=by_lane)
        scaled = gl.zeros([LANES], gl.float32, layout=by_lane)
        summed = gl.zeros([LANES], gl.float32, layout=by_lane)
        for slot in range(SLOTS):
            async_copy.commit_group()  # of nothing, so that as many groups always follow the one that is waited for
            async_copy.wait_group(SLOTS)
            x = held.index(slot).load(layout).to(gl.float32)
            largest, scaled = _join(largest, scaled, x)
            if SMOOTHS:
                summed += gl.sum(gl.sum(x, axis=2), axis=0)
        for offset in range(HELD, width, TILE):
            columns = offset + places
            x = gl.load(start + columns, mask=columns < width, other=0.0, eviction_policy="evict_last").to(gl.float32)
            largest, scaled = _join(largest, scaled, gl.where(columns < num_real, x, float("-inf")))
            if SMOOTHS:
                summed += gl.sum(gl.sum(gl.where(columns < num_real, x, 0.0), axis=2), axis=0)
        top = gl.max(largest, axis=0)
        base = gl.where(top == float("-inf"), 0.0, top) * _LOG2E
        lse = base + gl.log2(gl.sum(scaled * gl.exp2(largest * _LOG2E - base), axis=0))
        loss, weight, spread = lse * _LN2 - of_target * hit, 1.0, 0.0
        if SMOOTHS:
            loss -= of_all * gl.sum(summed, axis=0)
            spread = of_all
        if SQUARES:
            loss += of_square * (lse * _LN2) * (lse * _LN2)
            weight = 1.0 + 2.0 * of_square * (lse * _LN2)
        gl.store(losses + row, gl.where(counts, loss, 0.0))
        for back in range(HELD, width, TILE):
            columns = last + HELD - back + places
            x = gl.load(start + columns, mask=columns < width, other=0.0, eviction_policy="evict_first")
            slope = gl.where(counts & (columns < num_real), _slope(x, lse, weight, spread), 0.0)
            gl.store(start + columns, slope.to(logits.dtype.element_ty), mask=columns < width, eviction_policy="evict_first")
        following = row + stride
        for slot in range(SLOTS):
            slope = gl.where(counts, _slope(held.index(slot).load(layout), lse, weight, spread), 0.0)
            gl.store(start + slot * TILE + places, slope.to(logits.dtype.element_ty), eviction_policy="evict_first")
            ahead = logits + gl.minimum(following, num - 1) * width + slot * TILE + places
            async_copy.async_copy_global_to_shared(held.index(slot), ahead, mask=following < num)
            async_copy.commit_group()
        gl.thread_barrier()  # the target's column has been written by another thread
        slope = _slope(hit, lse, weight, spread) - of_target
        gl.store(start + label, slope.to(logits.dtype.element_ty), mask=counts)
    async_copy.wait_group(0)
