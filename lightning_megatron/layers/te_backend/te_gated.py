"""Which way ``TeOperations`` goes from the input of a gated block to its activated in 8 bits: by one kernel or by two."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatron.kernels.tuned_products import TunedProducts
from lightning_megatron.layers.te_backend.operations import Narrow

Way = Callable[[], tuple[Tensor, Narrow]]
"""Gate and up, ``[N, 2n]``, and the activated in both forms, ``[N, n]``."""


def faster(
    ways: tuple[Way, Way], products: TunedProducts, *, name: str, sizes: tuple[int, ...], activate: Callable[[Tensor], Narrow]
) -> tuple[Tensor, Narrow]:
    """What the faster of two ways makes. The second is out if gate and up, or what it makes of its own, are others.

    Args:
        ways: the one that is always right first.
        products: keep what is found.
        name: of what is found, with the version of the kernels.
        sizes: of the product.
        activate: makes the activated of gate and up as the first way does.
    """

    def compared(made: tuple[Tensor, Narrow]) -> tuple[Tensor, Tensor]:
        # Gate and up that differ in a last bit may round to activated that differ by much, so these are not compared.
        both, activated = made
        again = activate(both)
        pairs = (activated._data, again._data), (activated._transpose, again._transpose)
        return both, torch.stack([(one == other).float().mean() for one, other in pairs])

    return ways[products._way(name, sizes, ways, wide=compared)]()
