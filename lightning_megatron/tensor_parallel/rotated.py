"""The projection to queries, keys and values with the rotation of queries and keys in its product.

Alone, rotating reads and writes all of what the product has just written. In the backward the gradient is rotated back in a
pass of its own, since both products of the projection's backward read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.kernels.products import Tables, current_products
from lightning_megatron.kernels.rotation import rotate_together, split_heads
from lightning_megatron.tensor_parallel.bypass import can_bypass, wait_for
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear
from lightning_megatron.tensor_parallel.product import input_gradient, outside_autocast, weight_gradient_of

Heads = tuple[Tensor, Tensor, Tensor]


def rotates(x: Tensor, qkv: ColumnParallelLinear, tables: Tables, heads: tuple[int, int]) -> bool:
    """Whether ``rotated_linear`` saves a pass over memory for this layer and this input ``[S, B, H]``."""
    return can_bypass(x, qkv) and current_products().rotates(x, qkv.weight, tables, heads)


def rotated_linear(x: Tensor, qkv: ColumnParallelLinear, tables: Tables, heads: tuple[int, int]) -> Heads:
    """Queries, keys and values, the first two rotated: ``[S, B, H]`` to ``[S, B, h or g, d]`` each, views of one tensor.

    Args:
        x: the input.
        qkv: on one tensor-parallel rank and without a bias.
        tables: cosines and sines of the S positions, fp32 ``[S, 1, 1, d]``.
        heads: h and g.
    """
    wait_for(qkv)
    parts: Heads = _RotatedLinear.apply(x, qkv.weight, *tables, heads)  # type: ignore[no-untyped-call]
    return parts


class _RotatedLinear(torch.autograd.Function):
    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int]) -> Heads:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, cos, sin)
        return split_heads(current_products().forward_rotated(x, weight, (cos, sin), heads), heads, cos.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        with outside_autocast(of_q):
            grad = rotate_together(of_q, of_k, of_v, cos=cos, sin=sin, inverse=True)
            grad_x = None if weight is None else input_gradient(grad, weight)
            rows = grad.view(-1, grad.shape[-1])
            return grad_x, None if x is None else weight_gradient_of(ctx, rows, lambda: x), None, None, None
