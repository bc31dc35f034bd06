"""Sums of squares of many tensors in one launch, each element read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_CHUNK = 8 * _BLOCK  # elements of one tensor that a program sums
_WARPS = 8


@triton.jit
def _squares(chunks_ptr, sums_ptr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    row = chunks_ptr + 2 * tl.program_id(0)
    source = tl.load(row).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 1)
    if ALIGNED:  # else each thread loads its numbers one by one
        source = tl.multiple_of(source, 16)
        numel = tl.multiple_of(numel, 16)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, CHUNK, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < numel, other=0.0)
        total += value * value
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


class SumsOfSquares:
    """Sums of squares of fp32 tensors that stay where they are.

    Args:
        tensors: flat and contiguous.
        device: where they are.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        chunks = [
            (tensor.data_ptr() + 4 * first, min(tensor.numel() - first, _CHUNK))
            for tensor in tensors
            for first in range(0, tensor.numel(), _CHUNK)
        ]
        self._tensors = list(tensors)  # whose memory is read
        self._chunks = torch.tensor(chunks, dtype=torch.int64, device=device).view(-1, 2)
        self._lengths = torch.tensor([triton.cdiv(tensor.numel(), _CHUNK) for tensor in tensors], device=device)
        self._aligned = all(tensor.data_ptr() % 16 == 0 and tensor.numel() % 16 == 0 for tensor in tensors)

    def __call__(self) -> Tensor:
        """``[len(tensors)]`` in fp64; chunks of 32768 elements are summed in fp32. The same in every run."""
        sums = torch.empty(self._chunks.shape[0], dtype=torch.float32, device=self._chunks.device)
        if sums.numel() > 0:
            with torch.cuda.device(sums.device):
                _squares[(sums.numel(),)](
                    self._chunks, sums, BLOCK=_BLOCK, CHUNK=_CHUNK, ALIGNED=self._aligned, num_warps=_WARPS
                )
        return torch.segment_reduce(sums.double(), "sum", lengths=self._lengths, unsafe=True, initial=0.0)
