"""Products on Hopper in bf16 by this project's own kernels, two of them with what stands beside them in a gated block.

Note [SwiGLU in the product]
Alone, SwiGLU reads what the product before it has just written, and its backward reads what the product of the output gradient
with the down-projection has just written: 6 and 10 bytes an element at the memory's rate, while the tensor cores rest. In one
kernel each (``cuda/gated_product.cu``) a multiprocessor's warps do both at once, and what is only passed on is never written:
the forward reads nothing a second time, the gradient of the activated stays in shared memory. Both round where the separate
passes round, so the results are the same bits as theirs wherever the sums of the product are taken in the same order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lightning_megatron.kernels.hopper import Kernel, TensorMap, compiled, digest, in_context, runs_on

_ROWS, _COLUMNS, _STEP, _PIECE = 128, 256, 64, 64  # of a tile, of the inner dimension at a time, of what is written at a time
_PROGRAMS_A_CLUSTER, _NUM_THREADS = 2, 384
_ALIGNMENT = 16  # bytes
_SOURCE = "gated_product.cu"
_GROUP = 8  # rows of tiles that are walked through together, so that they share what the cache holds


def fits(rows: Tensor, weight: Tensor, columns: int) -> bool:
    """Whether the kernels take ``[M, K]`` and the weight of the product, for ``columns`` of the result (of the gate)."""
    num, size = rows.shape
    return (
        all(t.dtype == torch.bfloat16 and t.is_contiguous() and t.is_cuda for t in (rows, weight))
        and all(t.data_ptr() % _ALIGNMENT == 0 for t in (rows, weight))
        and not (num % (_PROGRAMS_A_CLUSTER * _ROWS) or columns % _COLUMNS or size % _STEP)
        and runs_on(rows.device)
    )


@cache
def version() -> str:
    """What is found about the kernels holds for these."""
    return digest(_SOURCE)


def gated_forward(x: Tensor, gate_up: Tensor, both: Tensor, activated: Tensor) -> None:
    """``both = x gate_up^T`` and its SwiGLU: ``[M, H], [2 F, H]``, written to ``[M, 2 F]`` and ``[M, F]``; all contiguous."""
    (num, size), ffn = x.shape, activated.shape[1]
    with in_context(x.device):
        maps = TensorMap(x, _ROWS, _STEP), TensorMap(gate_up, _COLUMNS // 2, _STEP), TensorMap(both, _PIECE, _PIECE)
        _launch("gated_forward", x.device, *maps, activated, num, ffn, size)


def gated_backward(grad: Tensor, down: Tensor, both: Tensor, of_both: Tensor) -> None:
    """The gradient of gate and up by that of the block: ``[M, H], [H, F], [M, 2 F]``, written to ``[M, 2 F]``. As above."""
    (num, size), ffn = grad.shape, down.shape[1]
    with in_context(grad.device):
        maps = TensorMap(grad, _ROWS, _STEP), TensorMap(down, _STEP, _PIECE)
        _launch("gated_backward", grad.device, *maps, both, of_both, num, ffn, size)


def input_gradient(grad: Tensor, weight: Tensor, out: Tensor) -> None:
    """``grad weight``: ``[M, K], [K, N]``, written to ``[M, N]``; all contiguous."""
    num, size = grad.shape
    with in_context(grad.device):
        maps = TensorMap(grad, _ROWS, _STEP), TensorMap(weight, _STEP, _PIECE), TensorMap(out, _PIECE, _PIECE)
        _launch("plain_turned", grad.device, *maps, num, weight.shape[1], size)


def _launch(name: str, device: torch.device, *arguments: TensorMap | Tensor | int) -> None:
    _kernel(name, device).launch(_num_programs(device), *arguments, _GROUP, device=device)


@cache
def _num_programs(device: torch.device) -> int:
    """One for each multiprocessor."""
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return int(number) // _PROGRAMS_A_CLUSTER * _PROGRAMS_A_CLUSTER


@cache
def _kernel(name: str, device: torch.device) -> Kernel:
    module = compiled(_SOURCE, device)
    with in_context(device):
        return Kernel(module, name, num_threads=_NUM_THREADS)
