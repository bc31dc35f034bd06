"""Ranks that work together must see the same number of batches: one that ends its epoch early would leave the others waiting.

In training that is every rank of the job (Lightning runs a collective for each batch), in evaluation the ranks of a replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_megatron.comm import all_gather_object, all_reduce
from lightning_megatron.mesh import Axis, Mesh


def same_num_batches(loader: Any, trainer: Trainer, *, mesh: Mesh) -> Any:
    """Check that the ranks' loaders are of one length; where a loader does not know its length, check batch by batch.

    Collective over the world in training, over the replica otherwise.

    Returns:
        The loader, or for one without a length a wrapper that iterates it.

    Raises:
        ValueError: on every rank, if the lengths differ; it names them.
    """
    axis = mesh.world if trainer.training else mesh["replica"]
    if axis.size == 1:
        return loader
    assert trainer.state.stage is not None
    limit = getattr(trainer, f"limit_{trainer.state.stage.dataloader_prefix}_batches")
    lengths = all_gather_object(_num_batches(loader, limit), axis)
    if len(set(lengths)) > 1:
        raise ValueError(_unequal(mesh, axis, lengths))
    if lengths[0] is not None:
        return loader
    counted = StatefulCountedLoader if hasattr(loader, "state_dict") else CountedLoader
    return counted(loader, mesh=mesh, axis=axis)


def _num_batches(loader: Any, limit: float) -> int | None:
    """Batches that the Trainer takes from a loader; ``None`` if it has no length."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    return min(length, limit) if isinstance(limit, int) else int(length * limit)


def _unequal(mesh: Mesh, axis: Axis, lengths: list[int | None]) -> str:
    first, other = 0, next(i for i, length in enumerate(lengths) if length != lengths[0])
    shown = ["no length" if lengths[i] is None else f"{lengths[i]} batches" for i in (first, other)]
    return (
        f"{mesh.coordinate} the data loader has {shown[0]} on rank {axis.ranks[first]} and {shown[1]} on rank "
        f"{axis.ranks[other]}; all {axis.size} ranks that work together must see the same number, or the others wait for ever. "
        f"Give each replica the same number of samples and the same batch_size (split by strategy.dp_rank and dp_size, not by "
        f"the global rank), or set limit_train_batches to the smallest."
    )


class CountedLoader:
    """A loader without a length, whose ranks agree for each batch that all of them have one.

    Args:
        loader: what is iterated; other attributes are read from it as well.
        mesh: for messages and the device.
        axis: the ranks that must see the same number of batches.
    """

    def __init__(self, loader: Any, *, mesh: Mesh, axis: Axis) -> None:
        self.loader, self._mesh, self._axis = loader, mesh, axis

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: the object is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        """Of a ``DataLoader``, with its worker processes: Lightning resets it between runs."""
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self.loader._iterator = value

    def __iter__(self) -> Iterator[Any]:
        """The batches of the loader.

        Raises:
            ValueError: on every rank, when some have a further batch and others do not.
        """
        end = object()
        iterator, count = iter(self.loader), 0
        while (num_ranks := self._ranks_with_a_batch(batch := next(iterator, end), end)) == self._axis.size:
            yield batch
            count += 1
        if num_ranks:
            raise ValueError(
                f"{self._mesh.coordinate} the data loader ended after {count} batches on {self._axis.size - num_ranks} of "
                f"{self._axis.size} ranks and goes on on the rest; all must see the same number of batches. Split the data by "
                f"strategy.dp_rank and dp_size into equal parts, or set limit_train_batches={max(count, 1)}."
            )

    def _ranks_with_a_batch(self, batch: Any, end: object) -> int:
        # The world also has a communicator for host memory, which spares a wait for the GPU.
        device = torch.device("cpu") if self._axis is self._mesh.world else self._mesh.device
        return int(all_reduce(torch.tensor(int(batch is not end), device=device), self._axis))


class StatefulCountedLoader(CountedLoader):
    """One whose loader can be asked for its position (Lightning looks for the methods on the class)."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The loader's."""
        self.loader.load_state_dict(state)
