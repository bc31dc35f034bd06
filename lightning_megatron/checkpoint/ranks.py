"""Steps that all ranks of a checkpoint take together: an error on one of them ends the step on all, with its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks that read or write one checkpoint.

    Args:
        group: their process group, which must be able to move objects of the CPU; ``None`` is the default group.
    """

    group: dist.ProcessGroup | None = None

    @property
    def distributed(self) -> bool:
        """Whether there is a process group at all."""
        return dist.is_initialized()

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return dist.get_rank(self.group) if self.distributed else 0

    @property
    def is_first(self) -> bool:
        """Whether this rank coordinates."""
        return not self.distributed or dist.get_rank(self.group) == 0

    def together(self, step: Callable[[], T]) -> T:
        """Run ``step`` on every rank and return this rank's result, if no rank failed.

        Raises:
            ValueError, FileNotFoundError: on every rank, if a rank raised it.
            RuntimeError: on every rank, for other errors; it names the rank.
        """
        result, error = _tried(step)
        found = [_Failure.of(error)]
        if self.distributed:
            found = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(found, _Failure.of(error), group=self.group)
        if isinstance(error, _SAME_EVERYWHERE):
            raise error
        for rank, failure in enumerate(found):
            if failure is not None:
                raise failure.raised(rank) from error
        return result  # type: ignore[return-value]

    def on_first(self, step: Callable[[], T]) -> T:
        """Run ``step`` on the first rank and return its (picklable) result on every rank.

        Raises:
            ValueError, FileNotFoundError: on every rank, if the first one raised it.
            RuntimeError: on every rank, for other errors.
        """
        result, error = _tried(step) if self.is_first else (None, None)
        failure = _Failure.of(error)
        if self.distributed:
            shared: list[Any] = [(result, failure)]
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(shared, src=source, group=self.group)
            result, failure = shared[0]
        if isinstance(error, _SAME_EVERYWHERE):
            raise error
        if failure is not None:
            raise failure.raised(0) from error
        return result  # type: ignore[return-value]

    def gather_to_first(self, value: T) -> list[T]:
        """Every rank's ``value`` on the first rank, in rank order; an empty list elsewhere."""
        if not self.distributed:
            return [value]
        values: list[Any] | None = [None] * dist.get_world_size(self.group) if self.is_first else None
        target = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.gather_object(value, values, dst=target, group=self.group)
        return values or []

    def scatter_from_first(self, values: list[T]) -> T:
        """Entry ``i`` of the first rank's list on rank ``i``."""
        if not self.distributed:
            return values[0]
        box: list[Any] = [None]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.scatter_object_list(box, values if self.is_first else None, src=source, group=self.group)
        return box[0]  # type: ignore[no-any-return]


def _tried(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


_SAME_EVERYWHERE = (ValueError, FileNotFoundError)


@dataclass(frozen=True)
class _Failure:
    """An error on its way to other ranks."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception | None) -> _Failure | None:
        return None if error is None else cls(type(error).__name__, str(error))

    def raised(self, rank: int) -> Exception:
        """What the ranks raise for it."""
        for same in _SAME_EVERYWHERE:
            if self.kind == same.__name__:
                return same(self.text)
        return RuntimeError(f"rank {rank}: {self.kind}: {self.text}")


def readable(error: CheckpointException) -> Exception:
    """What went wrong, once, in place of an error whose text holds every rank's traceback."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, ValueError):
            return ValueError(str(failure))
    lines = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items()]
    return RuntimeError("the checkpoint could not be read or written.\n  " + "\n  ".join(lines[:8]))
