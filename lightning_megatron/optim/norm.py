"""The gradient norm, each logical element counted once, and scaling and clipping. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatron import kernels
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


def squared_norms(tensors: Sequence[Tensor], device: torch.device) -> Callable[[], Tensor]:
    """A function that sums the squares of each tensor: ``[len(tensors)]`` in fp64, in one pass.

    The tensors must stay where they are. Each is summed in its own dtype, on CUDA in chunks.
    """
    if tensors and device.type == "cuda" and kernels.available() and all(tensor.dtype == torch.float32 for tensor in tensors):
        from lightning_megatron.kernels.sum_of_squares import SumsOfSquares

        return SumsOfSquares(tensors, device)
    lists = by_dtype(tensors)

    def sums() -> Tensor:
        norms: dict[int, Tensor] = {}
        for same in lists:
            norms |= {id(tensor): norm for tensor, norm in zip(same, torch._foreach_norm(same, 2.0), strict=True)}
        if not norms:
            return torch.zeros(0, dtype=torch.float64, device=device)
        return torch.stack([norms[id(tensor)].double() for tensor in tensors]).square()

    return sums


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / (norm + 1e-6)``, at most 1."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-dim tensor."""
    for same in by_dtype(gradients):
        torch._foreach_mul_(same, factor.to(same[0].dtype))


def clamp(gradients: Sequence[Tensor], value: float) -> None:
    """Clamp gradients in place to ``[-value, value]``."""
    for same in by_dtype(gradients):
        torch._foreach_clamp_min_(same, -value)
        torch._foreach_clamp_max_(same, value)
