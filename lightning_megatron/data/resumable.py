"""A ``DataLoader`` whose epoch can begin anywhere, so that a resumed run reads on where the other one stopped.

Note [What a batch may depend on]
The samples of a batch depend on (seed, epoch) and the position, see ``data/order.py``. What user code draws while it makes a
batch (augmentations in the dataset, masks in ``collate_fn``) is seeded by (seed, epoch, number of the batch, replica), in the
main process as in workers. So nothing of a loader has to be stored but its position, nothing that was read before has to be
read again, and the number of workers does not matter.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from typing_extensions import override

from lightning_megatron.data.order import GeneratorMark, ReplicaSampler
from lightning_megatron.rng import derive_seed, generator_states, seed_default_generators, seeded_user_rng, set_generator_states

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Progress:
    """How far the training loop has come, as it will be restored.

    Args:
        epoch: epochs that are done.
        batches: batches of the running epoch that are done.
        cycles: the loader begins anew when it ends before the epoch does (it is combined with a longer one).
    """

    epoch: int
    batches: int
    cycles: bool = False


@dataclass(frozen=True)
class Replica:
    """For whom a loader reads.

    Args:
        seed: of the job.
        rank: data-parallel rank.
        num_replicas: data-parallel size.
    """

    seed: int
    rank: int
    num_replicas: int


@dataclass(frozen=True)
class _Base:
    """Where iteration in an epoch began: batches as the loop counts them, and global samples."""

    epoch: int = 0
    batches: int = 0
    samples: int = 0


def resumable(
    loader: DataLoader[Any],
    *,
    replica: Replica,
    progress: Callable[[], Progress],
    moved: Callable[[int], None] = lambda batches: None,
) -> DataLoader[Any]:
    """A copy of a map-style loader that can be asked for its position and be put there (``state_dict``, ``load_state_dict``).

    With a ``ReplicaSampler`` and torch's own batching the position is in global samples, and any number of replicas can go on
    from it. Otherwise it is a number of batches, for as many replicas as before.

    Args:
        loader: its class is kept as a base class of the result's.
        replica: for whom it reads.
        progress: asked when the state is taken and when an epoch begins.
        moved: called on resuming with the batches of the epoch that count as done, if batches have another size than before.
    """
    copied = copy.copy(loader)
    copied.__class__ = type(f"Resumable{type(loader).__name__}", (_Resumable, type(loader)), {})
    assert isinstance(copied, _Resumable)
    copied._begin(replica, progress, moved)
    return copied


class _Resumable(DataLoader[Any]):
    """See ``resumable``. Attributes of ours have long names, as this becomes a subclass of the user's class."""

    _lm_replica: Replica
    _lm_progress: Callable[[], Progress]
    _lm_moved: Callable[[int], None]
    _lm_base: _Base
    _lm_batches: _Batches

    def _begin(self, replica: Replica, progress: Callable[[], Progress], moved: Callable[[int], None]) -> None:
        self._lm_replica, self._lm_progress, self._lm_moved = replica, progress, moved
        self._lm_base = _Base()
        self._lm_batches = _Batches(
            super()._index_sampler, seed=replica.seed, isolated=self._lm_sampler is None, numbered=self.num_workers > 0
        )
        self._iterator = None  # of persistent workers of the original

    @property
    @override
    def _index_sampler(self) -> Any:
        return self._lm_batches

    @property
    def _lm_sampler(self) -> ReplicaSampler | None:
        """The sampler whose positions are known, if the batches are torch's own."""
        inner: Any = super()._index_sampler
        sampler = inner.sampler if type(inner) is BatchSampler else inner
        return sampler if isinstance(sampler, ReplicaSampler) else None

    @property
    def _lm_batch_size(self) -> int:
        return int(getattr(super()._index_sampler, "batch_size", 1))

    @property
    def _lm_global_batch(self) -> int:
        """Samples of a full batch of all replicas."""
        return self._lm_batch_size * self._lm_replica.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The position, and what tells whether it can be used elsewhere."""
        progress = self._lm_progress()
        batches, base = progress.batches, self._lm_base
        if batches and progress.cycles:
            batches %= len(self)
        state: dict[str, Any] = {
            "epoch": progress.epoch,
            "batches": batches,
            "num_replicas": self._lm_replica.num_replicas,
        }
        if (generator := self._lm_mark.state(progress.epoch)) is not None:
            state["generator"] = generator
        if (sampler := self._lm_sampler) is not None:
            if base.epoch != progress.epoch or batches < base.batches:
                base = _Base(progress.epoch)
            read = base.samples + (batches - base.batches) * self._lm_global_batch
            state["samples"], state["global_batch"] = min(read, len(sampler) * sampler.num_replicas), self._lm_global_batch
        return state

    @property
    def _lm_mark(self) -> GeneratorMark:
        sampler = self._lm_sampler
        return self._lm_batches.mark if sampler is None else sampler.mark

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the epoch of ``state`` at its position. Other epochs begin at their beginning."""
        sampler, batches = self._lm_sampler, int(state["batches"])
        samples = int(state.get("samples", 0))
        self._lm_mark.restore(state.get("generator"))
        if sampler is not None and "samples" in state:
            if batches and state["global_batch"] != self._lm_global_batch:
                batches = self._batches_before(samples)
                self._lm_moved(batches)
        elif batches and (sampler is not None or state["num_replicas"] != self._lm_replica.num_replicas):
            warnings.warn(
                f"{self._lm_name} was read by {state['num_replicas']} data-parallel replicas through a sampler that cannot be "
                f"shared out anew; {self._lm_replica.num_replicas} replicas now go on after as many batches ({batches}) as "
                f"each had read, so some samples of this epoch are read twice or left out.",
                stacklevel=2,
            )
            samples = batches * self._lm_global_batch
        self._lm_base = _Base(int(state["epoch"]), batches, samples)

    @property
    def _lm_name(self) -> str:
        return f"The data loader over {type(self.dataset).__name__}"

    def _batches_before(self, samples: int) -> int:
        """Batches of the present size that an epoch has before a position, so that it ends where it would have ended."""
        sampler, size = self._lm_sampler, self._lm_batch_size
        assert sampler is not None
        drop_last = getattr(super()._index_sampler, "drop_last", False)
        left = -(-max(len(sampler) * sampler.num_replicas - samples, 0) // sampler.num_replicas)
        return max(len(self) - (left // size if drop_last else -(-left // size)), 0)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing is read before the first batch is asked for, when the loop knows its epoch.
        epoch = self._lm_progress().epoch
        if self._lm_base.epoch != epoch:
            self._lm_base = _Base(epoch)
        base, batches = self._lm_base, self._lm_batches
        batches.epoch, batches.first = epoch, base.batches
        if (sampler := self._lm_sampler) is not None:
            sampler.start = base.samples
        iterator, number, end = self._lm_iterator(epoch), base.batches, object()
        while True:
            with self._lm_drawing(epoch, number):
                batch = next(iterator, end)
            if batch is end:
                break
            yield batch
            number += 1
        self._lm_base = _Base(epoch)  # iterated again in the same epoch, it begins at the beginning

    def _lm_iterator(self, epoch: int) -> Iterator[Any]:
        """Of the user's class. It draws a seed for workers, from a generator that must not move, and keeps the dataset."""
        replica, own = self._lm_replica, (self.dataset, self.generator)
        if self.num_workers > 0:
            self.__dict__["dataset"] = _SeededDataset(self.dataset, replica)
        self.generator = None
        try:
            with seeded_user_rng(_CPU, replica.seed, "loader", epoch, replica.rank):
                return super().__iter__()
        finally:
            self.__dict__["dataset"], self.generator = own

    def _lm_drawing(self, epoch: int, number: int) -> AbstractContextManager[None]:
        """What is drawn for a batch in this process; in a worker ``_SeededDataset`` sees to it."""
        if self.num_workers > 0:
            return nullcontext()
        return seeded_user_rng(_CPU, *_names(self._lm_replica, epoch, number))


def _names(replica: Replica, epoch: int, number: int) -> tuple[object, ...]:
    return replica.seed, "batch", epoch, number, replica.rank


@dataclass(frozen=True)
class _Numbered:
    """What an index sampler gives, for a worker that has to know which batch it is."""

    indices: Any
    epoch: int
    number: int


class _Batches:
    """An index sampler that can begin after some batches and numbers what it gives.

    Args:
        inner: yields lists of indices, or indices.
        seed: of the job.
        isolated: its position can be known by counting alone: run it under generators of its own, seeded by (seed, epoch),
            and leave out what comes before.
        numbered: yield ``_Numbered``.

    Attributes:
        epoch: that is iterated next.
        first: number of the batch that it begins with.
        mark: of a generator of the user's.
    """

    def __init__(self, inner: Iterable[Any], *, seed: int, isolated: bool, numbered: bool) -> None:
        self._inner, self._seed, self._isolated, self._numbered = inner, seed, isolated, numbered
        self.epoch = self.first = 0
        self.mark = GeneratorMark(inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self._isolated:
            self.mark.mark(self.epoch)
            given: Iterator[Any] = islice(_isolated(self._inner, self._seed, "sampler", self.epoch), self.first, None)
        else:
            given = iter(self._inner)
        for number, indices in enumerate(given, self.first):
            yield _Numbered(indices, self.epoch, number) if self._numbered else indices


def _isolated(iterable: Iterable[Any], *names: object) -> Iterator[Any]:
    """Iterate under generators that nothing else draws from."""
    with seeded_user_rng(_CPU, *names):
        iterator, own, end = iter(iterable), generator_states(_CPU), object()
    while True:
        outside = generator_states(_CPU)
        set_generator_states(_CPU, own)
        try:
            item = next(iterator, end)
        finally:
            own = generator_states(_CPU)
            set_generator_states(_CPU, outside)
        if item is end:
            return
        yield item


class _SeededDataset(Dataset[Any]):
    """A dataset in a worker: seeds the generators for each batch. They stay so for ``collate_fn``, which comes next."""

    def __init__(self, dataset: Any, replica: Replica) -> None:
        self.dataset, self._replica = dataset, replica

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_replica"):  # not set yet: the object is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self._seed(index)]

    def __getitems__(self, indices: Any) -> list[Any]:
        indices = self._seed(indices)
        several = getattr(self.dataset, "__getitems__", None)
        return several(indices) if several else [self.dataset[index] for index in indices]

    def _seed(self, numbered: Any) -> Any:
        if not isinstance(numbered, _Numbered):
            return numbered
        seed = derive_seed(*_names(self._replica, numbered.epoch, numbered.number))
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        seed_default_generators(_CPU, seed)
        return numbered.indices
