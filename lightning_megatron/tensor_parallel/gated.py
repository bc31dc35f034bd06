"""The linear layers of a gated feed-forward block, each with the half of SwiGLU that stands beside its product.

Note [Two Functions for three]
A block is ``down(swiglu(gate_up(x)))``. The first Function here returns gate and up together with what SwiGLU makes of them;
the second takes both, multiplies by the activated and answers in its backward with the gradient of gate and up. What is kept
for the backward is the same as of three Functions: the input, gate and up, and the activated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.kernels.products import current_products
from lightning_megatron.tensor_parallel.bypass import can_bypass, wait_for
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor_parallel.product import (
    input_gradient,
    outside_autocast,
    product,
    weight_gradient_of,
)


def gates(x: Tensor, gate_up: ColumnParallelLinear, down: RowParallelLinear) -> bool:
    """Whether ``gated_linears`` saves passes over memory for these layers and this input ``[.., H]``."""
    return can_bypass(x, gate_up, down) and current_products().gates(x, gate_up.weight)


def gated_linears(x: Tensor, gate_up: ColumnParallelLinear, down: RowParallelLinear, residual: Tensor | None = None) -> Tensor:
    """``down(swiglu(gate_up(x))) + residual``, ``[.., H] -> [.., H]``, on one tensor-parallel rank and without biases."""
    wait_for(gate_up)
    both, activated = _GateUp.apply(x, gate_up.weight)  # type: ignore[no-untyped-call]
    wait_for(down)
    result: Tensor = _Down.apply(both, activated, down.weight, residual)  # type: ignore[no-untyped-call]
    return result


class _GateUp(torch.autograd.Function):
    """``[.., H] -> [.., 2 F]`` and, not to be differentiated, its SwiGLU ``[.., F]``. See Note [Two Functions for three]."""

    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.set_materialize_grads(False)
        both, activated = current_products().forward_gated(x, weight)
        ctx.mark_non_differentiable(activated)
        return both, activated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None]:
        if grad is None:
            return None, None
        x, weight = ctx.saved_tensors
        with outside_autocast(grad):
            grad_x = None if weight is None else input_gradient(grad, weight)
            return grad_x, None if x is None else weight_gradient_of(ctx, _rows(grad), lambda: x)


class _Down(torch.autograd.Function):
    """``[.., F] -> [.., H]``, whose gradient is that of the ``[.., 2 F]`` from which the activated came."""

    weight_input = 2

    @staticmethod
    def forward(ctx: Any, both: Tensor, activated: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
        needs_both, _, needs_weight, _ = ctx.needs_input_grad
        kept = (both, weight) if needs_both else (None, None)
        ctx.save_for_backward(*kept, activated if needs_weight else None)
        return product(activated, weight, added=added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
        both, weight, activated = ctx.saved_tensors
        with outside_autocast(grad):
            grad = grad.contiguous()
            of_both = None if both is None else current_products().gradient_gated(grad, weight, both)
            of_weight = None if activated is None else weight_gradient_of(ctx, _rows(grad), lambda: activated)
            return of_both, None, of_weight, grad if ctx.needs_input_grad[3] else None


def _rows(grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1])
