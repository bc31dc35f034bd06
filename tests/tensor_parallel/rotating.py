"""Stands for products of a GPU that rotates queries and keys beside them."""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.kernels.products import Tables, TorchProducts


class Rotating(TorchProducts):
    """Rotation beside the product, as on Hopper; notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_asked = 0

    def rotates(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> bool:
        self.num_asked += 1
        return True

    def forward_rotated(self, x: Tensor, weight: Tensor, tables: Tables, heads: tuple[int, int]) -> Tensor:
        self.calls.append("forward")
        return super().forward_rotated(x, weight, tables, heads)

    def weight_gradient(self, total: Tensor, rows: Tensor, x: Tensor, *, add: bool) -> None:
        self.calls.append("add" if add else "put")
        super().weight_gradient(total, rows, x, add=add)
