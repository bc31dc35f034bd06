"""Parts of a tensor along the sequence, dim 0 of ``[S, B, ...]``: taken out, put back, added to, put in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Part = slice | Tensor
"""A run of places, the same in every row; or places row by row, ``[1 or B, n]``, none twice."""

WHOLE = slice(None)


def take(tensor: Tensor, part: Part) -> Tensor:
    """``[S, B, ...] -> [n, B, ...]``; a view where the part is a slice."""
    return tensor[part] if isinstance(part, slice) else tensor[_places(part, tensor)]


def put(tensor: Tensor, part: Part, value: Tensor) -> None:
    """Overwrite a part, in place."""
    tensor[part if isinstance(part, slice) else _places(part, tensor)] = value


def add(tensor: Tensor, part: Part, value: Tensor) -> None:
    """Add to a part, in place."""
    if isinstance(part, slice):
        tensor[part] += value
    else:
        places = _places(part, tensor)
        tensor[places] = tensor[places] + value  # no place comes twice, so this needs no atomic additions


def num_places(part: Part, tensor: Tensor) -> int:
    """Places of a row that the part names."""
    return len(range(*part.indices(len(tensor)))) if isinstance(part, slice) else part.shape[1]


def _places(part: Tensor, tensor: Tensor) -> tuple[Tensor, ...]:
    if part.shape[0] == 1:
        return (part[0],)
    return part.t(), torch.arange(tensor.shape[1], device=tensor.device)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return take(tensor, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return take(grad, ctx.saved_tensors[1]), None, None


def reorder(tensor: Tensor, index: Tensor, back: Tensor) -> Tensor:
    """Put dim 0 into the order of ``index`` ``[1 or B, S]``, whose inverse is ``back``: ``[S, B, ...]``, same shape out."""
    ordered: Tensor = _Reorder.apply(tensor, index, back)  # type: ignore[no-untyped-call]
    return ordered
