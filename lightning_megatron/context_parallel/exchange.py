"""What context-parallel ranks send each other: blocks around a ring, heads against tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.mesh import Axis


class RingTransfer:
    """A tensor on its way to the next rank of an axis, and the previous rank's on its way here.

    Args:
        tensor: contiguous; must not change until ``wait``.
        axis: all its ranks start their transfers in the same order.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        following, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        self._works: list[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, axis.group),
                dist.P2POp(dist.irecv, self._received, before, axis.group),
            ]
        )

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for work in self._works:
            work.wait()
        return self._received


def _all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    """Part i goes to rank i: ``[size, ...] -> [size, ...]``, part i from rank i."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    assert list(axis.ranks) == sorted(axis.ranks)  # process groups sort their ranks
    dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.group)
    return received


def _heads_to_tokens(tensor: Tensor, axis: Axis) -> Tensor:
    parts = _all_to_all(tensor.reshape(*tensor.shape[:2], axis.size, -1, tensor.shape[3]).permute(2, 0, 1, 3, 4), axis)
    return parts.flatten(0, 1)


def _tokens_to_heads(tensor: Tensor, axis: Axis) -> Tensor:
    parts = _all_to_all(tensor.reshape(axis.size, -1, *tensor.shape[1:]), axis)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _heads_to_tokens(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _tokens_to_heads(grad, ctx.axis), None


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _tokens_to_heads(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _heads_to_tokens(grad, ctx.axis), None


def heads_to_tokens(tensor: Tensor, axis: Axis) -> Tensor:
    """All heads of own tokens to own heads of all tokens: ``[S/n, B, h, d] -> [S, B, h/n, d]``, ranks' tokens in order."""
    exchanged: Tensor = _HeadsToTokens.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return exchanged


def tokens_to_heads(tensor: Tensor, axis: Axis) -> Tensor:
    """The inverse: ``[S, B, h/n, d] -> [S/n, B, h, d]``."""
    exchanged: Tensor = _TokensToHeads.apply(tensor, axis)  # type: ignore[no-untyped-call]
    return exchanged
