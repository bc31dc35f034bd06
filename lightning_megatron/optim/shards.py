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
        main: what the optimizer updates: flat, ``[stop - start]``.
        start: first element of the range in the flattened local parameter.
        stop: end of the range.
        sharding: how the local parameter lies in the global one.
    """

    name: str
    param: nn.Parameter
    main: nn.Parameter
    start: int
    stop: int
    sharding: ParamSharding

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
