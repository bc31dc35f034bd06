"""Linear layers whose product is made by a Function that does more than they do."""

from __future__ import annotations

from torch import Tensor

from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.tensor_parallel.product import autocast_dtype


def can_bypass(x: Tensor, *linears: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Whether a product of the weight is all that these do to an input like ``x`` ``[.., in]``: one rank, no bias, no cast."""
    hooks = [hook for linear in linears for hook in linear._forward_pre_hooks.values()]
    plain = all(linear.mesh.tp.size == 1 and linear.bias is None for linear in linears)
    return plain and autocast_dtype(x) is None and all(getattr(hook, "only_waits", False) for hook in hooks)


def wait_for(linear: ColumnParallelLinear | RowParallelLinear) -> None:
    """What its own ``forward`` would have waited for: its parameters may still be on their way."""
    for hook in linear._forward_pre_hooks.values():
        hook(linear, ())
