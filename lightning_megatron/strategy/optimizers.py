"""From the user's ``configure_optimizers`` to distributed optimizers, on every stage and in manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.distributed import DistributedOptimizer
from lightning_megatron.pipeline.model import PipelineModel, StagePart, layer_at
from lightning_megatron.pipeline.stage import OtherStage

_EMPTY = "empty parameter list"
_PLACEHOLDER = "_nothing_to_train"


def check_backward(module: LightningModule) -> None:
    """Refuse a ``backward`` of the module's own that nobody would call: the schedule runs the backwards.

    Raises:
        ValueError: it has one, under automatic optimization.
    """
    if module.automatic_optimization and is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} overrides backward, which MegatronStrategy does not call: its schedule runs the backward "
            f"of each micro-batch inside of training_step. Change the loss in training_step and gradients in "
            f"on_after_backward, or set self.automatic_optimization = False."
        )


def configure_on_every_stage(configure: Callable[[], None], module: LightningModule, mesh: Mesh) -> nn.Parameter | None:
    """Call the user's ``configure_optimizers`` where this rank's stages may hold none of what it trains.

    torch makes no optimizer without parameters. On a stage that holds none, frozen layers say, the user's method then sees
    one parameter without elements, which ``drop`` takes out again.

    Args:
        configure: calls the method and keeps its optimizers.
        module: the user's module.
        mesh: for the device.
    """
    if mesh.pp.size == 1:
        configure()
        return None
    try:
        configure()
    except ValueError as error:
        if _EMPTY not in str(error):
            raise
    else:
        return None
    placeholder = nn.Parameter(torch.empty(0, device=mesh.device))
    holders: list[nn.Module] = [module, *(child for child in module.modules() if isinstance(child, OtherStage))]
    for holder in holders:
        holder.register_parameter(_PLACEHOLDER, placeholder)
    try:
        configure()
    finally:
        for holder in holders:
            del holder._parameters[_PLACEHOLDER]
    return placeholder


def drop(placeholder: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> None:
    """Take the placeholder of ``configure_on_every_stage`` out of the optimizers; a group may end up empty."""
    if placeholder is None:
        return
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [param for param in group["params"] if param is not placeholder]


def stage_parameters(
    module: nn.Module, parts: Mapping[int, StagePart], model: PipelineModel | None
) -> dict[int, list[nn.Parameter]]:
    """The parameters of each stage on this rank; what lies outside of layers belongs to every first or last stage here.

    Args:
        module: the user's module.
        parts: this rank's stages.
        model: its pipelined model; ``None`` where there is one stage.
    """
    if model is None or len(parts) == 1:
        return {stage: list(module.parameters()) for stage in parts}
    stages = {stage: [p for i in part.layers for p in layer_at(model, i).parameters()] for stage, part in parts.items()}
    in_layers = {param for params in stages.values() for param in params}
    rest = [param for param in module.parameters() if param not in in_layers]
    ends = [stage for stage, part in parts.items() if part.is_first or part.is_last] or list(parts)
    for stage in ends:
        stages[stage] += rest
    return stages


class ManualOptimization:
    """Makes ``optimizer.zero_grad`` and ``toggle_optimizer`` mean the model's parameters, not the optimizer's shards.

    Args:
        module: the user's module, which optimizes by hand.
        optimizers: its optimizers.
        wrappers: Lightning's wrapper of each, which ``self.optimizers()`` returns.
        mesh: the running layout.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[DistributedOptimizer],
        *,
        wrappers: Sequence[LightningOptimizer],
        mesh: Mesh,
    ) -> None:
        self._module, self._optimizers, self._mesh = module, optimizers, mesh
        self._finished: set[DistributedOptimizer] = set()
        for distributed, wrapper in zip(optimizers, wrappers, strict=True):
            zero_grad = partial(self._zero_grad, distributed)
            for instance in (distributed.optimizer, wrapper):  # the wrapper does not ask what it wraps
                instance.__dict__["zero_grad"] = zero_grad

    @contextmanager
    def toggled(self) -> Iterator[None]:
        """Inside the ``with`` block parameters get no gradient whose optimizer Lightning's ``toggle_optimizer`` left out.

        Nor may one arrive at an optimizer whose gradients are final: they have been reduced and clipped.

        Raises:
            RuntimeError: one has.
        """
        off = [param for distributed in self._toggled_off() for param in distributed.parameters if param.requires_grad]
        for param in off:
            param.requires_grad_(False)
        final = [param for distributed in self._finished for param in distributed.parameters if param.requires_grad]
        hooks = [param.register_post_accumulate_grad_hook(self._refuse) for param in final]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for param in off:
                param.requires_grad_(True)

    def _refuse(self, param: Tensor) -> None:
        raise RuntimeError(
            f"{self._mesh.coordinate} manual_backward reached a parameter of shape {tuple(param.shape)} whose optimizer's "
            f"gradients are final: clip_gradients has reduced and clipped them, and nothing can be added any more. Call "
            f"clip_gradients after the last manual_backward of a step, then optimizer.step() or optimizer.zero_grad()."
        )

    def _toggled_off(self) -> list[DistributedOptimizer]:
        if not self._module.__dict__.get("_param_requires_grad_state"):
            return []
        shards = {distributed: [shard.main for shard in distributed.shards] for distributed in self._optimizers}
        on = [d for d, mains in shards.items() if any(main.requires_grad for main in mains)]
        # A rank may hold no shard of an optimizer: it is the one that is on if no other is.
        on = on or [d for d, mains in shards.items() if not mains]
        return [distributed for distributed in self._optimizers if distributed not in on]

    def finish(self, distributed: DistributedOptimizer, *, loss_scale: float | None) -> None:
        """Reduce the gradients of one optimizer, as a mean over the replicas, before its step; once until they are cleared."""
        if distributed in self._finished:
            return
        self._finished.add(distributed)
        distributed.reduce_gradients()
        counts = float(self._mesh.tp.is_first)  # each replica once
        distributed.finish_gradients(num_tokens=torch.full((), counts, device=self._mesh.device), loss_scale=loss_scale)

    def cleared(self, distributed: DistributedOptimizer) -> None:
        """Say that the gradients of one optimizer have been cleared: by its step, or by ``zero_grad``."""
        self._finished.discard(distributed)

    def _zero_grad(self, distributed: DistributedOptimizer, set_to_none: bool = True) -> None:
        distributed.zero_gradients()
        self.cleared(distributed)
