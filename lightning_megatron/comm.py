"""Collectives over an ``Axis``: plain ones, and ones that autograd differentiates. On an axis of one rank they do nothing.

The differentiable ones come in the conjugate pairs of tensor parallelism (Shoeybi et al. 2019, section 3; sequence
parallelism: Korthikanti et al. 2022, section 4.2.2):

=====================  =========================  ==========================
function               forward                    backward
=====================  =========================  ==========================
``copy_to``            identity                   all-reduce
``reduce_from``        all-reduce                 identity
``gather_from``        all-gather along a dim     keep own part
``scatter_to``         keep own part              all-gather along the dim
``all_gather_from``    all-gather along a dim     reduce-scatter
``reduce_scatter_to``  reduce-scatter along dim   all-gather
=====================  =========================  ==========================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh import Axis

# torch 2.13 renames the single-tensor collectives and warns at each use of the old names; 2.11 has only the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: the reduction of ``tensor`` over the axis. Same shape."""
    if axis.group is None:
        return tensor
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=axis.group)
    return result


def all_gather(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate over the axis along ``dim``: ``[.., n, ..] -> [.., n * size, ..]``, in the order of axis positions."""
    if axis.group is None:
        return tensor
    parts = _all_gather_stacked(tensor, axis)
    if dim % tensor.dim() == 0:
        return parts.flatten(0, 1)
    return torch.cat(parts.unbind(0), dim=dim)


def _all_gather_stacked(tensor: Tensor, axis: Axis) -> Tensor:
    """``[*shape] -> [size, *shape]``, entry i from axis position i."""
    tensor = tensor.detach().contiguous()
    flat = tensor.new_empty(axis.size * tensor.numel())
    all_gather_single(flat, tensor.view(-1), group=axis.group)
    return _in_axis_order(flat.view(axis.size, *tensor.shape), axis)


def _in_axis_order(stacked: Tensor, axis: Axis) -> Tensor:
    """Process groups sort their ranks; put the parts where the axis has them."""
    order = sorted(axis.ranks)
    if tuple(order) == axis.ranks:
        return stacked
    return stacked[[order.index(rank) for rank in axis.ranks]]


def reduce_scatter(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum over the axis and keep own part along ``dim``: ``[.., n, ..] -> [.., n / size, ..]``."""
    if axis.group is None:
        return tensor
    _check_divides(tensor, axis, dim)
    parts = torch.stack(tensor.detach().chunk(axis.size, dim=dim)) if dim % tensor.dim() else tensor.detach()
    parts = parts.contiguous().view(axis.size, -1)
    order = sorted(axis.ranks)
    if tuple(order) != axis.ranks:
        parts = parts[[axis.ranks.index(rank) for rank in order]]
    shape = list(tensor.shape)
    shape[dim] //= axis.size
    result = tensor.new_empty(shape)
    reduce_scatter_single(result.view(-1), parts.view(-1), group=axis.group)
    return result


def own_part(tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part along ``dim``, as a view: ``[.., n, ..] -> [.., n / size, ..]``."""
    if axis.group is None:
        return tensor
    _check_divides(tensor, axis, dim)
    return tensor.chunk(axis.size, dim=dim)[axis.rank]


def _check_divides(tensor: Tensor, axis: Axis, dim: int) -> None:
    if tensor.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(tensor.shape)} does not divide by the {axis.size} ranks of axis "
            f"{axis.name!r}; pad it to a multiple of {axis.size}."
        )


def broadcast(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrite ``tensor`` with that of axis position ``source``, in place, and return it."""
    if axis.group is not None:
        dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: Any, axis: Axis, source: int) -> Any:
    """The picklable ``value`` of axis position ``source``, on every rank. Slow (milliseconds): not for every step."""
    if axis.group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group, device=torch.device("cpu"))
    return box[0]


def all_gather_object(value: Any, axis: Axis) -> list[Any]:
    """The picklable values of all ranks, in the order of axis positions. Slow: not for every step."""
    if axis.group is None:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    order = sorted(axis.ranks)
    return [values[order.index(rank)] for rank in axis.ranks]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_part(grad, ctx.axis, ctx.dim).contiguous(), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_part(tensor, axis, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _AllGatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


def copy_to(tensor: Tensor, axis: Axis) -> Tensor:
    """Enter a tensor-parallel region with a tensor that every rank holds: identity; gradients are summed. Same shape."""
    return tensor if axis.group is None else _CopyTo.apply(tensor, axis)  # type: ignore[no-untyped-call]


def reduce_from(tensor: Tensor, axis: Axis) -> Tensor:
    """Leave a tensor-parallel region: sum the ranks' partial results. Same shape."""
    return tensor if axis.group is None else _ReduceFrom.apply(tensor, axis)  # type: ignore[no-untyped-call]


def gather_from(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Put shards together for a consumer that all ranks run alike: ``[.., n, ..] -> [.., n * size, ..]``."""
    return tensor if axis.group is None else _GatherFrom.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]


def scatter_to(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keep own part of a tensor that every rank holds: ``[.., n, ..] -> [.., n / size, ..]``."""
    return tensor if axis.group is None else _ScatterTo.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]


def all_gather_from(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Put shards together for consumers that differ by rank; gradients are summed: ``[.., n, ..] -> [.., n * size, ..]``."""
    return tensor if axis.group is None else _AllGatherFrom.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]


def reduce_scatter_to(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum the ranks' partial results and keep own part: ``[.., n, ..] -> [.., n / size, ..]``."""
    return tensor if axis.group is None else _ReduceScatterTo.apply(tensor, axis, dim)  # type: ignore[no-untyped-call]
