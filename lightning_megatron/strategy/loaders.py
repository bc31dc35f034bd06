"""Data loaders: which samples a replica reads, and how its workers are seeded."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader, has_iterable_dataset
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_megatron.mesh import Mesh


def shard_over_replicas(loader: DataLoader[Any], trainer: Trainer, *, mesh: Mesh, seed: int) -> DataLoader[Any]:
    """Give each replica its share of the samples; the ranks of one replica read the same.

    The order is shuffled where the user's loader shuffled, seeded by ``seed`` and the epoch. A loader with a
    ``DistributedSampler`` of the user's, or over an ``IterableDataset``, is left as it is.
    """
    if has_iterable_dataset(loader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    shuffled = _is_dataloader_shuffled(loader) and not trainer.overfit_batches
    kwargs = {"num_replicas": mesh.dp.size, "rank": mesh.dp.rank, "shuffle": shuffled, "seed": seed & 0x7FFFFFFF}
    sampler: DistributedSampler[Any]
    if isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        sampler = DistributedSampler(loader.dataset, **kwargs)
    else:
        sampler = DistributedSamplerWrapper(loader.sampler, **kwargs)
    return _update_dataloader(loader, sampler, mode=trainer.state.stage)


def seed_workers_by_replica(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Seed worker processes by the data-parallel rank: peers of one replica must draw the same augmentations."""
    if loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=mesh.dp.rank)
