"""The core of attention: this rank's queries against the keys that they see, wherever those are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.context_parallel.attention import ContextParallelAttention
from lightning_megatron.context_parallel.block import BlockAttention, Kernel
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.mesh import Mesh
from lightning_megatron.rng import shard_rng

if TYPE_CHECKING:
    from lightning_megatron.layers.te_backend.context import TeContextAttention


class CoreAttention(nn.Module):
    """Attention by the sequence context: cut over cp or not, packed or not, causal or not, with a window or without.

    Args:
        plain: causal attention over whole rows that one rank holds, the common case; called as this module is.
        dropout: probability of dropping an attention weight in training. Ranks of tp and cp draw masks of their own.
        mesh: names the axes; its ``cp_kernel`` says whose attention over cut sequences it is.
        kernel: see ``BlockAttention``.

    Raises:
        ValueError: ``cp_kernel="te"`` where Transformer Engine cannot be used.
    """

    def __init__(self, plain: nn.Module, *, dropout: float, mesh: Mesh, kernel: Kernel = "auto") -> None:
        super().__init__()
        self.plain, self.dropout, self.kernel, self._mesh = plain, dropout, kernel, mesh
        self._te: TeContextAttention | None = None
        if mesh.parallelism.cp_kernel == "te" and mesh.cp.size > 1:
            from lightning_megatron.layers.te_backend.context import TeContextAttention

            self._te = TeContextAttention(ContextParallelAttention.of(mesh, BlockAttention()), dropout=dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Queries ``[S/cp, B, h, d]``, keys and values ``[S/cp, B, g, d]`` with g dividing h, to ``[S/cp, B, h * d]``."""
        if context.is_plain:
            attended: Tensor = self.plain(q, k, v, context)
            return attended
        dropout = self.dropout if self.training else 0.0
        attention = ContextParallelAttention.of(self._mesh, BlockAttention(dropout, self.kernel))
        # Padding that only tensor parallelism needs is no part of the layout.
        num_padded = q.shape[0] - context.seq_len
        q, k, v = (tensor[: context.seq_len] for tensor in (q, k, v))
        with shard_rng(self._mesh.tp, q.device) if dropout > 0.0 else nullcontext():
            where: dict[str, Any] = {"layout": context.rows, "pattern": context.pattern}
            if self._te is not None and context.rows.size > 1:
                attended = self._te(q, k, v, **where, training=self.training).flatten(2)
            else:
                attended = attention(q, k, v, **where).flatten(2)
        return F.pad(attended, (0, 0, 0, 0, 0, num_padded)) if num_padded else attended

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"dropout={self.dropout}, kernel={self.kernel}"
