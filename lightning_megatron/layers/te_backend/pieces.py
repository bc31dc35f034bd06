"""Products of this backend in pieces beside their communication: ``tensor_parallel/pieces.py`` with its operations.

Note [Bytes travel]
A product in 8 bits whose input must be gathered is given bytes: each rank rounds its own part by the factor that the whole
has, and one byte an element is on its way. A factor of earlier steps is known to all ranks; one that follows from the tensor
itself (``current``, and the first step of ``delayed``) needs the largest magnitude of all parts first, one number. So bytes
and factors are those of a matrix that was gathered first and rounded then. The columns that a weight gradient wants are made
of the gathered bytes. Largest magnitudes are noted of the own part; what follows from them is the largest over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import all_gather, all_reduce, reduce_scatter
from lightning_megatron.layers.te_backend.operations import Narrow
from lightning_megatron.layers.te_backend.scales import Slot, own_factor
from lightning_megatron.tensor_parallel import pieces

if TYPE_CHECKING:
    from lightning_megatron.layers.te_backend.functions import Job

Multiply = Callable[[Narrow, Tensor | None], Tensor]
"""The product of some rows, ``[N, in]``, to ``[N, out]``; written into the second argument, if there is one."""


def gathered(part: Tensor, slot: Slot | None, job: Job) -> Narrow:
    """What all ranks hold, ``[N, n] -> [N * tp, n]``, as a product takes it; without sequence parallelism ``part`` is that."""
    whole = all_gather(part, job.axis, dim=0) if job.sequence_parallel else part
    return job.operations.quantize(whole, slot, record=job.record)


def gathered_product(
    part: Tensor, slot: Slot | None, multiply: Multiply, *, job: Job, size: int, keeps: bool
) -> tuple[Tensor, Narrow]:
    """The product of what all ranks hold, ``[N, in] -> [N * tp, out]``, and that itself. See Note [Bytes travel].

    Without sequence parallelism ``part`` is what all ranks hold: ``[N, in] -> [N, out]``.

    Args:
        part: this rank's rows.
        slot: the factor; ``None`` for none.
        multiply: the product, in the dtype of ``part``.
        job: of the layer.
        size: out.
        keeps: whether the gathered rows are wanted; else the second result may be ``None``.
    """
    if not job.sequence_parallel or not _can_cut(job, len(part)):
        narrow = gathered(part, slot, job)
        return multiply(narrow, None), narrow
    mine = part if slot is None else _rounded(part, slot, job)
    by = _multiplier(mine, multiply, job, part, size)
    result, whole = pieces.gathered_product(job.operations.rows(mine), by, job.axis, num_pieces=job.num_pieces, keeps=keeps)
    return result, None if whole is None else job.operations.with_rows(mine, whole)


def summed_product(x: Narrow, multiply: Multiply, like: Tensor, *, job: Job, size: int) -> Tensor:
    """The sum of all ranks' products: ``[S, B, out]``; own part of it, ``[S/tp, B, out]``, under sequence parallelism.

    Args:
        x: this rank's summand's input, ``[S * B, in/tp]``.
        multiply: the product.
        like: ``[S, B, ..]``, in the dtype of the result.
        job: of the layer.
        size: out.
    """
    shape, axis = like.shape[:-1], job.axis
    ranks = axis.size if job.sequence_parallel else 1
    if shape[0] % ranks or not _can_cut(job, shape.numel() // ranks):
        partial = multiply(x, None).view(*shape, size)
        return reduce_scatter(partial, axis, dim=0) if job.sequence_parallel else all_reduce(partial, axis)
    product = pieces.scattered_product if job.sequence_parallel else pieces.reduced_product
    by = _multiplier(x, multiply, job, like, size)
    return product(job.operations.rows(x), by, axis, num_pieces=job.num_pieces).view(-1, *shape[1:], size)


def _can_cut(job: Job, num: int) -> bool:
    """Whether so many tokens, a rank's part, can be multiplied and sent in pieces."""
    if job.num_pieces == 1 or job.axis.size == 1 or num == 0:
        return False
    if job.input_slot is None:
        return True
    options = job.input_slot.scales.options
    return options.is_per_tensor and num % options.alignment == 0


def _multiplier(x: Narrow, multiply: Multiply, job: Job, like: Tensor, size: int) -> pieces.Multiplier:
    def write(rows: Tensor, place: Tensor) -> None:
        multiply(job.operations.with_rows(x, rows), place)

    multiple = 1 if job.input_slot is None else job.input_slot.scales.options.alignment
    return pieces.Multiplier(write, size, like.dtype, multiple)


def _rounded(part: Tensor, slot: Slot, job: Job) -> Narrow:
    """Own rows in 8 bits by the factor of all ranks' rows."""
    amax = slot.amax if job.record else slot.scratch
    if slot.scales.options.recipe == "delayed" and slot.is_known:
        scale = slot.scale
    else:
        largest = torch.linalg.vector_norm(part, inf, dtype=torch.float32).view(1)
        scale = own_factor(all_reduce(largest, job.axis, dist.ReduceOp.MAX), slot.dtype)
    return job.operations.round_rows(part, slot.dtype, scale=scale, amax=amax)
