"""Norm and linear layers as autograd functions; the collectives and what comes before a product are part of them.

Note [Overlap]
The column layer's backward reduces the input gradient over tp beside the weight gradient's product. Under sequence
parallelism in 8 bits the gathered input is kept (one byte for each element of the whole sequence); otherwise this rank's
part is kept and gathered again beside the input gradient's product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.backend import Activation
from lightning_megatron.layers.norm import _AddNorm
from lightning_megatron.layers.rope import RotateFused
from lightning_megatron.layers.te_backend.handoff import Handoff, stand_in
from lightning_megatron.layers.te_backend.operations import Narrow, Operations, Rotation
from lightning_megatron.layers.te_backend.pieces import gathered, gathered_product, summed_product
from lightning_megatron.layers.te_backend.scales import Slot
from lightning_megatron.mesh import Axis
from lightning_megatron.tensor_parallel.product import start_all_gather, start_all_reduce, start_reduce_scatter
from lightning_megatron.weight_gradients import now_or_later, waits


class WeightCache:
    """One weight in 8 bits, made once for all micro-batches of an optimizer step.

    Of a parameter that the optimizer holds in 8 bits (``WeightHolder`` in ``optim/narrow.py``) it makes the form that products
    need and bytes and factor are not.

    Attributes:
        is_pinned: somebody knows where it lies (a CUDA graph): it is made anew in the same place.
        is_used: somebody has asked for it.
    """

    def __init__(self) -> None:
        self.is_pinned = self.is_used = False
        self._key: tuple[object, ...] | None = None
        self._narrow: Narrow = None
        self._held: tuple[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> WeightCache:
        return WeightCache()

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()

    def get(self, weight: Tensor, operations: Operations, epoch: int) -> Narrow:
        """The weight in 8 bits, made anew if it may have changed."""
        if not operations.is_narrow:
            return weight.detach()
        self.is_used = True
        key = (epoch, weight._version, weight.data_ptr()) if self._held is None else ("held",)
        if key != self._key:
            with torch.inference_mode(False):  # or a later training could not use it
                made = operations.quantize_weight(weight) if self._held is None else operations.held_weight(*self._held)
            self._key = key
            if self.is_pinned and self._narrow is not None:
                _overwrite(self._narrow, made)
            else:
                self._narrow = made
        return self._narrow

    def hold(self, rows: Tensor, scale_inv: Tensor) -> None:
        """See ``WeightHolder``."""
        self._held = rows, scale_inv
        self._forget()

    def let_go(self) -> None:
        """See ``WeightHolder``."""
        self._held = None
        self._forget()

    def _forget(self) -> None:
        self._key = None
        if not self.is_pinned:
            self._narrow = None


@dataclass
class Turning:
    """A rotation that a product may do, and whether it has."""

    rotation: Rotation
    is_done: bool = False


@dataclass(frozen=True)
class Job:
    """What a linear layer's function needs besides tensors.

    Args:
        operations: of the library.
        cache: of the weight.
        axis: the tensor-parallel axis.
        sequence_parallel: whether hidden states between blocks are cut over it.
        input_slot, grad_slot: factors of the layer's input and of its output's gradient.
        epoch: changes whenever weights may have changed.
        record: whether this is training, whose magnitudes later steps should know.
        activation: before a row layer.
        activates_again: make the activation again for the weight's gradient instead of keeping it.
        num_pieces: in which products and their communication are done beside each other; 1: one after the other.
        given: where the input may be, instead of in the argument; of a row layer with an activation, the activated.
        activated: where a lone rank's column layer may put the SwiGLU of its result.
        handoff: between a row layer and the column layer before it: the gradient of what lies between.
        turning: how a lone rank's column layer may rotate its result.
    """

    operations: Operations
    cache: WeightCache
    axis: Axis
    sequence_parallel: bool
    input_slot: Slot | None = None
    grad_slot: Slot | None = None
    epoch: int = 0
    record: bool = True
    activation: Activation | None = None
    activates_again: bool = False
    num_pieces: int = 1
    given: Handoff | None = field(default=None, compare=False)
    activated: Handoff | None = field(default=None, compare=False)
    handoff: Handoff | None = field(default=None, compare=False)
    turning: Turning | None = field(default=None, compare=False)

    def called(self, **changes: Any) -> Job:
        """The job of one call: as ``dataclasses.replace``, in a fifth of its time."""
        made = object.__new__(Job)
        made.__dict__.update(self.__dict__, **changes)
        return made

    def weight(self, weight: Tensor) -> Narrow:
        """The weight as it is multiplied."""
        return self.cache.get(weight, self.operations, self.epoch)


class AddNarrowNorm(_AddNorm):
    """The norm with its addition, handed over in 8 bits: the second result is a stand-in for it. The same backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, gain: Tensor, added: Tensor | None, made: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """``made``: the sum and ``1 / rms`` of its rows, as ``Operations.add_norm_quantized`` has made them."""
        summed, scales = made
        ctx.dtypes = hidden.dtype, hidden.dtype if added is None else added.dtype
        ctx.set_materialize_grads(False)
        summed = hidden if added is None else summed.view(hidden.shape)
        ctx.save_for_backward(summed, gain, scales.view(*hidden.shape[:-1], 1))
        return summed, stand_in(hidden, hidden.shape)


