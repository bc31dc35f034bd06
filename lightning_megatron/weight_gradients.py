"""How an autograd ``Function`` lets the gradient of its weight wait, for pipeline schedules that split the backward.

Autograd asks a Python ``Function`` for all of its gradients at once. One that names the place of its weight among the
arguments of ``apply`` can be asked to give that gradient later::

    class Scale(torch.autograd.Function):
        weight_input = 1

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, now_or_later(ctx, lambda: (grad * x).sum())

Outside of a split backward this changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_ATTRIBUTE = "_lightning_megatron_later"


def now_or_later(ctx: Any, compute: Callable[[], Tensor]) -> Tensor | None:
    """The gradient of the weight, or ``None`` if it was asked to wait: ``compute`` is then called later, once.

    Args:
        ctx: of the ``Function`` whose ``weight_input`` says which gradient this is.
        compute: what it takes to make the gradient. It holds all that it needs; the rest of what was saved may be freed.
    """
    waiting: list[Callable[[], Tensor]] | None = getattr(ctx, _ATTRIBUTE, None)
    if waiting is None:
        return compute()
    waiting.append(compute)
    return None


def waits(ctx: Any) -> bool:
    """Whether ``now_or_later`` will leave the gradient for later, so that what only that one needs may be left out."""
    return getattr(ctx, _ATTRIBUTE, None) is not None


def weight_input_of(node: Any) -> int | None:
    """Which input of a node of the autograd graph takes a weight whose gradient can wait; ``None`` if there is none."""
    function = getattr(type(node), "_forward_cls", None)
    place: int | None = getattr(function, "weight_input", None)
    return place


def ask_to_wait(node: Any) -> list[Callable[[], Tensor]]:
    """Make a node's next backward leave out the gradient of its weight. What computes it comes to be in the list."""
    waiting: list[Callable[[], Tensor]] = []
    setattr(node, _ATTRIBUTE, waiting)
    return waiting
