"""``Shard``: which range of which parameter an optimizer's flat tensor is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_megatron.sharding import Box, ParamSharding


@dataclass(frozen=True, eq=False)
class Shard:
    """One entry of the sharded optimizer on this rank.

    Args:
        name: global name of the parameter.
        param: the model's local parameter.
        main: what the optimizer updates: flat, ``[stop - start]``, or ``[*shape]`` for one that wants whole parameters.
        start: first element of the range in the flattened tensor of ``shape``.
        stop: end of the range.
        sharding: how that tensor lies in the global one.
        gathered: ``main`` is the global parameter, put together from the tensor-parallel ranks.
    """

    name: str
    param: nn.Parameter
    main: nn.Parameter
    start: int
    stop: int
    sharding: ParamSharding
    gathered: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that ``start`` and ``stop`` count in: the local parameter, or the global one if ``gathered``."""
        return tuple(self.sharding.global_shape if self.gathered else self.param.shape)

    def box_ranges(self) -> Iterator[tuple[int, int, Box]]:
        """``(start, stop, box)`` of each box's part in ``main``; padding rows are in no box."""
        for first, last, box in self.sharding.local_ranges():
            start, stop = max(first, self.start), min(last, self.stop)
            if start < stop:
                yield start - self.start, stop - self.start, box


def by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split tensors by dtype: multi-tensor kernels want lists of one dtype, and never an empty list."""
    lists: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        lists.setdefault(tensor.dtype, []).append(tensor)
    return list(lists.values())
