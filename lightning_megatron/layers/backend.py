"""``Backend``: the few operations that differ between plain torch and a library of fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import Init
from lightning_megatron.tensor_parallel.embedding import VocabParallelHead
from lightning_megatron.tensor_parallel.linear import OutPart

Activation = Literal["swiglu", "gelu"]


@dataclass(frozen=True)
class NormSpec:
    """Which normalisation: ``rmsnorm`` (gain only) or ``layernorm`` (gain and bias), over the last dim.

    Args:
        kind: the formula.
        eps: added to the mean square or the variance.
    """

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = 1e-5


class Backend(Protocol):
    """What a transformer is built of. Hidden states are ``[S/tp, B, H]`` under sequence parallelism, else ``[S, B, H]``.

    Every module that is returned gives its parameters the names ``weight`` and ``bias`` and one ``ParamSharding`` each, in
    the canonical unsharded order (QKV ``[q; k; v]``, gated MLP ``[gate; up]``), so that checkpoints do not depend on the
    backend. Modules may be built on the meta device and materialised later.
    """

    def for_layer(self, index: int, num_layers: int) -> Backend:
        """What the layer of that index is built of: this backend, unless some layers are to be made otherwise."""
        ...

    def norm(self, size: int, spec: NormSpec, *, partial: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """A norm over the last dim (``size``), same shape out. ``partial``: each tp rank feeds it other tokens or heads."""
        ...

    def norm_column_linear(
        self,
        in_features: int,
        parts: int | Sequence[OutPart],
        *,
        norm: NormSpec,
        mesh: Mesh,
        bias: bool = False,
        init: Init | None = None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> tuple[nn.Module, nn.Module]:
        """A norm and the column-parallel linear behind it, to be called as ``linear(norm(hidden))``.

        Made together so that a backend may fuse them (its norm then only holds the parameters and passes the input on).
        ``[S/tp, B, H] -> [S, B, out/tp]`` under sequence parallelism, else ``[S, B, H] -> [S, B, out/tp]``. The linear's
        ``part_sizes`` are the local sizes of ``parts`` along the last dim.
        """
        ...

    def row_linear(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        bias: bool = False,
        init: Init | None = None,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> nn.Module:
        """A row-parallel linear: ``[S, B, in/tp] -> [S/tp, B, out]`` under sequence parallelism, else ``[S, B, out]``."""
        ...

    def core_attention(self, *, dropout: float, mesh: Mesh) -> nn.Module:
        """Causal softmax attention of this rank's heads, without parameters.

        Called as ``core(q, k, v, context)`` with q ``[S, B, heads/tp, head_dim]`` and k, v ``[S, B, kv_heads/tp, head_dim]``,
        where neighbouring query heads share a key/value head, and the ``SequenceContext`` of the micro-batch; returns
        ``[S, B, heads/tp * head_dim]``.
        """
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary position embeddings: heads ``[S, B, h, head_dim]``, tables ``[S, 1, 1, head_dim]``. Same shape."""
        ...

    def activation(self, kind: Activation) -> Callable[[Tensor], Tensor]:
        """``swiglu``: ``[.., gate and up, n each] -> [.., n]``; ``gelu`` (tanh approximation): same shape."""
        ...

    def mlp(self, up: nn.Module, down: nn.Module, kind: Activation) -> nn.Module:
        """``down(activation(up(hidden)))`` of this backend's linears: a ``GatedMLP`` or an ``MLP``, by the activation."""
        ...

    def head(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: Mesh,
        vocab_multiple: int,
        init: Init,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> VocabParallelHead:
        """An output head of its own weight: ``[S/tp, B, H] -> [S, B, V_padded/tp]`` under sequence parallelism."""
        ...