@dataclass(frozen=True)
class RotatedCall:
    """What ``RotateNarrow`` needs besides tensors; ``handoff``: to the linear before it, which may have rotated already."""

    operations: Operations
    turning: Turning
    handoff: Handoff


class RotateNarrow(RotateFused):
    """``RotateFused`` whose gradient is handed to the linear before it in 8 bits."""

    @staticmethod
    def forward(ctx: Any, fused: Tensor, call: RotatedCall) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Inputs: ``[S, B, (h + 2g) * d]``."""
        ctx.call, ctx.shape = call, fused.shape
        rotation = call.turning.rotation
        return rotation.split(fused if call.turning.is_done else rotation.turned_whole(fused))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        """Returns a stand-in, which reads as NaN."""
        call: RotatedCall = ctx.call
        narrow = call.operations.turned_back_quantized((of_q, of_k, of_v), call.turning.rotation, call.handoff.slot)
        call.handoff.narrow = narrow
        return stand_in(of_q, ctx.shape), None


class ColumnLinear(torch.autograd.Function):
    """Column-parallel linear, ``[S/tp, B, in] -> [S, B, out/tp]``. See Note [Overlap]."""

    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
        """Inputs: hidden states, ``[out/tp, in]``, ``[out/tp]``."""
        ops, own, factor = job.operations, None, job.weight(weight)
        narrow = None if job.given is None else job.given.take()

        def multiply(matrix: Narrow, out: Tensor | None) -> Tensor:
            after, turning = job.activated, job.turning
            if after is not None and (made := ops.product_gated(factor, matrix, x, after.slot, record=job.record)) is not None:
                result, after.narrow = made
                return result
            if turning is not None and (turned := ops.product_rotated(factor, matrix, x, turning.rotation)) is not None:
                turning.is_done = True
                return turned
            return ops.product(factor, matrix, bias, x, out=out)

        if narrow is None:
            rows = _rows(x)
            own = rows if job.sequence_parallel and not ops.is_narrow else None
            result, narrow = gathered_product(rows, job.input_slot, multiply, job=job, size=len(weight), keeps=own is None)
        else:
            result = multiply(narrow, None)
        kept = None
        if ctx.needs_input_grad[1] and job.record:
            kept = own if own is not None else ops.keep_columns(narrow)
        ctx.job, ctx.shape = job, x.shape
        _save(ctx, weight, kept)
        return result.view(x.shape[0] * (job.axis.size if job.sequence_parallel else 1), *x.shape[1:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; the weight's may be added to its sum instead."""
        job: Job = ctx.job
        ops, (weight, kept) = job.operations, _saved(ctx)
        narrow = None if job.handoff is None else job.handoff.take()
        narrow = ops.quantize(_rows(grad), job.grad_slot, record=True) if narrow is None else narrow
        reducing = None
        whole = _gathered_beside(kept, job, beside=ctx.needs_input_grad[1] and not waits(ctx))
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter if job.sequence_parallel else start_all_reduce
            reducing = start(ops.input_gradient(job.weight(weight), narrow, grad), job.axis)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = now_or_later(
                ctx,
                lambda: ops.weight_gradient(whole(), narrow, weight),
                add=lambda total: ops.add_weight_gradient(whole(), narrow, total),
                put=lambda total: ops.add_weight_gradient(whole(), narrow, total, add=False),
            )
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        return None if reducing is None else reducing.wait().view(ctx.shape), grad_weight, grad_bias, None


