"""Ring attention (Liu et al. 2023): keys and values go around while each rank attends to those that it has.

Note [Around the ring]
In step i rank r has the keys and values of rank ``r - i`` and sends them on while it computes. In the backward they go
around again, and their gradient goes after them, one step behind: it begins with the share of the rank that is next to where
keys and values came from, each rank adds its own, and after ``size - 1`` hops the sum is back there, where the rank's share in
its own keys and values has stayed. It travels in fp32, so that the number of ranks does not cost precision. Its last hop would
have nothing beside it: so a rank leaves half of the heads of its own block until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.exchange import RingTransfer
from lightning_megatron.context_parallel.merge import Merge
from lightning_megatron.context_parallel.parts import add, take
from lightning_megatron.context_parallel.tiling import Tiling
from lightning_megatron.mesh import Axis

Heads = tuple[slice, slice]
"""Some heads of queries, and those of keys and values that they attend by."""

WHOLE_HEADS: Heads = (slice(None), slice(None))


@dataclass(frozen=True)
class Ring:
    """One attention around a ring.

    Args:
        axis: the ranks, in ring order.
        tiling: of this rank's tokens over the axis.
        block: computes a tile.
    """

    axis: Axis
    tiling: Tiling
    block: BlockAttention

    def source(self, step: int) -> int:
        """The rank whose keys and values are here in a step."""
        return (self.axis.rank - step) % self.axis.size

    def backward(
        self,
        step: int,
        tensors: tuple[Tensor, ...],
        *,
        grad_q: Tensor,
        grad_kv: Callable[[], Tensor],
        random: list[tuple[Tensor, ...]],
        heads: Heads = WHOLE_HEADS,
    ) -> Tensor:
        """Add the gradients of what is here in a step to ``grad_q`` and to what ``grad_kv`` gives when they are there."""
        if heads is not WHOLE_HEADS:
            of_each = (heads[0], heads[1], heads[1], heads[0], heads[0], heads[0])
            tensors = tuple(tensor[:, :, part].contiguous() for tensor, part in zip(tensors, of_each, strict=True))
        q, k, v, grad, out, lse = tensors
        grad_q, shares = grad_q[:, :, heads[0]], []
        for tile, state in zip(self.tiling.ring(self.source(step)), random, strict=True):
            own = [take(tensor, tile.q) for tensor in (grad, q)]
            theirs = [take(tensor, tile.k) for tensor in (k, v)]
            after = {"out": take(out, tile.q), "lse": take(lse, tile.q)}
            share_q, *share_kv = self.block.backward(own[0], own[1], theirs[0], theirs[1], **after, tile=tile, random=state)
            add(grad_q, tile.q, share_q)
            shares.append((tile, share_kv))
        total = grad_kv()
        for tile, share_kv in shares:
            for of_all, share in zip(total[:, :, :, heads[1]], share_kv, strict=True):
                add(of_all, tile.k, share)
        return total

    def halves(self, num_heads: int, kv_heads: int) -> list[Heads]:
        """Heads in two parts, or all of them where one dropout mask is drawn for all, or there is one head of keys."""
        if self.block.dropout > 0.0 or kv_heads < 2:
            return [WHOLE_HEADS]
        middle = kv_heads // 2
        cut = middle * (num_heads // kv_heads)
        return [(slice(cut), slice(middle)), (slice(cut, None), slice(middle, None))]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        kv, transfer = torch.stack((k, v)), None
        merge, random = Merge(q), list[list[tuple[Tensor, ...]]]()
        for step in range(ring.axis.size):
            random.append([])
            if step < ring.axis.size - 1:
                transfer = RingTransfer(kv, ring.axis)
            for tile in ring.tiling.ring(ring.source(step)):
                part, part_lse, state = ring.block.forward(take(q, tile.q), take(kv[0], tile.k), take(kv[1], tile.k), tile)
                merge.add(tile.q, out=part, lse=part_lse)
                random[-1].append(state)
            if step < ring.axis.size - 1:
                assert transfer is not None
                kv = transfer.wait()
        out, lse = merge.done()
        ctx.ring, ctx.random = ring, random
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        wide = torch.promote_types(q.dtype, torch.float32)
        kv, grad_q = torch.stack((k, v)), torch.zeros_like(q, dtype=wide)
        own_kv = torch.zeros_like(kv, dtype=wide)
        transfer, returning, last = None, None, ring.axis.size - 1
        at_first, *at_last = ring.halves(q.shape[2], k.shape[2])

        def own(heads: Heads) -> None:
            given = (q, k, v, grad, out, lse)
            ring.backward(0, given, grad_q=grad_q, grad_kv=lambda: own_kv, random=ctx.random[0], heads=heads)

        for step in range(last + 1):
            if step < last:
                transfer = RingTransfer(kv, ring.axis)
            if step == 0:
                own(at_first)
            else:
                so_far = returning.wait if returning is not None else lambda: torch.zeros_like(own_kv)
                given = (q, *kv.unbind(), grad, out, lse)
                total = ring.backward(step, given, grad_q=grad_q, grad_kv=so_far, random=ctx.random[step])
                returning = RingTransfer(total, ring.axis)
            if step < last:
                assert transfer is not None
                kv = transfer.wait()
        for heads in at_last:  # beside the last of the gradients
            own(heads)
        if returning is not None:
            own_kv += returning.wait()
        grad_k, grad_v = own_kv.to(k.dtype).unbind()
        return grad_q.to(q.dtype), grad_k, grad_v, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Tensor:
    """Queries ``[S/n, B, h, d]``, keys and values ``[S/n, B, g, d]`` of this rank, to ``[S/n, B, h, d]``."""
    attended: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return attended
