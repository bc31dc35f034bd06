"""Flat buffers: parameters and gradients become views of them, so that one collective serves many parameters.

Note [Gradients in place]
Each parameter's ``grad`` is preset to its view of the flat gradient buffer, and autograd adds into it. For 16-bit
parameters the buffer is fp32, which ``Tensor.grad_dtype`` (torch 2.11 and later) lets ``grad`` be; on older ones a hook adds
the finished gradient. Whatever replaces ``grad`` meanwhile (``zero_grad``, a double backward) is noticed by identity and
brought back into the buffer before it is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import Work

from lightning_megatron.comm import all_gather_single, reduce_scatter_single
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.layout import BucketPlan, ParamSlot, plan_buckets, shard_range
from lightning_megatron.sharding import sharding_of

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")


class GradientSlot:
    """One parameter's place in the gradient buffer: see Note [Gradients in place]."""

    def __init__(self, param: nn.Parameter, view: Tensor) -> None:
        self.param, self.view = param, view
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        param.grad = None
        if view.dtype != param.dtype and not HAS_GRAD_DTYPE:
            self._hook = param.register_post_accumulate_grad_hook(_adder(view))  # type: ignore[no-untyped-call]
            return
        if view.dtype != param.dtype:
            param.grad_dtype = view.dtype
        param.grad = view

    def collect(self) -> None:
        """Bring a gradient that was put beside the buffer back into it."""
        if self._hook is not None or self.param.grad is self.view:
            return
        if self.param.grad is None:
            self.view.zero_()
        else:
            self.view.copy_(self.param.grad.detach())  # a backward with create_graph left a graph on it
        self.param.grad = self.view

    def clear(self) -> None:
        """Point ``grad`` at the buffer: after the caller has zeroed it, or to show what ``hide`` hid."""
        if self._hook is None:
            self.param.grad = self.view

    def hide(self) -> None:
        """Take the gradient off the parameter until ``clear`` shows it again; nothing may be reduced meanwhile."""
        self.collect()
        if self._hook is None:
            self.param.grad = None

    def release(self) -> None:
        """Give the parameter back as torch made it, without a gradient."""
        self.param.grad = None
        if self._hook is not None:
            self._hook.remove()
        elif self.view.dtype != self.param.dtype:
            self.param.grad_dtype = self.param.dtype


def _adder(view: Tensor) -> Callable[[Tensor], None]:
    def add(param: Tensor) -> None:
        assert param.grad is not None
        view.add_(param.grad.detach())
        param.grad = None

    return add


class Bucket:
    """The flat buffers of one ``BucketPlan`` and the collectives over them.

    Args:
        plan: the layout.
        params: the parameters by name; their ``data`` and ``grad`` become views.
        axis: the ranks that share the bucket, one shard each.
    """

    def __init__(self, plan: BucketPlan, params: dict[str, nn.Parameter], *, axis: Axis) -> None:
        self.plan, self.axis = plan, axis
        self.params = [params[placement.name] for placement in plan.placements]
        dtype, device = self.params[0].dtype, self.params[0].device
        # A collective hands shards out by position in the process group, and a group sorts its ranks.
        self.index = sorted(axis.ranks).index(axis.ranks[axis.rank])
        self.values = torch.zeros(plan.numel, dtype=dtype, device=device)
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.gradients = torch.zeros(plan.numel, dtype=grad_dtype, device=device)
        self.slots = []
        for placement, param in zip(plan.placements, self.params, strict=True):
            view = self.values[placement.start : placement.stop].view(param.shape)
            view.copy_(param.detach())
            param.grad = None
            param.data = view
            self.slots.append(GradientSlot(param, self.gradients[placement.start : placement.stop].view(param.shape)))

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of one of the buffers, as a view: ``[numel] -> [numel / num_shards]``."""
        start, stop = shard_range(self.plan, self.index)
        return flat[start:stop]

    def launch_reduce(self) -> Work | None:
        """Start summing the gradients over the axis into this rank's shard; wait on the handle before reading it."""
        for slot in self.slots:
            slot.collect()
        if self.axis.group is None:
            return None
        work: Work = reduce_scatter_single(self.own(self.gradients), self.gradients, group=self.axis.group, async_op=True)
        return work

    def launch_gather(self) -> Work | None:
        """Start filling the parameter buffer from the ranks' shards; wait on the handle before using a parameter."""
        if self.axis.group is None:
            return None
        work: Work = all_gather_single(self.values, self.own(self.values), group=self.axis.group, async_op=True)
        return work

    def zero(self) -> None:
        """Zero the gradients."""
        self.gradients.zero_()
        for slot in self.slots:
            slot.clear()

    def release(self) -> None:
        """Detach the parameters from the gradient buffer; their values stay where they are."""
        for slot in self.slots:
            slot.release()


def build_buckets(named: Sequence[tuple[str, nn.Parameter]], *, mesh: Mesh, bucket_numel: int) -> list[Bucket]:
    """Lay parameters out: dense ones sharded over ``mesh.dp_cp``, experts over ``mesh["edp"]``.

    Args:
        named: the trainable parameters in the order of the model's definition.
        mesh: the running layout.
        bucket_numel: elements after which a bucket is closed.

    Raises:
        ValueError: a parameter that is not floating point.
    """
    slots = [_slot(name, param) for name, param in named]
    buckets = []
    for axis, expert in ((mesh.dp_cp, False), (mesh["edp"], True)):
        mine = [slot for slot in slots if slot.expert is expert]
        plans = plan_buckets(mine, bucket_numel=bucket_numel, num_shards=axis.size)
        buckets += [Bucket(plan, dict(named), axis=axis) for plan in plans]
    return buckets


def _slot(name: str, param: nn.Parameter) -> ParamSlot:
    if param.dtype not in (*SIXTEEN_BIT, torch.float32, torch.float64):
        raise ValueError(
            f"parameter {name!r} has dtype {param.dtype}; the distributed optimizer trains bfloat16, float16, float32 and "
            f"float64. Convert it, or set requires_grad=False."
        )
    sharding = sharding_of(param)
    return ParamSlot(name, param.numel(), str(param.dtype), sharding.expert, sharding.tied)


def wait_all(handles: Iterable[Work | None]) -> None:
    """Wait on launched collectives; ``None`` stands for one that had nothing to do."""
    for handle in handles:
        if handle is not None:
            handle.wait()
