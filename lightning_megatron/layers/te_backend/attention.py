"""Causal attention in 8 bits, by factors of earlier optimizer steps.

Note [The first step of attention]
The kernel rounds what it makes (its result, the gradient of the scores, the gradients of queries, keys and values) by factors
that it must be given. So there is no attention in 8 bits before there is a history: the first step, and evaluation before
it, attend in 16 bits, and the step notes the magnitudes. Of the gradient of the scores, which no 16-bit kernel shows, it
notes a bound; e5m2 covers 30 powers of two, which leaves room for one that is not tight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend.operations import Operations
from lightning_megatron.layers.te_backend.scales import AttentionSlots, Scales, remember
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh


class NarrowCoreAttention(CoreAttention):
    """``CoreAttention`` in 8 bits, which does the common case alone.

    Args:
        operations: of the library.
        scales: makes slots.
        dropout: must be 0.
        mesh: must not cut the sequence over context-parallel ranks.

    Raises:
        ValueError: it is not so.
    """

    def __init__(self, *, operations: Operations, scales: Scales, dropout: float, mesh: Mesh) -> None:
        if dropout > 0.0:
            raise ValueError(f"fp8_attention=True has no dropout, but attention_dropout={dropout}; set one of them to 0.")
        if mesh.cp.size > 1:
            raise ValueError(
                f"fp8_attention=True attends to whole sequences, but cp={mesh.cp.size} cuts them; set cp=1 or "
                f"fp8_attention=False."
            )
        super().__init__(NarrowAttention(operations, scales, mesh), dropout=0.0, mesh=mesh)

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse sizes of heads that the library has no kernel for.

        Raises:
            ValueError: with the size.
        """
        plain: Any = self.plain
        wanted = plain.operations.attention_head_dim
        if wanted is not None and head_dim != wanted:
            raise ValueError(
                f"fp8_attention=True needs heads of {wanted}, and these are of {head_dim}; set fp8_attention=False."
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """See ``CoreAttention.forward``."""
        self.check_head_dim(q.shape[-1])
        if not context.is_plain:
            raise ValueError(
                "fp8_attention=True attends causally to whole rows of one document: packed documents, sliding windows and "
                "causal=False are not there in 8 bits. Set fp8_attention=False for them."
            )
        return super().forward(q, k, v, context)


class NarrowAttention(nn.Module):
    """Causal attention of this rank's heads. See Note [The first step of attention].

    Args:
        operations: of the library.
        scales: makes slots.
        mesh: names the axes.
    """

    def __init__(self, operations: Operations, scales: Scales, mesh: Mesh) -> None:
        super().__init__()
        self.operations, self.scales = operations, scales
        self.slots = AttentionSlots.of(scales)
        self._in_16_bits = CausalAttention(dropout=0.0, mesh=mesh)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        """Queries ``[S, B, h, d]``, keys and values ``[S, B, g, d]`` with g dividing h, to ``[S, B, h * d]``."""
        self.scales.prepare(q.device)
        if not self.scales.is_warm:
            return self._first(q, k, v, context)
        length = q.shape[0]
        missing = -length % self.operations.attention_multiple
        if missing:  # behind the others, where nobody sees them
            q, k, v = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) for x in (q, k, v))
        record = torch.is_grad_enabled()
        result: Tensor = _Attend.apply(q, k, v, self.operations, self.slots, record)  # type: ignore[no-untyped-call]
        return result[:length].flatten(2)

    def _first(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        if not torch.is_grad_enabled():
            attended: Tensor = self._in_16_bits(q, k, v, context)
            return attended
        longest = torch.linalg.vector_norm(v.detach(), dim=-1, dtype=torch.float32).amax()
        q, k, v = _NoteInputs.apply(q, k, v, self.slots)  # type: ignore[no-untyped-call]
        noted: Tensor = _NoteResult.apply(self._in_16_bits(q, k, v, context), longest, q.shape[2], self.slots)  # type: ignore[no-untyped-call]
        return noted


class _Attend(torch.autograd.Function):
    """``[S, B, h, d]``, ``[S, B, g, d]`` twice, to ``[S, B, h, d]``; 8 bits are kept of all four."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, operations: Operations, slots: AttentionSlots, record: bool
    ) -> Tensor:
        result, kept = operations.attend(q, k, v, slots, record=record)
        ctx.operations, ctx.slots = operations, slots
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.operations.attend_backward(grad, list(ctx.saved_tensors), ctx.slots)
        return *grads, None, None, None


class _NoteInputs(torch.autograd.Function):
    """Passes queries, keys and values on, and notes their magnitudes and those of their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slots: AttentionSlots) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slots = slots
        remember([slots.qkv] * 3, [_largest(x) for x in (q, k, v)])
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        remember([ctx.slots.grad_qkv] * 3, [_largest(grad) for grad in grads])
        return *grads, None


class _NoteResult(torch.autograd.Function):
    """Passes ``[S, B, h * d]`` on, and notes magnitudes.

    The gradient of a score is the attention weight times the difference of two numbers, each at most the norm of a row of the
    result's gradient times the norm of the longest value vector.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, longest: Tensor, heads: int, slots: AttentionSlots) -> Tensor:
        ctx.slots, ctx.heads = slots, heads
        ctx.save_for_backward(longest)
        remember([slots.out], [_largest(result)])
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (longest,) = ctx.saved_tensors
        rows = torch.linalg.vector_norm(grad.reshape(*grad.shape[:-1], ctx.heads, -1), dim=-1, dtype=torch.float32)
        bound = (2.0 * longest * rows.amax()).view(1)
        remember([ctx.slots.grad_out, ctx.slots.grad_scores], [_largest(grad), bound])
        return grad, None, None, None


def _largest(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32)
    return largest.view(1)
