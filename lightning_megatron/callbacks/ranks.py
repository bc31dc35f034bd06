"""What callbacks need to know of the ranks, under this project's strategy and under Lightning's own."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_megatron.comm import all_gather
from lightning_megatron.mesh import Mesh


def mesh_of(trainer: Trainer) -> Mesh | None:
    """The running mesh of a ``MegatronStrategy``; ``None`` under another strategy."""
    mesh = getattr(trainer.strategy, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def counts_samples(trainer: Trainer) -> bool:
    """Whether this rank is the one of its replica whose batch counts: all others of the replica read the same."""
    mesh = mesh_of(trainer)
    return mesh is None or (mesh.tp.is_first and mesh.cp.is_first and mesh.pp.is_first)


def gathered(trainer: Trainer, numbers: list[float]) -> Tensor:
    """The numbers of all ranks, fp64 ``[ranks, n]`` on the host. All ranks call it; the device is not waited for."""
    mine = torch.tensor([numbers], dtype=torch.float64)
    if trainer.world_size == 1:
        return mine
    mesh = mesh_of(trainer)
    if mesh is not None:
        return all_gather(mine, mesh.world, dim=0)
    return trainer.strategy.all_gather(mine[0].to(trainer.strategy.root_device)).cpu().view(-1, len(numbers))


def log(module: LightningModule, values: dict[str, float], *, shown: tuple[str, ...] = ()) -> None:
    """Log values that are the same on every rank, for this step; the ``shown`` ones in the progress bar."""
    for name, value in values.items():
        # Filled on the device: a copy of a number from the host would make the host wait for all that is queued.
        number = torch.full((), value, device=module.device)
        module.log(name, number, on_step=True, on_epoch=False, prog_bar=name in shown, batch_size=1)
