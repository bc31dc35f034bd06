"""Dropout of hidden states, with masks that fit how the states lie over tensor-parallel ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.layers.sequence import sequence_axis
from lightning_megatron.mesh import Mesh
from lightning_megatron.rng import shard_rng


class Dropout(nn.Module):
    """Dropout between tensor-parallel blocks.

    Where the sequence is cut over tp each rank draws its own mask. Where every tp rank holds the same states all draw the
    same mask, from the surrounding generator, which they hold alike.

    Args:
        p: probability of zeroing an element in training.
        mesh: says whether the sequence is cut.
    """

    def __init__(self, p: float, *, mesh: Mesh) -> None:
        super().__init__()
        self.p, self._axis = p, sequence_axis(mesh)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape in and out."""
        if not self.training or self.p == 0.0:
            return hidden
        with shard_rng(self._axis, hidden.device):
            return F.dropout(hidden, self.p)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"p={self.p}"
