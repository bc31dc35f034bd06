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
            RuntimeError: another rank failed; a rank that failed itself raises its own error.
        """
        result, error = _tried(step)
        texts: list[str | None] = [None]
        if self.distributed:
            texts *= dist.get_world_size(self.group)
            dist.all_gather_object(texts, _text(error), group=self.group)
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RuntimeError(f"rank {rank} failed: {text}")
        return result  # type: ignore[return-value]

    def on_first(self, step: Callable[[], T]) -> T:
        """Run ``step`` on the first rank and return its (picklable) result on every rank.

        Raises:
            RuntimeError: the first rank failed, which itself raises its own error.
        """
        result, error = _tried(step) if self.is_first else (None, None)
        if self.distributed:
            shared = [(result, _text(error))]
            source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
            dist.broadcast_object_list(shared, src=source, group=self.group)
            result, text = shared[0]
            if error is None and text is not None:
                raise RuntimeError(f"rank 0 failed: {text}")
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def gather_to_first(self, value: T) -> list[T]:
        """Every rank's ``value`` on the first rank, in rank order; an empty list elsewhere."""
        if not self.distributed:
            return [value]
        values: list[Any] | None = [None] * dist.get_world_size(self.group) if self.is_first else None
        target = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.gather_object(value, values, dst=target, group=self.group)
        return values or []


def _tried(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return step(), None
    except Exception as error:
        return None, error


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def readable(error: CheckpointException) -> Exception:
    """What went wrong, once, in place of an error whose text holds every rank's traceback."""
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    for failure in failures.values():
        if isinstance(failure, ValueError):
            return ValueError(str(failure))
    lines = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items()]
    return RuntimeError("the checkpoint could not be read or written.\n  " + "\n  ".join(lines[:8]))
