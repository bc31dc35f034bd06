"""The plain-torch backend: runs everywhere, and is the reference that fused backends are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_megatron.context_parallel.block import Kernel
from lightning_megatron.context_parallel.flash import flash_attn_interface, insists_on_order
from lightning_megatron.layers.activation import gelu, swiglu
from lightning_megatron.layers.backend import Activation, NormSpec
from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.mlp import MLP, GatedMLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.rope import rotate_heads
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.mesh import Mesh
from lightning_megatron.rng import shard_rng
from lightning_megatron.sharding import Init
from lightning_megatron.tensor_parallel.embedding import VocabParallelHead
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, OutPart, RowParallelLinear


class TorchBackend:
    """``Backend`` of plain torch operations: ``scaled_dot_product_attention``, ``rms_norm``, ``linear``.

    Args:
        compiles: let ``torch.compile`` fuse what this project has no kernels for: see ``layers/compiled.py``.
        attention_kernel: see ``BlockAttention``.
    """

    def __init__(self, *, compiles: bool = False, attention_kernel: Kernel = "auto") -> None:
        self.compiles, self.attention_kernel = compiles, attention_kernel

    def for_layer(self, index: int, num_layers: int) -> TorchBackend:
        """See ``Backend.for_layer``."""
        return self

    def norm(self, size: int, spec: NormSpec, *, partial: bool, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """See ``Backend.norm``."""
        shared: dict[str, Any] = {"eps": spec.eps, "partial": partial, "device": device, "dtype": dtype}
        return RMSNorm(size, **shared) if spec.kind == "rmsnorm" else LayerNorm(size, **shared, compiled=self.compiles)

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
        """See ``Backend.norm_column_linear``; nothing is fused here."""
        before = self.norm(in_features, norm, partial=mesh.sequence_parallel, device=device, dtype=dtype)
        linear = ColumnParallelLinear(in_features, parts, mesh=mesh, bias=bias, init=init or Init(), device=device, dtype=dtype)
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
        return RowParallelLinear(
            in_features, out_features, mesh=mesh, bias=bias, init=init or Init(), device=device, dtype=dtype
        )

    def core_attention(self, *, dropout: float, mesh: Mesh) -> nn.Module:
        """See ``Backend.core_attention``."""
        plain = CausalAttention(dropout=dropout, mesh=mesh, kernel=self.attention_kernel)
        return CoreAttention(plain, dropout=dropout, mesh=mesh, kernel=self.attention_kernel)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See ``Backend.rotate``."""
        return rotate_heads(heads, cos, sin)

    def activation(self, kind: Activation) -> Callable[[Tensor], Tensor]:
        """See ``Backend.activation``."""
        return {"swiglu": swiglu, "gelu": gelu}[kind]

    def mlp(self, up: nn.Module, down: nn.Module, kind: Activation) -> nn.Module:
        """See ``Backend.mlp``."""
        made = GatedMLP if kind == "swiglu" else MLP
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
        return VocabParallelHead(
            vocab_size, hidden_size, mesh=mesh, vocab_multiple=vocab_multiple, init=init, device=device, dtype=dtype
        )


class CausalAttention(nn.Module):
    """Causal attention of this rank's heads by ``scaled_dot_product_attention``, grouped key/value heads included.

    Args:
        dropout: probability of dropping an attention weight in training. The masks of tp ranks differ: their heads do.
        mesh: names the tp axis.
        kernel: see ``BlockAttention``.
    """

    def __init__(self, *, dropout: float, mesh: Mesh, kernel: Kernel = "auto") -> None:
        super().__init__()
        self.dropout, self.kernel, self._tp = dropout, kernel, mesh.tp

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Queries ``[S, B, h, d]``, keys and values ``[S, B, g, d]`` with g dividing h, to ``[S, B, h * d]``."""
        if self.training and self.dropout > 0.0:
            with shard_rng(self._tp, q.device):
                return self._attend(q, k, v, self.dropout)
        return self._attend(q, k, v, 0.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if self.kernel != "flash_attn":
            return _sdpa(q, k, v, dropout, self.kernel).permute(2, 0, 1, 3).flatten(2)
        rows = (tensor.transpose(0, 1) for tensor in (q, k, v))
        attend = flash_attn_interface().flash_attn_func
        attended: Tensor = attend(*rows, dropout_p=dropout, causal=True, deterministic=insists_on_order())
        return attended.transpose(0, 1).flatten(2)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"dropout={self.dropout}, kernel={self.kernel}"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, kernel: Kernel) -> Tensor:
    """``[S, B, h, d] -> [B, h, S, d]``."""
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    grouped = q.shape[1] != k.shape[1]  # the flag alone takes some kernels out of torch's choice
    if grouped and q.dtype not in (torch.float16, torch.bfloat16):
        # torch's kernels for wider types take no groups: it would hold the whole [S, S] of scores instead.
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        grouped = False
    with _fastest(q, dropout) if kernel == "auto" else sdpa_kernel(_BY_NAME[kernel]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


_BY_NAME = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
# Below this many tokens, or at odd lengths, torch's own choice is as good, and cuDNN would plan anew for each length.
_CUDNN_TOKENS, _CUDNN_MULTIPLE = 1024, 128


def _fastest(q: Tensor, dropout: float) -> AbstractContextManager[Any]:
    """Prefer cuDNN's kernels for ``[B, h, S, d]`` on Hopper and later: 1.7 times as fast as flash attention in torch.

    Their backward sums in another order each time, flash's does not where ``torch.use_deterministic_algorithms`` insists.
    """
    narrow, tokens = q.dtype in (torch.float16, torch.bfloat16), q.shape[2]
    if q.is_cuda and narrow and insists_on_order():
        repeatable: AbstractContextManager[Any] = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True)
        return repeatable
    worth = narrow and tokens >= _CUDNN_TOKENS and tokens % _CUDNN_MULTIPLE == 0 and dropout == 0.0
    if not q.is_cuda or not worth or torch.cuda.get_device_capability(q.device) < (9, 0):
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    chosen: AbstractContextManager[Any] = sdpa_kernel(order, set_priority=True)
    return chosen
