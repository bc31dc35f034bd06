"""Attention over several tiles put together. See block: Note [Tiles of one softmax]."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.context_parallel.parts import Part, num_places, put, take


class Merge:
    """Attention of ``[n, B, h, d]`` queries over more and more keys. The first tile of a query must show it a key."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, part: Part, *, out: Tensor, lse: Tensor) -> None:
        """Attention of some of the queries over keys that they have not met: as ``BlockAttention.forward`` returns it."""
        if self._out is None and num_places(part, self._q) == len(self._q):
            self._out, self._lse = (out, lse) if isinstance(part, slice) else (self._start(out, part), self._start(lse, part))
            return
        if self._out is None or self._lse is None:
            self._out = out.new_zeros(self._q.shape)
            self._lse = lse.new_full(self._q.shape[:3], float("-inf"))
        merge_into(self._out, self._lse, part, other=out, other_lse=lse)

    def _start(self, tensor: Tensor, part: Part) -> Tensor:
        started = torch.empty_like(tensor)
        put(started, part, tensor)
        return started

    def done(self) -> tuple[Tensor, Tensor]:
        """The output ``[n, B, h, d]``, in the dtype of the queries, and its log-sum-exp ``[n, B, h]``."""
        assert self._out is not None
        assert self._lse is not None
        return self._out.to(self._q.dtype), self._lse


def merge_into(out: Tensor, lse: Tensor, part: Part, *, other: Tensor, other_lse: Tensor) -> None:
    """Add attention over further keys to that of some of the queries, in place.

    Args:
        out: the output so far, ``[n, B, h, d]``, fp32 or wider.
        lse: its log-sum-exp ``[n, B, h]``; ``-inf`` only for a query to which ``other_lse`` shows its first key.
        part: the queries that the further keys are for.
        other: their output over the further keys.
        other_lse: its log-sum-exp; ``-inf`` for a query that sees none of them.
    """
    before = take(lse, part)
    # The two weights add up to one, so this is one pass over the output.
    weight = torch.sigmoid(other_lse - before)[..., None]
    if isinstance(part, slice):
        out[part].lerp_(other, weight)
    else:
        put(out, part, torch.lerp(take(out, part), other, weight))
    put(lse, part, torch.logaddexp(before, other_lse))
