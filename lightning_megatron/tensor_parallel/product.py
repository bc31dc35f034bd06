"""What tensor-parallel layers are made of: collectives in flight, products into gradient sums, and autocast kept out.

Note [Sums in the product]
An optimizer sums the gradients of micro-batches in fp32. The product that makes a weight gradient adds to that sum itself
(cuBLAS's ``C = A B + C`` with 16-bit factors and fp32 sums), so that no gradient is written, read and added, nor rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import all_gather_single, reduce_scatter_single
from lightning_megatron.kernels.products import current_products
from lightning_megatron.mesh import Axis
from lightning_megatron.weight_gradients import now_or_later


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast computes in where ``x`` is, if it is on."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast itself does it: double stays double."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def outside_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A backward may run inside an autocast region that its forward was not in: use the dtypes as they are."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class Pending:
    """A tensor that a collective may still be writing; ``wait`` before reading it."""

    tensor: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """The tensor, complete."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """``[n, ..] -> [n * size, ..]`` along dim 0, in flight."""
    _check_order(axis)
    x = x.contiguous()
    full = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return Pending(full, all_gather_single(full.view(-1), x.view(-1), group=axis.group, async_op=True))


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """``[n, ..] -> [n / size, ..]`` along dim 0, in flight."""
    _check_order(axis)
    part = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return Pending(part, reduce_scatter_single(part.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True))


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """The sum over the axis, in flight, written into ``x``, which must belong to the caller."""
    if axis.group is None:
        return Pending(x)
    x = x.contiguous()
    return Pending(x, dist.all_reduce(x.view(-1), group=axis.group, async_op=True))


def _check_order(axis: Axis) -> None:
    assert tuple(sorted(axis.ranks)) == axis.ranks, "process groups sort their ranks; tp counts them upwards"


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None) -> Tensor:
    """``x weight^T + bias + added``: ``[.., in], [out, in], [out], [.., out] -> [.., out]``. Not both are added."""
    if added is None:
        return current_products().forward(x, weight, bias)
    assert bias is None, "what is added takes the place of a bias"
    return current_products().forward_added(x, weight, added)


def adds_to(added: Tensor, weight: Tensor) -> bool:
    """Whether ``product`` adds ``[.., out]`` without a pass of its own."""
    return autocast_dtype(added) is None and current_products().adds_to(added, weight)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """``[.., out], [out, in] -> [.., in]``."""
    return current_products().input_gradient(grad, weight)


def weight_gradient(rows: Tensor, x: Tensor) -> Tensor:
    """``[N, out], [.., in] -> [out, in]``."""
    with outside_autocast(rows):
        return rows.t() @ x.reshape(-1, x.shape[-1])


def add_weight_gradient(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """Add ``rows^T x`` to a sum: ``[out, in]``, by ``[N, out]`` and ``[.., in]``. See Note [Sums in the product].

    Args:
        total: contiguous, in the dtype of the factors or, for 16-bit ones, in fp32.
        rows: gradients of the layer's output.
        x: the layer's input.
    """
    with outside_autocast(rows):
        current_products().weight_gradient(total, rows, x.reshape(-1, x.shape[-1]), add=True)


def put_weight_gradient(total: Tensor, rows: Tensor, x: Tensor) -> None:
    """Write ``rows^T x`` over ``total``, whatever that holds. Arguments as for ``add_weight_gradient``."""
    with outside_autocast(rows):
        current_products().weight_gradient(total, rows, x.reshape(-1, x.shape[-1]), add=False)


def weight_gradient_of(ctx: Any, rows: Tensor, x: Callable[[], Tensor]) -> Tensor | None:
    """What a Function's backward returns for its weight, by ``[N, out]`` and the input ``[.., in]``; see ``now_or_later``.

    Args:
        ctx: of the Function.
        rows: gradients of the layer's output.
        x: gives the layer's input, when the gradient is made.
    """
    return now_or_later(
        ctx,
        lambda: weight_gradient(rows, x()),
        add=lambda total: add_weight_gradient(total, rows, x()),
        put=lambda total: put_weight_gradient(total, rows, x()),
    )
