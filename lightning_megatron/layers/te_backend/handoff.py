"""What goes from one layer's function to another's beside autograd.

Note [Handed over in 8 bits]
Between the norm and the column layer behind it and between 8-bit attention and the row layer behind it, forward, and between
the row layer and the gated column layer before it and between the rotation and the projection before it, backward, only 8
bits are needed, of a tensor that nobody else uses. It goes through a ``Handoff``, so that it is never written in 16 bits;
autograd sees a tensor that takes no memory, a NaN in all places, in its place. Likewise a gated column layer may hand over
what the activation makes of its result, beside the result itself; the row layer that finds nothing makes the same from that.

Nothing is handed over past a hook of somebody else: it would be shown NaN, and what it changes would change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import nan
from types import NoneType

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lightning_megatron.layers.instead import Instead
from lightning_megatron.layers.te_backend.operations import Narrow
from lightning_megatron.layers.te_backend.scales import Slot


@dataclass
class Handoff:
    """A place for one narrow matrix. See Note [Handed over in 8 bits].

    Args:
        slot: its factor.
        narrow: what is handed over.
    """

    slot: Slot | None = None
    narrow: Narrow = None

    def take(self) -> Narrow:
        """What is here, once; ``None`` if there is nothing."""
        narrow, self.narrow = self.narrow, None
        return narrow


def goes_unheard(*modules: nn.Module) -> bool:
    """Whether nobody sees, or changes, what these are given and return; what runs a module again, or waits for it, does not.

    Asked for each layer of each micro-batch, so in few steps.
    """
    if _has_any_global_hook() or torch.is_anomaly_enabled():  # type: ignore[no-untyped-call]
        return False  # the latter is after NaN
    for module in modules:
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
        if not isinstance(vars(module).get("forward"), (Instead, NoneType)):
            return False
        for hook in module._forward_pre_hooks.values():
            if not getattr(hook, "only_waits", False):
                return False
    return True


def stand_in(like: Tensor, shape: Sequence[int]) -> Tensor:
    """What autograd sees of a tensor that is handed over."""
    return _nan(like.dtype, like.device).expand(shape)


@cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # or no gradient could come through a stand-in
        return torch.full((), nan, dtype=dtype, device=device)
