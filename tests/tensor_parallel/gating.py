"""Stands for products of a GPU that does SwiGLU beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.kernels.products import TorchProducts


class Gating(TorchProducts):
    """SwiGLU beside each product, as on Hopper; notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple[torch.dtype, torch.dtype]] = []

    def gates(self, x: Tensor, gate_up: Tensor) -> bool:
        self.asked.append((x.dtype, gate_up.dtype))
        return True

    def forward_gated(self, x: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("forward")
        return super().forward_gated(x, gate_up)

    def gradient_gated(self, grad: Tensor, down: Tensor, both: Tensor) -> Tensor:
        assert grad.is_contiguous()  # else no kernel takes it
        self.calls.append("gradient")
        return super().gradient_gated(grad, down, both)

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        self.calls.append("add" if add else "put")
        super().weight_gradient(total, rows, x, add=add)
