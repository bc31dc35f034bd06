"""Data loaders: which samples a replica reads, in which order, from which position on, and how its workers are seeded.

Note [One order on all ranks]
Ranks that share a batch must draw the same order, and replicas must draw disjoint parts of one order, the same for every
number of replicas. A sampler of the user's own is iterated whole on each rank, under generators seeded by (seed, epoch), and
each replica keeps its share; where that cannot be (a sampler without a length), it runs as it is where there is one replica.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_megatron.comm import all_gather_object
from lightning_megatron.data.order import ReplicaSampler
from lightning_megatron.data.resumable import Progress, Replica, resumable
from lightning_megatron.mesh import Mesh
from lightning_megatron.rng import generator_states, set_generator_states


def shard_over_replicas(loader: DataLoader[Any], trainer: Trainer, *, mesh: Mesh, seed: int) -> DataLoader[Any]:
    """Give each replica its share of the samples; the ranks of one replica read the same.

    The order is shuffled where the user's loader shuffled, see Note [One order on all ranks]. A loader with a
    ``DistributedSampler`` of the user's, or over an ``IterableDataset``, is left as it is.
    """
    own = _sampler_of(loader)
    if has_iterable_dataset(loader) or isinstance(own, DistributedSampler):
        return loader
    plain_batches = type(loader.batch_sampler) in (BatchSampler, type(None))
    plain = plain_batches and _takes_each_once(own, loader.dataset)
    if mesh.dp.size == 1 and not (plain_batches and trainer.training and _has_length(own)):
        return loader
    sampler = ReplicaSampler(
        loader.dataset if plain else own,  # type: ignore[arg-type]
        num_replicas=mesh.dp.size,
        rank=mesh.dp.rank,
        shuffle=plain and type(own) is RandomSampler,
        seed=seed & 0x7FFFFFFF,
        inner=None if plain else own,
    )
    if plain_batches and _has_given_batches(loader):
        return _in_batches_of(loader, sampler)
    return _update_dataloader(loader, sampler, mode=trainer.state.stage)


def _has_given_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user gave ``batch_sampler=``: ``loader.sampler`` is then one of torch's that nobody reads."""
    return loader.batch_sampler is not None and loader.batch_size is None


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives the order of the samples."""
    if not _has_given_batches(loader):
        return loader.sampler
    inner: Any = getattr(loader.batch_sampler, "sampler", None)
    known = type(loader.batch_sampler) is BatchSampler or (isinstance(inner, Iterable) and _has_length(inner))
    return inner if known else loader.sampler


def _in_batches_of(loader: DataLoader[Any], sampler: ReplicaSampler) -> DataLoader[Any]:
    """A copy of a loader with a ``BatchSampler``, which reads batches of the same size in another order.

    Lightning would make it anew with ``sampler=``, and so without the size of its batches.
    """
    batches: Any = loader.batch_sampler
    copied = copy.copy(loader)
    # A DataLoader refuses assignment; workers that are there already belong to the original.
    copied.__dict__.update(batch_sampler=BatchSampler(sampler, batches.batch_size, batches.drop_last), _iterator=None)
    return copied


def _takes_each_once(sampler: Any, dataset: Any) -> bool:
    """Whether it is torch's own for ``shuffle=True`` or ``False``: every sample once."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.data_source is dataset and sampler.num_samples == len(dataset)
    return type(sampler) is SequentialSampler and sampler.data_source is dataset


def _has_length(sampler: Any) -> bool:
    try:
        return len(sampler) != float("inf")
    except (TypeError, NotImplementedError):
        return False


def with_position(loader: Any, trainer: Trainer, *, mesh: Mesh, seed: int) -> Any:
    """A training loader that a resumed run reads on from where the saved one had come.

    Map-style loaders are counted (``data/resumable.py``). Loaders with a ``state_dict`` of their own keep it. Others begin
    anew, with a warning that names them if a run is resumed in the middle of an epoch.
    """
    if isinstance(loader, _Stateful):
        return loader if _has_length(loader) else StateBeforePrefetch(loader, trainer)
    if isinstance(loader, DataLoader) and not has_iterable_dataset(loader):
        replica = Replica(seed, mesh.dp.rank, mesh.dp.size)
        return resumable(loader, replica=replica, progress=partial(progress_of, trainer), moved=partial(_moved, trainer))
    if trainer.fit_loop.restarting and (done := progress_of(trainer).batches):
        what = type(getattr(loader, "dataset", loader)).__name__
        warnings.warn(
            f"{mesh.coordinate} the run is resumed after {done} batches of its epoch, but the position of {what} cannot be "
            f"restored: it is read from its beginning, so samples are seen twice and others not at all. Give its loader "
            f"state_dict and load_state_dict (torchdata's StatefulDataLoader has them), or use a map-style dataset.",
            stacklevel=2,
        )
    return loader


def progress_of(trainer: Trainer) -> Progress:
    """How far training has come, as it will be restored: see Note [Where a run stands] in ``strategy/resume.py``."""
    loop = trainer.fit_loop
    epochs: Any = loop.epoch_progress.current
    batches: Any = loop.epoch_loop.batch_progress.current
    combined = loop._combined_loader
    cycles = combined is not None and combined._mode == "max_size_cycle" and len(combined.flattened) > 1
    epoch, done = epochs.processed, batches.processed
    if epochs.ready == epochs.processed:
        stopped_within = batches.ready > 0 and not loop.epoch_loop._num_ready_batches_reached()
        return Progress(epoch - 1, done, cycles) if stopped_within else Progress(epoch, 0, cycles)
    if batches.ready > batches.processed:  # this batch was not finished, and gradients since the last step are lost with it
        done -= done % trainer.accumulate_grad_batches
    return Progress(epoch, done, cycles)


def is_counted(loader: Any) -> bool:
    """Whether a loader with a ``state_dict`` is one of ours, whose state is the same for all replicas."""
    return hasattr(loader, "_lm_base")


def name_of(loader: Any) -> str:
    """How messages call a loader."""
    return f"{type(loader).__name__} over {type(getattr(loader, 'dataset', None)).__name__}"


def _moved(trainer: Trainer, batches: int) -> None:
    """Let the loop count on from another batch of the epoch: batches have another size than when it was saved."""
    combined = trainer.fit_loop._combined_loader
    if combined is not None and len(combined.flattened) > 1:
        return  # each of them may have come to another number
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = batches - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


class StateBeforePrefetch:
    """A stateful loader without a length, of which Lightning reads one batch ahead: keeps the state of the batch in training.

    Args:
        loader: has ``state_dict`` and ``load_state_dict``.
        trainer: whose progress says which batch that is.
    """

    def __init__(self, loader: Any, trainer: Trainer) -> None:
        self.loader, self._trainer = loader, trainer
        self._states: deque[tuple[int, Any]] = deque(maxlen=4)
        self._first = 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: the object is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The loader's, after as many batches as have been trained on."""
        batches = progress_of(self._trainer).batches
        kept = [state for number, state in self._states if number == batches]
        state: dict[str, Any] = kept[0] if kept else self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loader's. The next iteration begins there."""
        self._first = progress_of(self._trainer).batches
        self.loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        self._states.clear()
        first, self._first = self._first, 0
        for number, batch in enumerate(self.loader, first + 1):
            self._states.append((number, self.loader.state_dict()))
            yield batch


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
