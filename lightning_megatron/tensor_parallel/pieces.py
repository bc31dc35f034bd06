"""Products and their communication in pieces, so that one runs beside the other.

Note [Own part first]
A rank that must gather the other parts of an input can multiply its own meanwhile; then those that have come, while the next
are on their way. A result that is to be summed over ranks is made and sent piece by piece. Every row of a result is the same
product as without pieces; only cuBLAS may choose another kernel for fewer rows, which rounds sums in another order.

All functions here are forwards of autograd functions; nothing is differentiated through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.tensor_parallel.product import Pending, start_all_gather, start_all_reduce, start_reduce_scatter


@dataclass(frozen=True)
class Multiplier:
    """What rows are multiplied by.

    Args:
        write: puts the product of some rows, ``[N, in]``, into its place, ``[N, out]``; both are contiguous.
        size: out.
        dtype: of the product.
        multiple: pieces are of multiples of so many entries of dim 0.
    """

    write: Callable[[Tensor, Tensor], object]
    size: int
    dtype: torch.dtype
    multiple: int = 1

    @classmethod
    def of(cls, matrix: Tensor, bias: Tensor | None = None) -> Multiplier:
        """``[in, out]``, and ``[out]`` that is added."""

        def write(rows: Tensor, place: Tensor) -> None:
            if bias is None:
                torch.mm(rows, matrix, out=place)
            else:
                torch.addmm(bias, rows, matrix, out=place)

        return cls(write, matrix.shape[1], matrix.dtype)

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """``[.., in] -> [.., out]``, both contiguous."""
        if x.numel() > 0:
            self.write(x.reshape(-1, x.shape[-1]), out.view(-1, self.size))

    def lengths(self, length: int, num_pieces: int) -> list[tuple[int, int]]:
        """Where pieces begin and end, as even as can be; none is empty."""
        bounds = [length * index // num_pieces // self.multiple * self.multiple for index in range(num_pieces)]
        return [(start, stop) for start, stop in pairwise([*bounds, length]) if start < stop]


def gathered_product(
    x: Tensor, by: Multiplier, axis: Axis, *, num_pieces: int, keeps: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The product of what is gathered: ``[n, .., in] -> [n * size, .., out]``. See Note [Own part first].

    Args:
        x: this rank's part of the input along dim 0.
        by: the second factor.
        axis: the ranks that hold the parts.
        num_pieces: products one after the other: the own part, and the others in ``num_pieces - 1``.
        keeps: the gathered input is wanted too, which takes a copy if it comes in several pieces.

    Returns:
        The product, and the gathered input if that is wanted or came in one piece.
    """
    length = x.shape[0]
    bounds = by.lengths(length, num_pieces - 1)
    pieces = [(start, stop, start_all_gather(x[start:stop], axis)) for start, stop in bounds]
    whole = pieces[0][2].tensor if len(pieces) == 1 else None
    result = x.new_empty((axis.size, length, *x.shape[1:-1], by.size), dtype=by.dtype)
    by.multiply(x, result[axis.rank])
    if len(pieces) == 1:  # ranks that follow each other lie one behind the other, here and there
        parts = pieces[0][2].wait().view(axis.size, *x.shape)
        for first, last in ((0, axis.rank), (axis.rank + 1, axis.size)):
            by.multiply(parts[first:last], result[first:last])
        return result.flatten(0, 1), whole
    if keeps:
        whole = x.new_empty((axis.size * length, *x.shape[1:]))
    for start, stop, gathering in pieces:
        parts = gathering.wait().view(axis.size, stop - start, *x.shape[1:])
        for rank in range(axis.size):
            if rank != axis.rank:
                by.multiply(parts[rank], result[rank, start:stop])
        if whole is not None:
            whole.view(axis.size, *x.shape)[:, start:stop] = parts
    return result.flatten(0, 1), whole


def scattered_product(x: Tensor, by: Multiplier, axis: Axis, *, num_pieces: int) -> Tensor:
    """The product summed over the axis, own part kept: ``[n * size, .., in] -> [n, .., out]``.

    Args:
        x: the first factor.
        by: the second.
        axis: the ranks that each hold a summand.
        num_pieces: products one after the other.

    Raises:
        ValueError: dim 0 does not divide by the ranks.
    """
    if x.shape[0] % axis.size:
        raise ValueError(
            f"dim 0 of a tensor of shape {tuple(x.shape)} does not divide by the {axis.size} ranks of axis {axis.name!r}; pad "
            f"it to a multiple of {axis.size}."
        )
    length = x.shape[0] // axis.size
    parts = x.contiguous().view(axis.size, length, *x.shape[1:])
    result = x.new_empty((length, *x.shape[1:-1], by.size), dtype=by.dtype)
    sending = []
    for start, stop in by.lengths(length, num_pieces):
        rows = parts[:, start:stop]
        made = x.new_empty((*rows.shape[:-1], by.size), dtype=by.dtype)
        for rank in range(axis.size):
            by.multiply(rows[rank], made[rank])
        sending.append((start, stop, start_reduce_scatter(made.flatten(0, 1), axis)))
    for start, stop, scattering in sending:
        result[start:stop] = scattering.wait()
    return result


def reduced_product(x: Tensor, by: Multiplier, axis: Axis, *, num_pieces: int) -> Tensor:
    """The product summed over the axis: ``[n, .., in] -> [n, .., out]``. Arguments as above."""
    result = x.new_empty((*x.shape[:-1], by.size), dtype=by.dtype)
    sending: list[Pending] = []
    for start, stop in by.lengths(x.shape[0], num_pieces):
        by.multiply(x[start:stop], result[start:stop])
        sending.append(start_all_reduce(result[start:stop], axis))
    for reducing in sending:
        reducing.wait()
    return result
