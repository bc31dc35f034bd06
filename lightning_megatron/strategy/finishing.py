"""One optimizer between the backward and its step, as the precision plugin and the user's own code handle it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_megatron.optim.distributed import DistributedOptimizer


class HandledOptimizer:
    """A distributed optimizer whose gradients are made final before anything is done to them.

    Args:
        distributed: the optimizer.
        finish: makes its gradients final, if they are not yet: manual optimization has no other point at which they become so.
    """

    def __init__(self, distributed: DistributedOptimizer, finish: Callable[[DistributedOptimizer], None]) -> None:
        self._distributed, self._finish = distributed, finish

    @property
    def should_skip(self) -> bool:
        """See ``DistributedOptimizer``."""
        return self._distributed.should_skip

    def apply_scaling(self) -> None:
        """See ``DistributedOptimizer``."""
        self._finish(self._distributed)
        self._distributed.apply_scaling()

    def clip_by_norm(self, max_norm: float) -> None:
        """See ``DistributedOptimizer``."""
        self._finish(self._distributed)
        self._distributed.clip_by_norm(max_norm)

    def clip_by_value(self, value: float) -> None:
        """See ``DistributedOptimizer``."""
        self._finish(self._distributed)
        self._distributed.clip_by_value(value)

    def step(self, **kwargs: Any) -> None:
        """See ``DistributedOptimizer``."""
        self._distributed.step(**kwargs)
