"""A micro-batch without a valid token must weigh nothing, also where a mean over none of them is 0/0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass
class TokenGuard:
    """Decides, once the step has returned, whether gradients enter the model from one micro-batch's output.

    The user's loss may be NaN there, and so its gradient; whether it is, only the device knows, and asking it would make
    the host wait. So the gradient of the model's output goes through a choice made on the device.

    Args:
        has_tokens: 0-dim bool; ``None`` lets every gradient through.
    """

    has_tokens: Tensor | None = None

    def guard(self, output: Any) -> Any:
        """The output, its gradient under this guard's decision. Same pytree and shapes."""
        return tree_map_only(Tensor, self._guarded, output)

    def _guarded(self, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        guarded: Tensor = _Guarded.apply(output, self)  # type: ignore[no-untyped-call]
        return guarded


class _Guarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, guard: TokenGuard) -> Tensor:
        ctx.guard = guard
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        has_tokens = ctx.guard.has_tokens
        return grad if has_tokens is None else torch.where(has_tokens, grad, torch.zeros_like(grad)), None


class GuardedModels:
    """Puts the current micro-batch's guard on the outputs of models; a model called outside of a step is left alone.

    Args:
        models: the modules whose outputs losses are made of.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._current: TokenGuard | None = None
        self._handles = [model.register_forward_hook(self._on_output) for model in models]

    @property
    def is_attached(self) -> bool:
        """Whether there is any model to guard."""
        return bool(self._handles)

    @contextmanager
    def guarding(self, guard: TokenGuard) -> Iterator[None]:
        """Calls of the models inside the block are under ``guard``."""
        self._current = guard
        try:
            yield
        finally:
            self._current = None

    def _on_output(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output if self._current is None else self._current.guard(output)
