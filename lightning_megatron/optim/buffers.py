"""Flat buffers: parameters and gradients become views of them, so that one collective serves many parameters.

Note [Gradients in place]
Each parameter's ``grad`` is preset to its view of the flat gradient buffer, and autograd adds into it, or the layer's own
backward does (weight_gradients.py), which saves the pass over memory. For 16-bit parameters the buffer is fp32, which
``Tensor.grad_dtype`` (torch 2.11 and later) lets ``grad`` be; on older ones a hook adds the finished gradient. Whatever
replaces ``grad`` meanwhile (``zero_grad``, a double backward) is noticed by identity and brought back into the buffer before
it is reduced. ``None`` means zero, as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Work

from lightning_megatron.comm import all_gather_single, reduce_scatter_single
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.layout import BucketPlan, ParamSlot, plan_buckets, shard_range
from lightning_megatron.sharding import sharding_of
from lightning_megatron.weight_gradients import close_sum, is_summed, open_sum

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
NARROW = "float8"
"""``dtype_key`` of parameters that the model holds in 8 bits: see ``optim/narrow.py``."""


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
        open_sum(param, view)

    def collect(self) -> None:
        """Bring a gradient that was put beside the buffer back into it."""
        if self._hook is not None or self.param.grad is self.view:
            return
        if self.param.grad is None:
            self.view.zero_()
        else:
            self.view.copy_(self.param.grad.detach())  # a backward with create_graph left a graph on it
        self.param.grad = self.view

    @property
    def is_summed(self) -> bool:
        """Whether layers add to the view themselves, so that it need not be zeroed: ``empty``."""
        return is_summed(self.param)

    def empty(self) -> None:
        """Count as zero whatever the buffer holds: the first gradient is written over it, or ``collect`` zeroes it."""
        self.param.grad = None

    def show(self) -> None:
        """Point ``grad`` at the buffer: after the caller has zeroed it, or to undo ``hide``."""
        if self._hook is None:
            self.param.grad = self.view
            open_sum(self.param, self.view)

    def hide(self, *, collect: bool) -> None:
        """Take the gradient off the parameter until ``show`` puts it back; no reduction may start meanwhile."""
        if collect:
            self.collect()
        if self._hook is None:
            close_sum(self.param)  # whose contents stay, although ``grad`` says that there are none
            self.param.grad = None

    def release(self) -> None:
        """Give the parameter back as torch made it, without a gradient."""
        self.param.grad = None
        close_sum(self.param)
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
        params: the parameters by name; their ``data`` (but in a narrow bucket) and ``grad`` become views.
        axis: the ranks that share the bucket, one shard each.
        reduce_dtype: what gradients travel in, if not in the buffer's own dtype.
    """

    def __init__(
        self,
        plan: BucketPlan,
        params: dict[str, nn.Parameter],
        *,
        axis: Axis,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.axis = plan, axis
        self.params = [params[placement.name] for placement in plan.placements]
        dtype, device = self.params[0].dtype, self.params[0].device
        # A collective hands shards out by position in the process group, and a group sorts its ranks.
        self.index = sorted(axis.ranks).index(axis.ranks[axis.rank])
        self.is_narrow = plan.dtype_key == NARROW
        self.values = torch.zeros(plan.numel, dtype=torch.uint8 if self.is_narrow else dtype, device=device)
        grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.gradients = torch.zeros(plan.numel, dtype=grad_dtype, device=device)
        self.reduce_dtype = reduce_dtype or grad_dtype
        self._launched = False
        self._reduction: _Reduction | None = None
        self._gathering: Work | None = None
        self.slots = []
        for placement, param in zip(plan.placements, self.params, strict=True):
            param.grad = None
            if not self.is_narrow:
                view = self.values[placement.start : placement.stop].view(param.shape)
                view.copy_(param.detach())
                param.data = view
            self.slots.append(GradientSlot(param, self.gradients[placement.start : placement.stop].view(param.shape)))

    def own(self, flat: Tensor) -> Tensor:
        """This rank's shard of one of the buffers, as a view: ``[numel] -> [numel / num_shards]``."""
        start, stop = self.own_range
        return flat[start:stop]

    @property
    def own_range(self) -> tuple[int, int]:
        """Where this rank's shard lies in the buffers: ``[start, stop)``."""
        return shard_range(self.plan, self.index)

    def launch_reduce(self) -> None:
        """Start summing the gradients over the axis into this rank's shard, once in a step; ``wait_reduce`` ends it."""
        if self._launched:
            return
        self._launched = True
        for slot in self.slots:
            slot.collect()
        if self.axis.group is None:
            return
        if self.reduce_dtype == self.gradients.dtype:
            own = self.own(self.gradients)
            work: Work = reduce_scatter_single(own, self.gradients, group=self.axis.group, async_op=True)
            self._reduction = _Reduction(work)
            return
        # Parts travel in the narrow dtype and are summed here in the wide one: a reduce-scatter would round at each hop.
        sent = self.gradients.to(self.reduce_dtype)
        received = torch.empty_like(sent)
        exchanged = dist.all_to_all_single(received, sent, group=self.axis.group, async_op=True)
        self._reduction = _Reduction(exchanged, sent, received.view(self.plan.num_shards, -1))

    def wait_reduce(self) -> None:
        """Wait until this rank's shard of the gradients is complete."""
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return
        reduction.work.wait()
        if reduction.parts is not None:
            own = self.own(self.gradients)
            torch.sum(reduction.parts, dim=0, dtype=own.dtype, out=own)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction has been launched and not been waited for."""
        return self._reduction is not None

    def launch_gather(self) -> None:
        """Start filling the parameter buffer from the ranks' shards; ``wait_gather`` before using a parameter."""
        if self.axis.group is not None:
            self._gathering = all_gather_single(self.values, self.own(self.values), group=self.axis.group, async_op=True)

    def wait_gather(self) -> None:
        """Wait until the parameters hold the gathered values."""
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.wait()

    @property
    def is_gathering(self) -> bool:
        """Whether parameters are in flight."""
        return self._gathering is not None

    def zero(self) -> None:
        """Zero the gradients and begin a new step."""
        self.wait_reduce()
        self._launched = False
        kept = [slot for slot in self.slots if not slot.is_summed]
        if len(kept) == len(self.slots):
            self.gradients.zero_()
        elif kept:
            torch._foreach_zero_([slot.view for slot in kept])
        for slot in self.slots:
            slot.empty() if slot.is_summed else slot.show()

    def hide(self) -> None:
        """Take the gradients off the parameters until ``show``."""
        for slot in self.slots:
            slot.hide(collect=not self._launched)

    def show(self) -> None:
        """Undo ``hide``."""
        for slot in self.slots:
            slot.show()

    def release(self) -> None:
        """Detach the parameters from the gradient buffer; their values stay where they are."""
        self.wait_reduce()
        self.wait_gather()
        for slot in self.slots:
            slot.release()


@dataclass
class _Reduction:
    """A collective in flight and what it works on: ``parts`` is ``[ranks, numel / ranks]``, to be summed."""

    work: Work
    sent: Tensor | None = None
    parts: Tensor | None = None


def build_buckets(
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    mesh: Mesh,
    bucket_numel: int,
    stages: Mapping[int, Sequence[nn.Parameter]],
    reduce_dtype: torch.dtype | None = None,
    whole: bool = False,
    narrow: Container[nn.Parameter] = (),
) -> list[Bucket]:
    """Lay parameters out: dense ones sharded over ``mesh.dp_cp``, experts over ``mesh["edp"]``.

    Args:
        named: the trainable parameters in the order of the model's definition.
        mesh: the running layout.
        bucket_numel: elements after which a bucket is closed.
        stages: the parameters of each pipeline stage on this rank.
        reduce_dtype: what gradients of fp32 buffers travel in.
        whole: keep each parameter inside one rank's shard.
        narrow: parameters that the model is to hold in 8 bits.

    Raises:
        ValueError: a parameter that is not floating point.
    """
    stages_of = _stages_of(stages)
    slots = [_slot(name, param, stages_of.get(param, ()), narrow=param in narrow) for name, param in named]
    buckets = []
    for axis, expert in ((mesh.dp_cp, False), (mesh["edp"], True)):
        mine = [slot for slot in slots if slot.expert is expert]
        for plan in plan_buckets(mine, bucket_numel=bucket_numel, num_shards=axis.size, whole=whole):
            reduced = reduce_dtype if plan.dtype_key != str(torch.float64) else None
            buckets.append(Bucket(plan, dict(named), axis=axis, reduce_dtype=reduced))
    # In the order in which a backward fills them: experts among the dense ones around them.
    order = {name: index for index, (name, _) in enumerate(named)}
    return sorted(buckets, key=lambda bucket: -order[bucket.plan.placements[-1].name])


def _slot(name: str, param: nn.Parameter, stages: tuple[int, ...], *, narrow: bool) -> ParamSlot:
    if param.dtype not in (*SIXTEEN_BIT, torch.float32, torch.float64):
        raise ValueError(
            f"parameter {name!r} has dtype {param.dtype}; the distributed optimizer trains bfloat16, float16, float32 and "
            f"float64. Convert it, or set requires_grad=False."
        )
    sharding = sharding_of(param)
    return ParamSlot(name, param.numel(), NARROW if narrow else str(param.dtype), sharding.expert, sharding.tied, stages)


def _stages_of(stages: Mapping[int, Sequence[nn.Parameter]]) -> dict[nn.Parameter, tuple[int, ...]]:
    found: dict[nn.Parameter, tuple[int, ...]] = {}
    for stage in sorted(stages):
        for param in stages[stage]:
            found[param] = (*found.get(param, ()), stage)
    return found
