"""``TeBackend``: the parts of a transformer on Transformer Engine's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_megatron.context_parallel.block import Kernel
from lightning_megatron.layers.backend import Activation, NormSpec
from lightning_megatron.layers.te_backend.attention import NarrowCoreAttention
from lightning_megatron.layers.te_backend.modules import (
    FusedColumnLinear,
    FusedGatedMLP,
    FusedMLP,
    FusedRowLinear,
    NarrowHead,
    NarrowRMSNorm,
)
from lightning_megatron.layers.te_backend.operations import Operations
from lightning_megatron.layers.te_backend.options import Fp8Options
from lightning_megatron.layers.te_backend.scales import Scales
from lightning_megatron.layers.torch_backend import TorchBackend
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import Init
from lightning_megatron.tensor_parallel.embedding import VocabParallelHead
from lightning_megatron.tensor_parallel.linear import OutPart


class TeBackend(TorchBackend):
    """``Backend`` whose norms, linears and activations are fused, in 16 or in 8 bits.

    What neither gains by the library nor by 8 bits is the torch backend's: norms that stand alone, attention in 16 bits (its
    cuDNN kernels are faster through torch), rotation.

    Args:
        operations: of the library (``TeOperations``), or in plain torch (``PlainOperations``).
        options: what is multiplied in 8 bits; ``None`` for nothing.
        compiles, attention_kernel: see ``TorchBackend``.
    """

    def __init__(
        self,
        operations: Operations,
        options: Fp8Options | None = None,
        *,
        compiles: bool = False,
        attention_kernel: Kernel = "auto",
    ) -> None:
        super().__init__(compiles=compiles, attention_kernel=attention_kernel)
        self._operations, self._options = operations, options
        self.scales = Scales(options) if options is not None else None

    def for_layer(self, index: int, num_layers: int) -> TorchBackend:
        """See ``Backend.for_layer``: the torch backend for layers that stay in 16 bits."""
        if self._options is not None and self._options.is_layer_in_bf16(index, num_layers):
            return TorchBackend(compiles=self.compiles, attention_kernel=self.attention_kernel)
        return self

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
        """See ``Backend.norm_column_linear``; in 8 bits an RMSNorm quantizes for the linear."""
        shared = {"partial": mesh.sequence_parallel, "device": device, "dtype": dtype}
        before: nn.Module
        given = None
        if norm.kind == "rmsnorm" and self.scales is not None:
            before = NarrowRMSNorm(in_features, eps=norm.eps, operations=self._operations, mesh=mesh, **shared)
            given = before.handoff
        else:
            before = self.norm(in_features, norm, **shared)  # type: ignore[arg-type]
        linear = FusedColumnLinear(
            in_features,
            parts,
            mesh=mesh,
            bias=bias,
            init=init or Init(),
            device=device,
            dtype=dtype,
            operations=self._operations,
            scales=self.scales,
            given=given,
        )
        if isinstance(before, NarrowRMSNorm):
            before.takers = (linear,)
        return before, linear

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
        """See ``Backend.row_linear``."""
        return FusedRowLinear(
            in_features,
            out_features,
            mesh=mesh,
            bias=bias,
            init=init or Init(),
            device=device,
            dtype=dtype,
            operations=self._operations,
            scales=self.scales,
        )

    def core_attention(self, *, dropout: float, mesh: Mesh) -> nn.Module:
        """See ``Backend.core_attention``."""
        if self._options is None or self.scales is None or not self._options.attention:
            return super().core_attention(dropout=dropout, mesh=mesh)
        return NarrowCoreAttention(operations=self._operations, scales=self.scales, dropout=dropout, mesh=mesh)

    def mlp(self, up: nn.Module, down: nn.Module, kind: Activation) -> nn.Module:
        """See ``Backend.mlp``; the linear behind the activation computes it."""
        made = FusedGatedMLP if kind == "swiglu" else FusedMLP
        return made(up, down, activation=self.activation(kind))

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
        """See ``Backend.head``."""
        shared = {"mesh": mesh, "vocab_multiple": vocab_multiple, "init": init, "device": device, "dtype": dtype}
        if self._options is None or self.scales is None or not self._options.head:
            return super().head(vocab_size, hidden_size, **shared)  # type: ignore[arg-type]
        # Its input gradient sums over the whole vocabulary. A model of 1B with fast gradients learnt as in bf16, and so did one
        # with this head; with both, and 8-bit attention and parameters, its loss was 6 % higher
        # after 200 steps.
        operations = self._operations.with_fp32_sums()
        return NarrowHead(vocab_size, hidden_size, operations=operations, scales=self.scales, **shared)
