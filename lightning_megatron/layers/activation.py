"""Activations of feed-forward blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.kernels import glu


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020): ``[.., 2n] -> [.., n]``, gate in the first half."""
    result: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    """Of the forward only its input is kept."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return glu.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return glu.swiglu_gradient(gate_up, grad)


def gelu(hidden: Tensor) -> Tensor:
    """GELU by the tanh approximation, as in GPT-2. Same shape."""
    return F.gelu(hidden, approximate="tanh")
