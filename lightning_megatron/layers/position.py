"""Learned absolute position embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import own_part
from lightning_megatron.layers.sequence import sequence_axis
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import Init, replicated
from lightning_megatron.tensor_parallel.linear import make_parameter


class PositionEmbedding(nn.Module):
    """A vector for each position, held whole by every tensor-parallel rank.

    Args:
        max_seq_len: positions in the table.
        hidden_size: H.
        mesh: under sequence parallelism a rank looks up its own part of the sequence, and the gradient is summed over tp.
        init: first values.
        device, dtype: of the table.
    """

    def __init__(
        self,
        max_seq_len: int,
        hidden_size: int,
        *,
        mesh: Mesh,
        init: Init | None = None,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._axis = sequence_axis(mesh)
        shape = (max_seq_len, hidden_size)
        sharding = replicated(shape, partial=mesh.sequence_parallel, init=init or Init())
        self.weight = make_parameter(shape, sharding, device=device, dtype=dtype)

    def forward(self, positions: Tensor) -> Tensor:
        """Vectors of positions ``[1 or B, S]``: ``[S/tp, 1 or B, H]`` under sequence parallelism, else ``[S, 1 or B, H]``.

        Positions past the table are padding, whose states reach no output; they take the last vector.
        """
        inside = positions.clamp(max=self.weight.shape[0] - 1).t()
        return F.embedding(own_part(inside, self._axis), self.weight)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"