class RowLinear(torch.autograd.Function):
    """Activation and row-parallel linear, ``[S, B, m] -> [S/tp, B, out]``; without bias, which comes after the reduction."""

    weight_input = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, job: Job, residual: Tensor | None) -> Tensor:
        """Inputs: ``[S, B, m]``, where m is in/tp, or twice that before a gated activation, and the weight ``[out, in/tp]``.

        ``residual``, ``[S, B, out]``, is added to the result of a lone rank. It is not kept.
        """
        ops = job.operations
        narrow = None if job.given is None else job.given.take()
        rows = _rows(x) if narrow is None or job.activation is not None else None
        if narrow is not None or rows is None:
            pass
        elif job.activation is None:
            narrow = ops.quantize(rows, job.input_slot, record=job.record)
        else:
            narrow = ops.activate_quantized(rows, job.activation, job.input_slot, record=job.record)
        assert residual is None or job.axis.size == 1, "the residual is added once, not on each rank"
        beside = None if residual is None else _rows(residual)
        factor = job.weight(weight)

        def multiply(matrix: Narrow, out: Tensor | None) -> Tensor:
            return ops.product(factor, matrix, None, x, added=beside, out=out)

        result = summed_product(narrow, multiply, x, job=job, size=len(weight))
        ctx.job, ctx.shape = job, x.shape
        keeps = ctx.needs_input_grad[1] and not (job.activates_again and job.activation is not None)
        kept = ops.keep_columns(narrow) if keeps else None
        _save(ctx, None if job.activation is None else rows, weight, kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; the weight's may be added to its sum instead."""
        job: Job = ctx.job
        ops, (rows, weight, kept) = job.operations, _saved(ctx)
        part, factor, grad_x = _rows(grad), job.weight(weight), None

        def multiply(matrix: Narrow, out: Tensor | None) -> Tensor:
            return ops.input_gradient(factor, matrix, grad, out=out)

        if not ctx.needs_input_grad[0]:
            narrow = gathered(part, job.grad_slot, job)
        else:
            size = weight.shape[1]
            grad_x, narrow = gathered_product(part, job.grad_slot, multiply, job=job, size=size, keeps=True)
            if job.activation is not None and job.handoff is None:
                grad_x = ops.activate_backward(grad_x, rows, job.activation)
            elif job.activation is not None and job.handoff is not None:
                job.handoff.narrow = ops.activate_backward_quantized(grad_x, rows, job.activation, job.handoff.slot)
                grad_x = stand_in(grad, ctx.shape)
            grad_x = grad_x.view(ctx.shape)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if kept is None and job.activation is not None:
                kept = ops.keep_columns(ops.activate_quantized(rows, job.activation, job.input_slot, record=False))
            narrow = ops.keep_columns(narrow)
            grad_weight = now_or_later(
                ctx,
                lambda: ops.weight_gradient(kept, narrow, weight),
                add=lambda total: ops.add_weight_gradient(kept, narrow, total),
                put=lambda total: ops.add_weight_gradient(kept, narrow, total, add=False),
            )
        return grad_x, grad_weight, None, grad if ctx.needs_input_grad[3] else None


def _rows(x: Tensor) -> Tensor:
    """``[.., n] -> [N, n]``, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _gathered_beside(kept: Narrow, job: Job, *, beside: bool) -> Callable[[], Narrow]:
    """The column layer's whole input; gathered from now on if ``beside``, else when it is asked for."""
    if kept is None or not job.sequence_parallel or job.operations.is_narrow:
        return lambda: kept
    return start_all_gather(kept, job.axis).wait if beside else lambda: start_all_gather(kept, job.axis).wait()


def _save(ctx: Any, *items: Tensor | Narrow | None) -> None:
    """``save_for_backward`` that takes narrow matrices too. They are empty afterwards."""
    tensors: list[Tensor | None] = []
    shells: list[Any] = []
    for item in items:
        if item is None or isinstance(item, Tensor):
            tensors.append(item)
            shells.append(None)
        else:
            parts, shell = item.prepare_for_saving()
            tensors += parts
            shells.append(shell)
    ctx.shells = shells
    ctx.save_for_backward(*tensors)


@torch.no_grad()
def _overwrite(narrow: Narrow, made: Narrow) -> None:
    """Put what ``made`` holds, which is empty afterwards, where ``narrow`` lies."""
    places, shell = narrow.prepare_for_saving()
    for place, part in zip(places, made.prepare_for_saving()[0], strict=True):
        if place is not None:
            place.copy_(part)
    shell.restore_from_saved(places)


def _saved(ctx: Any) -> Sequence[Any]:
    left: list[Tensor | None] = list(ctx.saved_tensors)
    items: list[Any] = []
    for shell in ctx.shells:
        if shell is None:
            items.append(left.pop(0))
        else:
            left = list(shell.restore_from_saved(left))
            items.append(shell)
    return items
