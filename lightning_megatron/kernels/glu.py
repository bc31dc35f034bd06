"""SwiGLU (Shazeer 2020) and its gradient: one pass each where there are kernels, torch's operations elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.kernels import runs_on


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[.., 2n] -> [.., n]``, gate in the first half."""
    if runs_on(gate_up):
        from lightning_megatron.kernels.swiglu import swiglu_forward

        return swiglu_forward(gate_up.contiguous())
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(gate_up: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``gate_up`` ``[.., 2n]`` by that of the result ``[.., n]``."""
    if runs_on(gate_up):
        from lightning_megatron.kernels.swiglu import swiglu_backward

        return swiglu_backward(gate_up.contiguous(), grad.contiguous())
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    activated = gate * sigmoid
    return torch.cat((grad * up * (sigmoid + activated * (1 - sigmoid)), grad * activated), dim=-1)
