"""Sums of squares of many tensors, each read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8
_PROGRAMS = 1024  # a tensor is shared by at most so many, enough to fill any GPU


@triton.jit
def _squares(source_ptr, sums_ptr, numel, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
        total += value * value
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


def sums_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of each flat, contiguous tensor, ``[len(tensors)]`` in fp64; parts are summed in fp32.

    The order of the sums depends on the sizes alone, so that the result is the same in every run.
    """
    sums = torch.zeros(len(tensors), _PROGRAMS, dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        for row, tensor in zip(sums.unbind(), tensors, strict=True):
            if tensor.numel() > 0:
                programs = min(triton.cdiv(tensor.numel(), _BLOCK), _PROGRAMS)
                _squares[(programs,)](tensor, row, tensor.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    return sums.double().sum(1)
