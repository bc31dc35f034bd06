"""Parameters that are frozen after the optimizer was set up, and gradients of those that were until then.

To torch's optimizers a parameter without a gradient is one to leave alone, while a zero gradient moves it by momentum and
weight decay. Shards lie in buffers that always hold a gradient, so those of frozen parameters leave their groups for the
length of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_megatron.optim.buffers import Bucket
from lightning_megatron.optim.shards import Shard


def resting(shards: Sequence[Shard], has_arrived: Callable[[nn.Parameter], bool]) -> set[Tensor]:
    """Main parameters of what requires no gradient and got none in this step, before it was frozen or while it was not.

    Args:
        shards: this rank's.
        has_arrived: whether a gradient of the parameter has arrived in this step.
    """
    frozen = [shard for shard in shards if not shard.param.requires_grad]
    return {shard.main for shard in frozen if not has_arrived(shard.param)}


@contextmanager
def left_out(optimizer: torch.optim.Optimizer, mains: Collection[Tensor]) -> Iterator[None]:
    """Inside the ``with`` block the optimizer's groups are without these parameters."""
    if not mains:
        yield
        return
    groups = optimizer.param_groups
    members = [group["params"] for group in groups]
    try:
        for group, params in zip(groups, members, strict=True):
            group["params"] = [param for param in params if param not in mains]
        yield
    finally:
        for group, params in zip(groups, members, strict=True):
            group["params"] = params


@torch.no_grad()
def take_over(gradients: Mapping[nn.Parameter, Tensor | None], buckets: Iterable[Bucket]) -> None:
    """Put gradients of this step that arrived before their parameters had buckets into these."""
    for slot in (slot for bucket in buckets for slot in bucket.slots):
        if (gradient := gradients.get(slot.param)) is not None:
            slot.view.copy_(gradient)
