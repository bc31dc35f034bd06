"""Data loaders: which samples a replica reads, in which order, and how its workers are seeded.

Note [One order on all ranks]
Ranks that share a batch must draw the same order, and replicas must draw disjoint parts of one order. A loader that
shuffles gets a sampler seeded by (seed, epoch), the same for every number of replicas. A sampler of the user's own runs
as it is where there is one replica: the strategy has given the ranks of a replica the same generator states. With several
replicas each iterates it whole, under generators seeded by (seed, epoch), and keeps its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from typing_extensions import override

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.rng import generator_states, seeded_user_rng, set_generator_states


class _ShareOfSampler(DistributedSamplerWrapper):
    """This replica's share of a sampler of the user's; see Note [One order on all ranks]."""

    def __init__(self, sampler: Iterable[Any], *, seed: int, **kwargs: Any) -> None:
        super().__init__(sampler, shuffle=False, **kwargs)
        self._seed = seed

    @override
    def __iter__(self) -> Iterator[Any]:
        with seeded_user_rng(torch.device("cpu"), self._seed, "sampler", self.epoch):
            indices = list(super().__iter__())
        return iter(indices)


def shard_over_replicas(loader: DataLoader[Any], trainer: Trainer, *, mesh: Mesh, seed: int) -> DataLoader[Any]:
    """Give each replica its share of the samples; the ranks of one replica read the same.

    The order is shuffled where the user's loader shuffled, see Note [One order on all ranks]. A loader with a
    ``DistributedSampler`` of the user's, or over an ``IterableDataset``, is left as it is.
    """
    if has_iterable_dataset(loader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    plain = type(loader.batch_sampler) in (BatchSampler, type(None)) and _takes_each_once(loader.sampler)
    shuffled = _is_dataloader_shuffled(loader)
    if mesh.dp.size == 1 and not (plain and shuffled):
        return loader
    size, rank, seed = mesh.dp.size, mesh.dp.rank, seed & 0x7FFFFFFF
    sampler: DistributedSampler[Any]
    if plain:
        sampler = DistributedSampler(loader.dataset, num_replicas=size, rank=rank, shuffle=shuffled, seed=seed)
    else:
        sampler = _ShareOfSampler(loader.sampler, num_replicas=size, rank=rank, seed=seed)
    return _update_dataloader(loader, sampler, mode=trainer.state.stage)


def _takes_each_once(sampler: Any) -> bool:
    """Whether it is torch's own for ``shuffle=True`` or ``False``: every sample once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def seed_workers_by_replica(loader: DataLoader[Any], mesh: Mesh) -> None:
    """Seed worker processes by the data-parallel rank: peers of one replica must draw the same augmentations."""
    if loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=mesh.dp.rank)


def share_generator_states(mesh: Mesh) -> None:
    """Give the ranks of a replica the same default generators, so that what user code draws outside of steps agrees.

    All ranks call it. After ``seed_everything`` they agree anyway.
    """
    axis = mesh["replica"]
    if axis.size > 1:
        set_generator_states(mesh.device, all_gather_object(generator_states(mesh.device), axis)[0])
