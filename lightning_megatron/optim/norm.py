"""The gradient norm, each logical element counted once, and clipping. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.shards import Shard, by_dtype

# torch.nn.utils.clip_grad_norm_ adds the same: a zero norm must not divide.
EPSILON = 1e-6


def counted_ranges(shard: Shard, mesh: Mesh) -> list[tuple[int, int]]:
    """The ranges ``[start, stop)`` of a shard that this rank counts in a norm over the world.

    A box that several ranks hold is counted at position 0 of those axes, a tied parameter on the first stage. Bucket and
    vocabulary padding are in no box. Data-parallel ranks hold disjoint shards, so those need no rule.
    """
    if shard.sharding.tied and not mesh["ends"].is_first:
        return []
    return [(start, stop) for start, stop, box in shard.box_ranges() if all(mesh[axis].is_first for axis in box.replicated)]


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements: a 0-dim fp64 tensor. Each tensor is summed in its own dtype."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for same in by_dtype(tensors):
        norms = torch.stack(torch._foreach_norm(same, 2.0))
        total = total + norms.double().square().sum()
    return total


def scale_by_norm(gradients: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    """Multiply gradients in place by ``max_norm / (norm + 1e-6)`` where that is below 1."""
    coefficient = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for same in by_dtype(gradients):
        torch._foreach_mul_(same, coefficient.to(same[0].dtype))


def clamp(gradients: Sequence[Tensor], value: float) -> None:
    """Clamp gradients in place to ``[-value, value]``."""
    for same in by_dtype(gradients):
        torch._foreach_clamp_min_(same, -value)
        torch._foreach_clamp_max_(same, value)


def divide(gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place by a 0-dim tensor."""
    for same in by_dtype(gradients):
        torch._foreach_div_(same, divisor.to(same[0].dtype))
