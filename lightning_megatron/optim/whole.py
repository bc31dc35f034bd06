"""Whole parameters for optimizers that need them: a parameter that is cut over tp is put together for the step.

Data-parallel ranks each get some of the parameters (``optim/layout.py``, ``whole``). The tensor-parallel ranks of one position
get the same ones, so each of them gathers the whole gradient, takes the whole step, and keeps its own part.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather, all_gather_object
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.shards import Shard
from lightning_megatron.sharding import Box, ParamSharding, replicated


def is_cut(sharding: ParamSharding) -> bool:
    """Whether the local tensor is not all of the global one."""
    return len(sharding.boxes) != 1 or tuple(sharding.boxes[0].size) != tuple(sharding.global_shape)


class GatheredMatrix:
    """One parameter that is cut over tp. Collective over tp.

    Args:
        local: the shard of the local tensor, all of it; its ``main`` only takes the gradient.
        values: the local tensor's values, flat.
        mesh: the running layout.
        boxes: each tensor-parallel rank's part, by ``gather_boxes``.

    Attributes:
        shard: what the optimizer gets.
    """

    def __init__(self, local: Shard, values: Tensor, *, mesh: Mesh, boxes: list[ParamSharding]) -> None:
        self._local, self._values, self._axis, self._boxes = local, values, mesh.tp, boxes
        whole = replicated(tuple(local.sharding.global_shape))
        full = self._gather(values.to(local.main.dtype))
        main = nn.Parameter(full)
        self.shard = Shard(local.name, local.param, main, 0, full.numel(), whole, gathered=True)

    def _gather(self, flat: Tensor) -> Tensor:
        """``[local numel] -> [*global_shape]``."""
        parts = all_gather(flat, self._axis).view(self._axis.size, -1)
        full = flat.new_zeros(self._local.sharding.global_shape)
        for part, sharding in zip(parts, self._boxes, strict=True):
            for start, stop, box in sharding.local_ranges():
                _region(full, box).copy_(part[start:stop].view(box.size))
        return full

    def before_step(self) -> None:
        """Put the gradient together."""
        gradient = self._local.main.grad
        self.shard.main.grad = None if gradient is None else self._gather(gradient.reshape(-1))

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep this rank's part of the new values."""
        self.shard.main.grad = None
        own = self._local.sharding.cut(self.shard.main.detach(), self._local.param.shape)
        self._values.copy_(own.reshape(-1))

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the values from the parameter again."""
        self.shard.main.copy_(self._gather(self._values.to(self.shard.main.dtype)))

    @torch.no_grad()
    def follow(self) -> None:
        """Read the values from the parameter again where it is not what they round to."""
        main, values = self.shard.main, self._gather(self._values)
        main.copy_(torch.where(main.to(values.dtype) == values, main, values))


def gather_boxes(shards: list[Shard], axis: Axis) -> dict[str, list[ParamSharding]]:
    """How each tensor-parallel rank holds the parameters, by name; all ranks of the axis call it."""
    mine = {shard.name: shard.sharding for shard in shards}
    everyone = all_gather_object(mine, axis)
    return {name: [of_rank[name] for of_rank in everyone] for name in mine}


def _region(full: Tensor, box: Box) -> Tensor:
    return full[tuple(slice(start, start + length) for start, length in zip(box.offset, box.size, strict=True))]
