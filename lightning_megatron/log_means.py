"""What was logged for several micro-batches, and on several context-parallel ranks, put together to one value.

Note [Tokens, then samples]
Under context parallelism a micro-batch's mean is that over its tokens, wherever they are; micro-batches then count by their
samples, as those of one process do. So each rank's value of a micro-batch weighs its samples times the share of its tokens that
are on the rank, and an empty part weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm import all_reduce
from lightning_megatron.mesh import Axis, Mesh

Kind = Literal["value", "metric", "refused", "error"]


@dataclass(frozen=True)
class Entry:
    """One name of a schema: what is logged and how, without the value.

    Args:
        name: the name given to ``log``.
        kind: ``value``: a number; ``metric``: a torchmetrics object; ``refused``: something that Lightning refuses, to be
            refused on every rank; ``error``: something that cannot be done, the same.
        arguments: the other arguments of ``log``, sorted by name, without ``batch_size``.
        detail: the metric's path in the module, the pickled value, or the message.
        reduction: how micro-batches are combined: mean, sum, min or max.
        has_value: whether a number travels for it.
        own_weights: whether the user gave ``batch_size``, which then may differ between context-parallel ranks.
    """

    name: str
    kind: Kind
    arguments: tuple[tuple[str, Any], ...]
    detail: str | bytes = ""
    reduction: str = "mean"
    has_value: bool = False
    own_weights: bool = False

    @property
    def on_one_rank(self) -> bool:
        """Whether other context-parallel ranks may not log the name at all."""
        return bool(dict(self.arguments).get("rank_zero_only"))


def token_shares(num_tokens: Tensor, cp: Axis) -> Tensor:
    """The share of each micro-batch's tokens ``[M]`` that are on this rank: ``[M]``, 0 where there is none at all."""
    return num_tokens / all_reduce(num_tokens.clone(), cp).clamp(min=1)


def mean_by_tokens(numbers: Sequence[Tensor], sizes: Sequence[int], shares: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's mean and its weight; see Note [Tokens, then samples]."""
    weights = torch.stack([share * size for share, size in zip(shares, sizes, strict=True)])
    parts = torch.stack([torch.where(w > 0, n * w, 0.0) for n, w in zip(numbers, weights, strict=True)])
    total = weights.sum()
    return parts.sum() / torch.where(total > 0, total, 1.0), total


def over_context(
    entries: Sequence[Entry], values: list[Tensor], sizes: list[int], *, mesh: Mesh, weights: list[Tensor | None]
) -> tuple[list[Tensor], list[int]]:
    """Combine values over ``cp``: first the loss, if there is one more value than entries that have one, then those.

    Sums are averaged, as ``sync_dist=True`` then sums them over ``dp_cp``. ``weights`` are those of means, where not equal.
    """
    cp, values, sizes = mesh.cp, list(values), list(sizes)
    valued = [i for i, entry in enumerate(entries) if entry.has_value]
    has_loss = len(values) - len(valued)
    hows = ["mean"] * has_loss + ["own" if entries[i].on_one_rank else entries[i].reduction for i in valued]
    own: list[Any] = [1] * has_loss
    own += [sizes[i] if entries[i].own_weights and entries[i].reduction == "mean" else 1 for i in valued]
    used = [other if weight is None else weight for weight, other in zip(weights, own, strict=True)]
    averaged = [i for i, how in enumerate(hows) if how not in ("min", "max", "own")]
    if averaged:
        totals = [(torch.ones_like(values[i]) * used[i]).to(values[i].dtype) for i in averaged]
        shares = [torch.where(total > 0, values[i] * total, 0.0) for i, total in zip(averaged, totals, strict=True)]
        sums, total = all_reduce(torch.stack(shares + totals), cp).chunk(2)  # a mean over no token may be NaN: weighs nothing
        for i, mean in zip(averaged, (sums / torch.where(total > 0, total, 1.0)).unbind(), strict=True):
            values[i] = mean
    for how, op in (("min", dist.ReduceOp.MIN), ("max", dist.ReduceOp.MAX)):
        chosen = [i for i, other in enumerate(hows) if other == how]
        lowest = all_reduce(torch.stack([values[i] for i in chosen]), cp, op).unbind() if chosen else ()
        for i, value in zip(chosen, lowest, strict=True):
            values[i] = value
    counted = [i for i, entry in enumerate(entries) if entry.own_weights and not entry.on_one_rank]
    if counted:  # the ranks' batch sizes differ, and all must go on with the same
        summed = all_reduce(torch.tensor([sizes[i] for i in counted], device=mesh.device), cp).tolist()
        for i, size in zip(counted, summed, strict=True):
            sizes[i] = size
    return values, sizes


def reduced(numbers: list[Tensor], weights: list[int], reduction: str) -> Tensor:
    """0-dim tensors to one; a mean leaves out those of weight 0, which may be the NaN of an empty micro-batch."""
    if reduction in ("sum", "min", "max"):
        combined: Tensor = getattr(torch.stack(numbers), reduction)()
        return combined
    kept = [(number, weight) for number, weight in zip(numbers, weights, strict=True) if weight > 0]
    if not kept:
        return torch.zeros_like(numbers[0])
    if len({weight for _, weight in kept}) == 1:
        return torch.stack([number for number, _ in kept]).mean()
    total = sum(weight for _, weight in kept)
    return torch.stack([number * (weight / total) for number, weight in kept]).sum()
