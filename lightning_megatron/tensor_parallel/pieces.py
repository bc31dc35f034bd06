"""Products and their communication in pieces, so that one runs beside the other.

Note [Own part first]
A rank that must gather the other parts of an input can multiply its own meanwhile; then those that have come, while the next
are on their way. A result that is to be summed over ranks is made and sent piece by piece. Every row of a result is the same
product as without pieces; only cuBLAS may choose another kernel for fewer rows, which rounds sums in another order.

All functions here are forwards of autograd functions; nothing is differentiated through them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lightning_megatron.mesh import Axis
from lightning_megatron.tensor_parallel.product import Pending, start_all_gather, start_all_reduce, start_reduce_scatter


def gathered_product(
    x: Tensor, matrix: Tensor, bias: Tensor | None, axis: Axis, *, num_pieces: int
) -> tuple[Tensor, Tensor | None]:
    """``gather(x) matrix + bias``: ``[n, .., in], [in, out] -> [n * size, .., out]``. See Note [Own part first].

    Args:
        x: this rank's part of the input along dim 0.
        matrix: the second factor.
        bias: ``[out]``.
        axis: the ranks that hold the parts.
        num_pieces: products one after the other: the own part, and the others in ``num_pieces - 1``.

    Returns:
        The product, and the gathered input if that came in one piece.
    """
    length = x.shape[0]
    lengths = _lengths(length, num_pieces - 1)
    pieces = [(start, stop, start_all_gather(x[start:stop], axis)) for start, stop in lengths]
    result = x.new_empty((axis.size, length, *x.shape[1:-1], matrix.shape[1]))
    _multiply(x, matrix, bias, result[axis.rank])
    for start, stop, gathering in pieces:
        parts = gathering.wait().view(axis.size, stop - start, *x.shape[1:])
        if stop - start == length:  # ranks that follow each other lie one behind the other, here and there
            for first, last in ((0, axis.rank), (axis.rank + 1, axis.size)):
                _multiply(parts[first:last], matrix, bias, result[first:last])
            continue
        for rank in range(axis.size):
            if rank != axis.rank:
                _multiply(parts[rank], matrix, bias, result[rank, start:stop])
    return result.flatten(0, 1), pieces[0][2].tensor if len(pieces) == 1 else None


def scattered_product(x: Tensor, matrix: Tensor, axis: Axis, *, num_pieces: int) -> Tensor:
    """``x matrix`` summed over the axis, own part kept: ``[n * size, .., in], [in, out] -> [n, .., out]``.

    Args:
        x: the first factor.
        matrix: the second.
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
    result = x.new_empty((length, *x.shape[1:-1], matrix.shape[1]))
    sending = []
    for start, stop in _lengths(length, num_pieces):
        rows = parts[:, start:stop]
        made = x.new_empty((*rows.shape[:-1], matrix.shape[1]))
        for rank in range(axis.size):
            _multiply(rows[rank], matrix, None, made[rank])
        sending.append((start, stop, start_reduce_scatter(made.flatten(0, 1), axis)))
    for start, stop, scattering in sending:
        result[start:stop] = scattering.wait()
    return result


def reduced_product(x: Tensor, matrix: Tensor, axis: Axis, *, num_pieces: int) -> Tensor:
    """``x matrix`` summed over the axis: ``[n, .., in], [in, out] -> [n, .., out]``. Arguments as above."""
    result = x.new_empty((*x.shape[:-1], matrix.shape[1]))
    sending: list[Pending] = []
    for start, stop in _lengths(x.shape[0], num_pieces):
        _multiply(x[start:stop], matrix, None, result[start:stop])
        sending.append(start_all_reduce(result[start:stop], axis))
    for reducing in sending:
        reducing.wait()
    return result


def _lengths(length: int, num_pieces: int) -> list[tuple[int, int]]:
    """Where pieces begin and end, as even as can be; none is empty."""
    bounds = [length * index // num_pieces for index in range(num_pieces + 1)]
    return [(start, stop) for start, stop in pairwise(bounds) if start < stop]


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x matrix + bias`` into ``out``, both contiguous: ``[.., in], [in, out] -> [.., out]``."""
    if x.numel() == 0:
        return
    rows, place = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, matrix, out=place)
    else:
        torch.addmm(bias, rows, matrix, out=place)
