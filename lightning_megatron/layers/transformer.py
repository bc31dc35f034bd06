"""One pre-norm transformer layer."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatron.layers.autocast import without_autocast
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.norm import add_and_norm
from lightning_megatron.layers.residual import announce, into_residual
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.mesh import Mesh


class TransformerLayer(nn.Module):
    """Attention, then feed-forward, each on a normalised input and added to the residual stream.

    Args:
        attn_norm, attn: as ``Backend.norm_column_linear`` made them; ``attn`` is called with the normalised hidden state
            and the context.
        mlp_norm, mlp: the same; ``mlp`` is called with the normalised hidden state.
        dropout: probability of zeroing an element of either block's output in training.
        mesh: says how hidden states lie.
    """

    def __init__(
        self,
        attn_norm: nn.Module,
        attn: nn.Module,
        *,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        mesh: Mesh,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attn_norm, self.attn, self.attn_dropout = attn_norm, attn, Dropout(dropout, mesh=mesh)
        self.mlp_norm, self.mlp, self.mlp_dropout = mlp_norm, mlp, Dropout(dropout, mesh=mesh)

    @without_autocast
    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[S/tp, B, H] -> [S/tp, B, H]`` under sequence parallelism, else ``[S, B, H] -> [S, B, H]``."""
        announce(self.attn_norm, self.attn)
        hidden, normed = add_and_norm(self.attn_norm, hidden)
        hidden, added = into_residual(self.attn, hidden, normed, context, dropout=self.attn_dropout)
        announce(self.mlp_norm, self.mlp)
        hidden, normed = add_and_norm(self.mlp_norm, hidden, added)
        hidden, added = into_residual(self.mlp, hidden, normed, dropout=self.mlp_dropout)
        return hidden if added is None else hidden + added
