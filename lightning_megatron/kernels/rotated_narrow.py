"""The projection to queries, keys and values on Hopper in 8 bits, with the rotation of queries and keys in its product.

What the product makes is rounded to bf16 before it is rotated, as it is by a pass of its own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_megatron.kernels.gated_narrow import fits as fits_gated
from lightning_megatron.kernels.hopper import digest, in_context, kernel, map_of, map_of_bytes
from lightning_megatron.kernels.hopper_products import can_turn, counters, kept_rows, num_programs
from lightning_megatron.kernels.products import Tables

_ROWS, _HALF, _PIECE, _NUM_THREADS = 128, 128, 64, 384  # of a tile, of its columns that a program loads, of what is written
_SOURCE = "rotated_narrow.cu"


def fits(rows: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
    """Whether the kernel takes bytes ``[M, K]`` and ``[N, K]``, tables of positions, and so many heads of queries and keys."""
    return fits_gated(rows, weight, len(weight) // 2) and can_turn(weight, tables, heads, num=len(rows))


@cache
def version() -> str:
    """What is found about the kernel holds for this one."""
    return digest(_SOURCE)


def rotated_narrow_forward(
    x: Tensor, x_inv: Tensor, weight: Tensor, weight_inv: Tensor, tables: Tables, heads: tuple[int, int]
) -> Tensor:
    """``x weight^T`` in bf16, ``[M, N]``, queries and keys rotated. Sums are kept in less than fp32 ("fast").

    Args:
        x: e4m3 bytes ``[M, K]``, that ``fits``, as all else.
        x_inv: the inverse of their factor, fp32 ``[1]``.
        weight: e4m3 bytes ``[N, K]``.
        weight_inv: likewise.
        tables: cosines and sines, fp32 ``[S, .., d]``; M / S neighbouring rows share a position.
        heads: how many of N / d are queries, and keys.
    """
    (num, inner), columns, (cos, sin), device = x.shape, len(weight), tables, x.device
    out = x.new_empty((num, columns), dtype=torch.bfloat16)
    with in_context(device):
        maps = map_of_bytes(x, _ROWS), map_of_bytes(weight, _HALF), map_of(out, _PIECE, _PIECE)
        sizes = sum(heads) * cos.shape[-1], num // len(cos), num, columns, inner, kept_rows(x)
        found = kernel(_SOURCE, f"rotated_narrow_{cos.shape[-1]}", device, num_threads=_NUM_THREADS)
        found.launch(num_programs(device), *maps, x_inv, weight_inv, cos, sin, *sizes, counters(device), device=device)
    return out
