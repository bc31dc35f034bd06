"""Ring attention (Liu et al. 2023): keys and values go around while each rank attends to those that it has.

Note [Around the ring]
In step i rank r has the keys and values of rank ``r - i`` and sends them on while it computes. In the backward they go
around again, and their gradient goes after them, one step behind: it begins with the share of the rank that is next to where
keys and values came from, each rank adds its own, and after ``size - 1`` hops the sum is back there, where the rank's share in
its own keys and values has stayed. It travels in fp32, so that the number of ranks does not cost precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.exchange import RingTransfer
from lightning_megatron.context_parallel.merge import Merge
from lightning_megatron.context_parallel.parts import add, take
from lightning_megatron.context_parallel.tiles import Tile
from lightning_megatron.context_parallel.tiling import Tiling
from lightning_megatron.mesh import Axis


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
        self, step: int, tensors: tuple[Tensor, ...], *, grad_q: Tensor, random: Iterator[tuple[Tensor, ...]]
    ) -> list[tuple[Tile, Tensor, Tensor]]:
        """Add to the gradient of queries, and return those of the keys and values that are here, tile by tile."""
        q, k, v, grad, out, lse = tensors
        shares = []
        for tile in self.tiling.ring(self.source(step)):
            own = [take(tensor, tile.q) for tensor in (grad, q)]
            theirs = [take(tensor, tile.k) for tensor in (k, v)]
            after = {"out": take(out, tile.q), "lse": take(lse, tile.q)}
            share_q, *share_kv = self.block.backward(
                own[0], own[1], theirs[0], theirs[1], **after, tile=tile, random=next(random)
            )
            add(grad_q, tile.q, share_q)
            shares.append((tile, share_kv[0], share_kv[1]))
        return shares


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        kv, transfer = torch.stack((k, v)), None
        merge, random = Merge(q), []
        for step in range(ring.axis.size):
            if step < ring.axis.size - 1:
                transfer = RingTransfer(kv, ring.axis)
            for tile in ring.tiling.ring(ring.source(step)):
                part, part_lse, state = ring.block.forward(take(q, tile.q), take(kv[0], tile.k), take(kv[1], tile.k), tile)
                merge.add(tile.q, out=part, lse=part_lse)
                random.append(state)
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
        transfer, returning, random = None, None, iter(ctx.random)
        for step in range(ring.axis.size):
            if step < ring.axis.size - 1:
                transfer = RingTransfer(kv, ring.axis)
            shares = ring.backward(step, (q, *kv.unbind(), grad, out, lse), grad_q=grad_q, random=random)
            grad_kv = own_kv
            if step > 0:
                grad_kv = torch.zeros_like(kv, dtype=wide) if returning is None else returning.wait()
            for tile, grad_k, grad_v in shares:
                add(grad_kv[0], tile.k, grad_k)
                add(grad_kv[1], tile.k, grad_v)
            if step > 0:
                returning = RingTransfer(grad_kv, ring.axis)
            if step < ring.axis.size - 1:
                assert transfer is not None
                kv = transfer.wait()
        if returning is not None:
            own_kv += returning.wait()
        grad_k, grad_v = own_kv.to(k.dtype).unbind()
        return grad_q.to(q.dtype), grad_k, grad_v, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, ring: Ring) -> Tensor:
    """Queries ``[S/n, B, h, d]``, keys and values ``[S/n, B, g, d]`` of this rank, to ``[S/n, B, h, d]``."""
    attended: Tensor = _RingAttention.apply(q, k, v, ring)  # type: ignore[no-untyped-call]
    return attended
