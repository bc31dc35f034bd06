"""From the user's LightningModule to this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from lightning_megatron.comm import broadcast
from lightning_megatron.initialize import materialize
from lightning_megatron.layers.graphs import graph_layers
from lightning_megatron.layers.offload import ActivationOffload, offload
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import scales_of
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.executor import PipelineExecutor
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.partition import layers_of_stages
from lightning_megatron.pipeline.schedule import Placement
from lightning_megatron.pipeline.stage import cut_to_stages
from lightning_megatron.sharding import has_sharding
from lightning_megatron.strategy.options import check_layers, require_pipeline_model

_KEPT = "_lightning_megatron_prepared"


class PreparedModule:
    """A LightningModule cut to one rank: its stages, real parameters on the device, and what runs them.

    Args:
        module: the user's module, whole, after ``configure_model``. Changed in place.
        mesh: the job's axes.
        convert: casts parameters to the precision's dtype, in place.
        context: entered around each forward (autocast).
        seed: for first values of parameters.
        recomputed: which activations are computed again in the backward.
        offloads: whether what layers save waits on the host for the backward.
        graphs: whether layers run as CUDA graphs.

    Attributes:
        predict_run: number of the last run of ``predict`` in this process, under any Trainer, from 0; -1 before the first.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        *,
        convert: Callable[[nn.Module], nn.Module],
        context: Callable[[], AbstractContextManager[None]],
        seed: int,
        recomputed: Recompute | None = None,
        offloads: bool = False,
        graphs: bool = False,
    ) -> None:
        self.module, self.mesh = module, mesh
        parallelism = mesh.parallelism
        module.__dict__[_KEPT] = self  # a later Trainer goes on with the same stages
        _check_built_under(module, mesh)
        _share_first_values(module, mesh)
        self.scales = scales_of(module)  # of all layers, which all ranks go on with
        self.placement = Placement(parallelism.pp, parallelism.vpp, parallelism.placement)
        self.aliases: dict[str, str] = {}
        # While layers of all ranks are here, so that a name that fits none is found.
        self._keep_activations(recomputed, offloads, graphs)
        self._model = require_pipeline_model(module, parallelism) if parallelism.pp > 1 else None
        self.parts = self._cut(self._model, parallelism)
        convert(module)
        for child in module.children():
            materialize(child, device=mesh.device, seed=seed)
        module.to(mesh.device)
        self.executor = self._new_executor(context)
        self.predict_run = -1

    @classmethod
    def of(cls, module: LightningModule) -> PreparedModule | None:
        """What an earlier Trainer of this process has made of the module."""
        kept = module.__dict__.get(_KEPT)
        return kept if isinstance(kept, cls) and kept.module is module else None

    def fits(self, parallelism: Parallelism, *, device: torch.device) -> bool:
        """Whether a strategy of that layout can go on with this module as it is.

        Raises:
            ValueError: it cannot, and the module has been cut.
        """
        held = self.mesh.parallelism
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if held == parallelism and self.mesh.world_size == world_size and self.mesh.device == device:
            return True
        if held.tp * held.pp == 1:
            return False
        raise ValueError(
            f"{type(self.module).__name__} has been cut by an earlier Trainer for {held.describe(self.mesh.world_size)} on "
            f"{self.mesh.device}, so it cannot run under {parallelism.describe(world_size)} on {device}. Make a new module and "
            f"load the weights from a checkpoint."
        )

    def renew(
        self,
        *,
        convert: Callable[[nn.Module], nn.Module],
        context: Callable[[], AbstractContextManager[None]],
        recomputed: Recompute | None = None,
        offloads: bool = False,
        graphs: bool = False,
    ) -> None:
        """Run under another Trainer from now on, possibly in another precision."""
        convert(self.module)
        self._keep_activations(recomputed, offloads, graphs, is_whole=self._model is None)
        self.executor = self._new_executor(context)

    def _keep_activations(self, recomputed: Recompute | None, offloads: bool, graphs: bool, *, is_whole: bool = True) -> None:
        recompute(self.module, recomputed, is_whole=is_whole)
        if offloads:
            offload(self.module, ActivationOffload(self.mesh.device), is_whole=is_whole)
        if graphs:
            graph_layers(self.module, self.mesh)

    def _new_executor(self, context: Callable[[], AbstractContextManager[None]]) -> PipelineExecutor:
        executor = PipelineExecutor(self.mesh, self.placement, parts=self.parts, context=context, model=self._model)
        if self._model is not None:
            self._model._stage_runner = executor.runner
        return executor

    def __deepcopy__(self, memo: dict[int, object]) -> PreparedModule:
        return self  # a copied module is not prepared, see `of`

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # nor is a pickled one

    def _cut(self, model: PipelineModel | None, parallelism: Parallelism) -> dict[int, StagePart]:
        if model is None:
            return {0: StagePart(0, 1, ())}
        check_layers(model, parallelism)
        num_stages = parallelism.num_stages
        costs = {"first_cost": model.first_cost, "last_cost": model.last_cost}
        layers = layers_of_stages(len(model.layers), num_stages, parallelism.pipeline_layout, **costs)
        stages = self.placement.stages_of(self.mesh.pp.rank)
        parts = [StagePart(stage, num_stages, tuple(layers[stage])) for stage in stages]
        first_and_last = {self.placement.rank_of(0), self.placement.rank_of(num_stages - 1)}
        aliases = cut_to_stages(model, parts, ends_apart=len(first_and_last) > 1)
        prefix = next(name for name, child in self.module.named_modules() if child is model)
        self.aliases = {f"{prefix}.{name}": f"{prefix}.{first}" for name, first in aliases.items()}
        return {part.stage: part for part in parts}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names they have in the whole model, each once."""
        return [(self.aliases.get(name, name), param) for name, param in self.module.named_parameters()]


def _check_built_under(module: nn.Module, mesh: Mesh) -> None:
    """A model of ours that was built before the strategy set the mesh holds whole matrices, not shards."""
    for name, child in module.named_modules():
        built_with = getattr(child, "mesh", None)
        if isinstance(built_with, Mesh) and built_with is not mesh and mesh.tp.size * mesh.cp.size > 1:
            raise ValueError(
                f"self.{name} ({type(child).__name__}) was built outside of configure_model, so it is not cut over the "
                f"tp={mesh.tp.size} * cp={mesh.cp.size} ranks. Build it in LightningModule.configure_model."
            )


@torch.no_grad()
def share_buffers(module: nn.Module, mesh: Mesh) -> None:
    """Give all replicas the first one's saved buffers (running statistics), which each has gathered from its own samples."""
    if mesh.dp_cp.size == 1:
        return
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and buffer.numel():
                moved = buffer.detach().contiguous().clone()
                buffer.copy_(broadcast(moved, mesh.dp_cp, 0))


@torch.no_grad()
def _share_first_values(module: nn.Module, mesh: Mesh) -> None:
    """Give every rank global rank 0's values of what was built for real: unseeded ranks would otherwise start apart."""
    for param in module.parameters():
        if not param.is_meta and not has_sharding(param):
            _broadcast_from_zero(param.data, mesh)
    for buffer in module.buffers():
        if not buffer.is_meta and buffer.numel():
            _broadcast_from_zero(buffer, mesh)


def _broadcast_from_zero(tensor: torch.Tensor, mesh: Mesh) -> None:
    moved = tensor.detach().to(mesh.device).contiguous()
    broadcast(moved, mesh.world, source=0)
    tensor.copy_(moved)
