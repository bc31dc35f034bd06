"""Products on Hopper in bf16 by this project's own kernels; two of them do what stands beside them in a gated block.

Note [SwiGLU in the product]
Alone, SwiGLU reads what the product before it has just written, and its backward reads what the product of the output gradient
with the down-projection has just written: 6 and 10 bytes an element at the memory's rate, while the tensor cores rest. In one
kernel each (``cuda/products.cu``) a multiprocessor's warps do both at once, and what is only passed on is never written:
the forward reads nothing a second time, the gradient of the activated stays in shared memory. Both round where the separate
passes round, so the results are the same bits as theirs wherever the sums of the product are taken in the same order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_megatron.kernels import stream_of
from lightning_megatron.kernels.hopper import TensorMap, digest, in_context, kernel, map_of, runs_on

_ROWS, _COLUMNS, _STEP, _PIECE = 128, 256, 64, 64  # of a tile, of the inner dimension at a time, of what is written at a time
_HEAD_SIZES = (64, 128)
_PROGRAMS_A_CLUSTER, _NUM_THREADS = 2, 384
_PAIR = _PROGRAMS_A_CLUSTER * _ROWS
_ALIGNMENT = 16  # bytes
_SOURCE = "products.cu"
_GROUP = 8  # rows of tiles that are walked through together, so that they share what the cache holds
_KEPT, _FEWEST = 16 << 20, 4  # bytes of a first factor that the cache is asked to keep, and rows of tiles at least


def fits(rows: Tensor, weight: Tensor, columns: int) -> bool:
    """Whether the kernels take ``[M, K]`` and the weight of the product, for ``columns`` of the result (of the gate)."""
    num, size = rows.shape
    return _are_usable(rows, weight) and not (num % _PAIR or columns % _COLUMNS or size % _STEP)


def fits_weight(grad: Tensor, x: Tensor, total: Tensor) -> bool:
    """Whether ``weight_gradient`` takes these."""
    (num, size), columns = grad.shape, x.shape[1]
    is_sum = total.dtype == torch.float32 and total.is_contiguous() and total.data_ptr() % _ALIGNMENT == 0
    return is_sum and _are_usable(grad, x) and not (size % _PAIR or columns % _COLUMNS or num % _STEP)


def fits_rotated(rows: Tensor, weight: Tensor, tables: tuple[Tensor, Tensor], heads: tuple[int, int]) -> bool:
    """Whether ``rotated_forward`` takes these: ``[M, K], [N, K]`` and tables of positions; ``heads`` of queries and of keys."""
    return can_turn(weight, tables, heads, num=rows.shape[0]) and fits(rows, weight, weight.shape[0])


def can_turn(weight: Tensor, tables: tuple[Tensor, Tensor], heads: tuple[int, int], *, num: int) -> bool:
    """Whether kernels can rotate ``num`` rows of what is multiplied by a weight ``[N, K]`` of so many heads by these tables."""
    size = tables[0].shape[-1]
    are_tables = all(
        t.dtype == torch.float32
        and t.is_contiguous()
        and t.data_ptr() % _ALIGNMENT == 0
        and t.numel() == t.shape[0] * size
        and t.shape[0] > 0
        and num % t.shape[0] == 0
        for t in tables
    )
    is_whole = weight.shape[0] == (heads[0] + 2 * heads[1]) * size and not (sum(heads) * size % _COLUMNS)
    return are_tables and is_whole and size in _HEAD_SIZES and weight.shape[0] % _COLUMNS == 0


def _are_usable(*factors: Tensor) -> bool:
    return all(
        t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % _ALIGNMENT == 0 and runs_on(t.device)
        for t in factors
    )


@cache
def version() -> str:
    """What is found about the kernels holds for these."""
    return digest(_SOURCE)


def gated_forward(x: Tensor, gate_up: Tensor, both: Tensor, activated: Tensor) -> None:
    """``both = x gate_up^T`` and its SwiGLU: ``[M, H], [2 F, H]``, written to ``[M, 2 F]`` and ``[M, F]``; all contiguous."""
    (num, size), ffn = x.shape, activated.shape[1]
    with in_context(x.device):
        maps = map_of(x, _ROWS, _STEP), map_of(gate_up, _COLUMNS // 2, _STEP), map_of(both, _PIECE, _PIECE)
        _launch("gated_forward", x.device, *maps, activated, num, ffn, size, group=kept_rows(x))


def gated_backward(grad: Tensor, down: Tensor, both: Tensor, of_both: Tensor) -> None:
    """The gradient of gate and up by that of the block: ``[M, H], [H, F], [M, 2 F]``, written to ``[M, 2 F]``. As above."""
    (num, size), ffn = grad.shape, down.shape[1]
    with in_context(grad.device):
        maps = map_of(grad, _ROWS, _STEP), map_of(down, _STEP, _PIECE)
        _launch("gated_backward", grad.device, *maps, both, of_both, num, ffn, size)


def rotated_forward(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, turned: int) -> None:
    """``x weight^T``, ``[M, K], [N, K]``, written to ``[M, N]``; heads in the first ``turned`` columns are rotated.

    ``cos`` and ``sin`` are fp32 ``[S, .., d]``, d 64 or 128, contiguous, the two halves of the last dim alike; M / S
    neighbouring rows share a position.
    """
    (num, size), columns = x.shape, weight.shape[0]
    batch = num // cos.shape[0]
    with in_context(x.device):
        maps = map_of(x, _ROWS, _STEP), map_of(weight, _COLUMNS // 2, _STEP), map_of(out, _PIECE, _PIECE)
        _launch(f"rotated_{cos.shape[-1]}", x.device, *maps, cos, sin, turned, batch, num, columns, size)


def input_gradient(grad: Tensor, weight: Tensor, out: Tensor) -> None:
    """``grad weight``: ``[M, K], [K, N]``, written to ``[M, N]``; all contiguous."""
    num, size = grad.shape
    with in_context(grad.device):
        maps = map_of(grad, _ROWS, _STEP), map_of(weight, _STEP, _PIECE), map_of(out, _PIECE, _PIECE)
        _launch("plain_turned", grad.device, *maps, num, weight.shape[1], size)


def weight_gradient(grad: Tensor, x: Tensor, total: Tensor, *, add: bool) -> None:
    """``grad^T x``: ``[T, M], [T, N]``, written to or added to ``[M, N]`` in fp32; all contiguous."""
    (num, size), columns = grad.shape, x.shape[1]
    with in_context(grad.device):
        maps = map_of(grad, _STEP, _PIECE), map_of(x, _STEP, _PIECE), map_of(total, _PIECE, _PIECE // 2)
        _launch("weight_gradient", grad.device, *maps, int(add), size, columns, num)


def kept_rows(factor: Tensor) -> int:
    """How many rows of tiles to walk through together where the cache is asked to keep the first factor, ``[M, K]``."""
    return max(_KEPT // (_PAIR * factor.shape[1] * factor.element_size()), _FEWEST)


def _launch(name: str, device: torch.device, *arguments: TensorMap | Tensor | int, group: int = _GROUP) -> None:
    found = kernel(_SOURCE, name, device, num_threads=_NUM_THREADS)
    found.launch(num_programs(device), *arguments, group, counters(device), device=device)


def counters(device: torch.device) -> Tensor:
    """By which programs share out tiles on the current stream: zeros, int32 ``[2]``, and zeros again behind each kernel."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _counters(device, stream_of(device))


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


@cache
def num_programs(device: torch.device) -> int:
    """One for each multiprocessor."""
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return int(number) // _PROGRAMS_A_CLUSTER * _PROGRAMS_A_CLUSTER
