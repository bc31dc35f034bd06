"""Causal attention in 8 bits, by factors of earlier optimizer steps.

Note [The first step of attention]
The kernel rounds what it makes (its result, the gradient of the scores, the gradients of queries, keys and values) by factors
that it must be given. So there is no attention in 8 bits before there is a history: the first step, and evaluation before
it, attend in 16 bits, and the step notes the magnitudes. Of the gradient of the scores, which no 16-bit kernel shows, it
notes a bound; e5m2 covers 30 powers of two, which leaves room for one that is not tight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.te_backend.handoff import Handoff, goes_unheard, stand_in
from lightning_megatron.layers.te_backend.modules import FusedRowLinear, is_aligned
from lightning_megatron.layers.te_backend.operations import Heads, Operations, Rotation
from lightning_megatron.layers.te_backend.scales import AttentionSlots, Scales, remember
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh


class NarrowCoreAttention(CoreAttention):
    """``CoreAttention`` in 8 bits, which does the common case alone, and rotates by itself.

    Args:
        operations: of the library.
        scales: makes slots.
        dropout: must be 0.
        mesh: must not cut the sequence over context-parallel ranks.

    Raises:
        ValueError: it is not so.
    """

    rotates = True

    def __init__(self, *, operations: Operations, scales: Scales, dropout: float, mesh: Mesh) -> None:
        if dropout > 0.0:
            raise ValueError(f"fp8_attention=True has no dropout, but attention_dropout={dropout}; set one of them to 0.")
        if mesh.cp.size > 1:
            raise ValueError(
                f"fp8_attention=True attends to whole sequences, but cp={mesh.cp.size} cuts them; set cp=1 or "
                f"fp8_attention=False."
            )
        super().__init__(NarrowAttention(operations, scales, mesh), dropout=0.0, mesh=mesh)
        self.takers: tuple[nn.Module, ...] = ()
        """The linear that may get the result in 8 bits; in a tuple, so that it is no part of this module."""
        self._goes_to: tuple[nn.Module, ...] = ()

    def check_head_dim(self, head_dim: int) -> None:
        """See ``check_head_dim``."""
        plain: Any = self.plain
        check_head_dim(plain.operations, head_dim)

    def hand_to(self, linear: nn.Module) -> None:
        """Let the linear behind it have its result in 8 bits, where that has one factor a tensor: for both the same."""
        plain: Any = self.plain
        if isinstance(linear, FusedRowLinear) and plain.scales.options.is_per_tensor:
            linear.job = replace(linear.job, given=plain.handoff, input_slot=plain.slots.out)
            plain.handoff.slot = linear.job.input_slot
            self.takers = (linear,)

    def announced(self, taker: nn.Module) -> None:
        """See ``announce``."""
        self._goes_to = (taker,)

    def part(self) -> None:
        """Hand nothing over: one of the two runs again without the other."""
        plain: Any = self.plain
        plain.handoff.slot = None

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, context: SequenceContext, *, heads: tuple[int, int] | None = None
    ) -> Tensor:
        """See ``CoreAttention.forward``. With ``heads`` (h and g) q is all three side by side, yet to be rotated.

        What it returns may be a stand-in that only the linear behind it can use.
        """
        if not context.is_plain:
            raise ValueError(
                "fp8_attention=True attends causally to whole rows of one document: packed documents, sliding windows and "
                "causal=False are not there in 8 bits. Set fp8_attention=False for them."
            )
        plain: Any = self.plain
        goes_to, self._goes_to, plain.handoff.narrow = self._goes_to, (), None
        plain.hands_over = bool(goes_to) and goes_to == self.takers and goes_unheard(self, plain, *goes_to)
        attended: Tensor = plain(q, k, v, context, heads=heads)
        return attended


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
        self.handoff = Handoff()
        """To the linear behind it, if it has a slot. See Note [Handed over in 8 bits]."""
        self.hands_over = False
        """Whether it may, in this call."""
        self._in_16_bits = CausalAttention(dropout=0.0, mesh=mesh)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, context: SequenceContext, *, heads: tuple[int, int] | None = None
    ) -> Tensor:
        """Queries ``[S, B, h, d]``, keys and values ``[S, B, g, d]`` with g dividing h, to ``[S, B, h * d]``.

        Or, with ``heads``, ``[S, B, (h + 2g) * d]`` before the rotation.
        """
        self.scales.prepare(q.device)
        rotation = Rotation(heads, context.rope) if heads is not None and context.rope is not None else None
        check_head_dim(self.operations, q.shape[-1] if rotation is None else rotation.head_dim)
        given: Tensor | Heads = q
        missing = -q.shape[0] % self.operations.attention_multiple
        if rotation is not None and (missing or not self.slots.are_known):
            given, rotation = rotation.turned(q), None
        elif k is not None and v is not None:
            given = q, k, v
        if not self.slots.are_known:
            assert isinstance(given, tuple)
            return self._first(*given, context)
        length = q.shape[0]
        if missing:  # behind the others, where nobody sees them
            one, two, three = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)) for x in given)
            given = one, two, three
        handoff = (
            self.handoff
            if not missing and is_aligned(q if q.dim() == 3 else q[:, :, 0], self.scales) and self.hands_over
            else None
        )
        call = _Call(self.operations, self.slots, rotation, handoff, torch.is_grad_enabled())
        tensors = given if isinstance(given, tuple) else (given, None, None)
        result: Tensor = _Attend.apply(*tensors, call)  # type: ignore[no-untyped-call]
        return result[:length]

    def _first(self, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> Tensor:
        if not torch.is_grad_enabled():
            attended: Tensor = self._in_16_bits(q, k, v, context)
            return attended
        longest = torch.linalg.vector_norm(v.detach(), dim=-1, dtype=torch.float32).amax()
        q, k, v = _NoteInputs.apply(q, k, v, self.slots)  # type: ignore[no-untyped-call]
        noted: Tensor = _NoteResult.apply(self._in_16_bits(q, k, v, context), longest, q.shape[2], self.slots)  # type: ignore[no-untyped-call]
        return noted


def check_head_dim(operations: Operations, head_dim: int) -> None:
    """Refuse sizes of heads that the library has no kernel for.

    Raises:
        ValueError: with the size.
    """
    wanted = operations.attention_head_dim
    if wanted is not None and head_dim != wanted:
        raise ValueError(f"fp8_attention=True needs heads of {wanted}, these are of {head_dim}; set fp8_attention=False.")


@dataclass(frozen=True)
class _Call:
    """What ``_Attend`` needs besides tensors; ``handoff``: where its result may go, if that has a slot."""

    operations: Operations
    slots: AttentionSlots
    rotation: Rotation | None
    handoff: Handoff | None
    record: bool


class _Attend(torch.autograd.Function):
    """Attention to ``[S, B, h * d]``, of three tensors or of one that is rotated first; 8 bits are kept of all four."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, call: _Call) -> Tensor:
        given = q if k is None or v is None else (q, k, v)
        narrow, kept = call.operations.attend(given, call.slots, rotation=call.rotation, record=call.record)
        heads = q.shape[2:] if call.rotation is None else (call.rotation.heads[0], call.rotation.head_dim)
        ctx.call, ctx.heads = call, heads
        ctx.save_for_backward(*kept)
        shape = (*q.shape[:2], heads[0] * heads[1])
        if call.handoff is not None and call.handoff.slot is not None:
            call.handoff.narrow = narrow
            return stand_in(q, shape)  # whoever reads it notices
        return call.operations.widened(narrow, q).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        grad = grad.reshape(*grad.shape[:2], *ctx.heads)
        back = call.operations.attend_backward(grad, list(ctx.saved_tensors), call.slots, rotation=call.rotation)
        return (*back, None) if isinstance(back, tuple) else (back, None, None, None)


class _NoteInputs(torch.autograd.Function):
    """Passes queries, keys and values on, and notes their magnitudes and those of their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, slots: AttentionSlots) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slots = slots
        remember([slots.qkv], [_largest(q, k, v)])
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        remember([ctx.slots.grad_qkv], [_largest(*grads)])
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


def _largest(*tensors: Tensor) -> Tensor:
    each = [torch.linalg.vector_norm(x.detach(), float("inf"), dtype=torch.float32) for x in tensors]
    return torch.stack(each).amax(0, keepdim=True)
