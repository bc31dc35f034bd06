"""One optimizer between the backward and its step, as the precision plugin and the user's own code handle it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Protocol

from torch.optim import Optimizer

from lightning_megatron.optim.distributed import DistributedOptimizer


class WholeStep(Protocol):
    """A step that reaches the model's parameters."""

    def __call__(self, distributed: DistributedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run the closure and step; returns what the closure does."""


class HandledOptimizer:
    """A distributed optimizer whose gradients are made final before anything is done to them.

    The ``step`` of the torch optimizer itself, which knows this rank's shards alone, becomes a step of the model's parameters.

    Args:
        distributed: the optimizer.
        finish: makes its gradients final, if they are not yet: manual optimization has no other point at which they become so.
        whole_step: what ``step`` of the torch optimizer does when the user calls it.
    """

    def __init__(
        self, distributed: DistributedOptimizer, finish: Callable[[DistributedOptimizer], None], *, whole_step: WholeStep
    ) -> None:
        self._distributed, self._finish, self._whole_step = distributed, finish, whole_step
        self._is_stepping = False
        self._install(distributed.optimizer.step)

    def _install(self, on_shards: Callable[..., Any]) -> None:
        @wraps(on_shards)  # with the mark of a learning rate scheduler that counts the calls
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            if self._is_stepping:
                return on_shards(**kwargs)
            return self._whole_step(self._distributed, closure, **kwargs)

        self._distributed.optimizer.__dict__["step"] = MethodType(step, self._distributed.optimizer)

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
        self._is_stepping = True
        try:
            self._distributed.step(**kwargs)
        finally:
            self._is_stepping = False
