"""``ReplicaSampler``: one order of samples for the whole job, of which every replica reads its share.

Note [Position in global samples]
An order is drawn once for all replicas, seeded by (seed, epoch), and replica ``r`` of ``n`` reads places ``r, r + n, ...`` of
it. How far a run has come is then one number, the samples that all replicas have read together, and from there on any
number of replicas can go on: they share out what is left of the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain, cycle, islice
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_megatron.rng import seeded_user_rng


class GeneratorMark:
    """Remembers where a generator of the user's stood before it drew the order of an epoch.

    Args:
        sampler: may have a ``generator``, or a ``sampler`` that has one.
    """

    def __init__(self, sampler: Any) -> None:
        inner = getattr(sampler, "sampler", None)
        self._generator: torch.Generator | None = getattr(sampler, "generator", None) or getattr(inner, "generator", None)
        self._epoch, self._state = -1, torch.empty(0)

    def mark(self, epoch: int) -> None:
        """The order of ``epoch`` is about to be drawn."""
        if self._generator is not None:
            self._epoch, self._state = epoch, self._generator.get_state()

    def state(self, epoch: int) -> Tensor | None:
        """Where it stands before the order of ``epoch``; ``None`` if there is no generator."""
        if self._generator is None:
            return None
        return self._state if self._epoch == epoch else self._generator.get_state()

    def restore(self, state: Tensor | None) -> None:
        """Go on from ``state``."""
        if self._generator is not None and state is not None:
            self._generator.set_state(state)
            self._epoch = -1


class ReplicaSampler(DistributedSampler[Any]):
    """A replica's share of an order of samples, from any position of it on; see Note [Position in global samples].

    As under torch's ``DistributedSampler``, replicas get equally many samples: the first ones are repeated to fill up.

    Args:
        source: what has as many samples as the order: the dataset, or ``inner``.
        num_replicas: data-parallel replicas.
        rank: which of them reads here.
        shuffle: draw an order; without ``inner``.
        seed: of the order, at most 31 bits.
        inner: a sampler of the user's that gives the order. It runs under generators seeded by (seed, epoch); a generator of
            its own goes on from epoch to epoch.

    Attributes:
        start: samples at the head of the order, of all replicas together, that the next iteration leaves out.
        mark: of the inner sampler's generator.
    """

    def __init__(
        self,
        source: Sized,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool,
        seed: int,
        inner: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(source, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self._source, self._inner = source, inner
        self.mark = GeneratorMark(inner)
        self.start = 0

    @override
    def __len__(self) -> int:
        """Samples of a whole epoch that this replica reads."""
        return ceil(len(self._source) / self.num_replicas)

    @override
    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        left = max(len(order) - self.start, 0)
        padding = -left % self.num_replicas
        filled = chain(islice(order, self.start, None), islice(cycle(order), padding))
        return islice(filled, self.rank, None, self.num_replicas)

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        follow = getattr(self._inner, "set_epoch", None)
        if callable(follow):
            follow(epoch)

    def _order(self) -> list[Any] | range:
        if self._inner is not None:
            self.mark.mark(self.epoch)
            with seeded_user_rng(torch.device("cpu"), self.seed, "sampler", self.epoch):
                return list(self._inner)
        if not self.shuffle:
            return range(len(self._source))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(len(self._source), generator=generator).tolist()
        return order
