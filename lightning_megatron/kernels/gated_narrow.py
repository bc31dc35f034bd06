"""The forward product of a gated block on Hopper in 8 bits, with SwiGLU in it, rounded to 8 bits again.

See Note [SwiGLU in the product] in ``hopper_products.py``, and ``narrow.py``.

Gate and up are written in bf16, as their gradient needs them. The activated is that of ``swiglu_narrow`` given these, byte for
byte, and so is its largest magnitude. Where its factor is guessed, this kernel writes by the guess, and what checks it is the
kernel of ``swiglu_narrow``, which computes again from gate and up if the guess was wrong.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_megatron.kernels.hopper import digest, in_context, kernel, map_of, map_of_bytes, runs_on
from lightning_megatron.kernels.hopper_products import counters, kept_rows, num_programs
from lightning_megatron.kernels.narrow import CHECK, GUESS, Factor, Narrow, narrowed
from lightning_megatron.kernels.swiglu_narrow import FORWARD, _swiglu_narrow

_ROWS, _COLUMNS, _LINE = 128, 128, 128  # of a tile, of gate and of up in it, bytes of the inner dimension at a time
_PIECE = 64  # rows and columns of what is written at a time
_PROGRAMS_A_CLUSTER, _NUM_THREADS = 2, 384
_ALIGNMENT = 16  # bytes, of what bulk copies read
_SOURCE = "gated_narrow.cu"


def fits(rows: Tensor, weight: Tensor, ffn: int) -> bool:
    """Whether the kernel takes bytes ``[M, K]`` and the weight's, ``[2 ffn, K]``."""
    num, size = rows.shape
    return (
        all(t.element_size() == 1 and t.is_contiguous() and t.is_cuda for t in (rows, weight))
        and all(t.data_ptr() % _ALIGNMENT == 0 for t in (rows, weight))
        and weight.shape == (2 * ffn, size)
        and not (num % (_PROGRAMS_A_CLUSTER * _ROWS) or ffn % _COLUMNS or size % _LINE)
        and runs_on(rows.device)
    )


@cache
def version() -> str:
    """What is found about the kernel holds for this one."""
    return digest(_SOURCE)


def gated_narrow_forward(
    x: Tensor, x_inv: Tensor, gate_up: Tensor, gate_up_inv: Tensor, both: Tensor, factor: Factor
) -> Narrow:
    """``both = x gate_up^T`` and its SwiGLU in e4m3, ``[M, F]``. Sums are kept in less than fp32 ("fast").

    Args:
        x: e4m3 bytes ``[M, H]``, that ``fits``, as ``gate_up``.
        x_inv: the inverse of their factor, fp32 ``[1]``.
        gate_up: e4m3 bytes ``[2 F, H]``.
        gate_up_inv: likewise.
        both: written, bf16 ``[M, 2 F]``, contiguous.
        factor: what to multiply the activated by.
    """
    (num, size), ffn = x.shape, both.shape[1] // 2

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        if mode == CHECK:
            _swiglu_narrow[FORWARD.grid(num, ffn, mode)](
                *(both, rows, columns, *numbers, num, ffn),
                MODE=mode,
                TOKENS=FORWARD.tokens,
                FEATURES=FORWARD.features,
                num_warps=FORWARD.warps,
            )
            return
        device = both.device
        with in_context(device):
            maps = map_of_bytes(x, _ROWS), map_of_bytes(gate_up, _COLUMNS), map_of(both, _PIECE, _PIECE)
            places = x_inv, gate_up_inv, rows, columns, *numbers
            sizes = int(mode == GUESS), num, ffn, size, kept_rows(x)
            found = kernel(_SOURCE, "gated_narrow_forward", device, num_threads=_NUM_THREADS)
            found.launch(num_programs(device), *maps, *places, *sizes, counters(device), device=device)

    return narrowed(both, (num, ffn), torch.float8_e4m3fn, factor=factor, launch=launch)
