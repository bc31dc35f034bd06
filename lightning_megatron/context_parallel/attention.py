"""Attention of a sequence that is cut over ranks, by each way of communicating."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.comm import all_gather_from
from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.exchange import heads_to_tokens, tokens_to_heads
from lightning_megatron.context_parallel.layout import SequenceLayout, inverse
from lightning_megatron.context_parallel.parts import reorder
from lightning_megatron.context_parallel.ring import Ring, ring_attention
from lightning_megatron.context_parallel.tiled import tiled_attention
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.context_parallel.tiling import Tiling
from lightning_megatron.mesh import Axis, Mesh

Comm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


@dataclass(frozen=True)
class ContextParallelAttention:
    """Softmax attention over sequences that lie over ranks as a ``SequenceLayout`` says.

    Args:
        comm: ``p2p``: keys and values go around a ring; ``all_gather``: every rank gathers all of them; ``a2a``: each rank
            gets all tokens of some heads (Ulysses, Jacobs et al. 2023); ``a2a+p2p``: that among neighbouring ranks, and a
            ring across.
        axes: this rank's block of neighbouring ranks by how many share a sequence: all of them, or a divisor.
        inner, outer: of ``a2a+p2p``. Fewer ranks than ``inner`` share a sequence by ``a2a``, others but not all by ``p2p``.
        block: computes a tile.
    """

    comm: Comm
    axes: Mapping[int, Axis]
    inner: Axis
    outer: Axis
    block: BlockAttention

    @classmethod
    def of(cls, mesh: Mesh, block: BlockAttention) -> ContextParallelAttention:
        """As the mesh's parallelism says."""
        blocks = [axis for name, axis in mesh.axes.items() if name[:3] == "cp:" and name[3:].isdigit()]
        axes = {axis.size: axis for axis in (*blocks, mesh.cp)}
        return cls(mesh.parallelism.cp_comm, axes, mesh["cp:a2a"], mesh["cp:p2p"], block)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, layout: SequenceLayout, pattern: Pattern) -> Tensor:
        """Queries ``[S/cp, B, h, d]``, keys and values ``[S/cp, B, g, d]`` with g dividing h, to ``[S/cp, B, h, d]``.

        Raises:
            ValueError: heads that do not divide over the ranks that exchange them; a number of ranks that have no axis.
        """
        if layout.size == 1:
            tiling = Tiling(layout, pattern, q.device)
            return tiled_attention(q, k, v, tiles=tiling.gathered(), block=self.block)
        comm, axis = self.route(layout)
        if comm == "p2p":
            return ring_attention(q, k, v, ring=Ring(axis, Tiling(layout, pattern, q.device), self.block))
        if comm == "all_gather":
            return self._gathered(q, k, v, layout, pattern)
        if comm == "a2a":
            return self._exchanged(q, k, v, layout, pattern, inner=axis, outer=None)
        return self._exchanged(q, k, v, layout, pattern, inner=self.inner, outer=self.outer)

    def route(self, layout: SequenceLayout) -> tuple[Comm, Axis]:
        """How the ranks that share a sequence communicate, and which they are.

        Raises:
            ValueError: no axis has so many ranks.
        """
        if layout.size not in self.axes:
            raise ValueError(f"{layout.size} ranks cannot share a sequence: cp={max(self.axes)} has no blocks of so many.")
        comm: Comm = self.comm
        if comm == "a2a+p2p" and layout.size < max(self.axes):
            comm = "a2a" if layout.size <= self.inner.size else "p2p"
        return comm, self.axes[layout.size]

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, pattern: Pattern) -> Tensor:
        groups = k.shape[2]
        both = all_gather_from(torch.cat((k, v), dim=2), self.axes[layout.size], 0)
        ordered = _gathered_order(both, layout, layout.size)
        k, v = ordered[:, :, :groups], ordered[:, :, groups:]
        tiling = Tiling(layout, pattern, q.device)
        return tiled_attention(q, k, v, tiles=tiling.gathered(), block=self.block)

    def _exchanged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SequenceLayout,
        pattern: Pattern,
        *,
        inner: Axis,
        outer: Axis | None,
    ) -> Tensor:
        check_exchanged_heads(q.shape[2], k.shape[2], inner.size)
        copies = max(1, inner.size // k.shape[2])
        k, v = (tensor if copies == 1 else tensor.repeat_interleave(copies, dim=2) for tensor in (k, v))
        parts = [tensor.reshape(*tensor.shape[:2], inner.size, -1, tensor.shape[3]) for tensor in (q, k, v)]
        num_q, num_kv = parts[0].shape[3], parts[1].shape[3]
        tokens = heads_to_tokens(torch.cat(parts, dim=3).flatten(2, 3), inner)
        ordered = _gathered_order(tokens, layout, inner.size)
        q, k, v = (
            ordered[:, :, start : start + size] for start, size in ((0, num_q), (num_q, num_kv), (num_q + num_kv, num_kv))
        )
        among = layout.over(layout.size // inner.size, outer.rank if outer is not None else 0)
        tiling = Tiling(among, pattern, q.device)
        if outer is None:
            attended = tiled_attention(q, k, v, tiles=tiling.gathered(), block=self.block)
        else:
            attended = ring_attention(q, k, v, ring=Ring(outer, tiling, self.block))
        return tokens_to_heads(_gathered_order(attended, layout, inner.size, back=True), inner)


def check_exchanged_heads(heads: int, kv_heads: int, size: int) -> None:
    """Refuse head counts that ``size`` ranks cannot exchange: each gets the same number, and its key/value heads with them.

    Raises:
        ValueError: with the numbers.
    """
    if heads % size:
        raise ValueError(
            f"{heads} query heads (of one tensor-parallel rank) do not divide over the {size} context-parallel ranks that "
            f"exchange heads; choose a divisor of {heads}, or cp_comm='p2p' or 'all_gather', which take any number."
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{kv_heads} key/value heads (of one tensor-parallel rank) and {size} context-parallel ranks that exchange heads: "
            f"one must divide the other; or choose cp_comm='p2p' or 'all_gather', which take any number."
        )


def _gathered_order(tensor: Tensor, layout: SequenceLayout, inner: int, *, back: bool = False) -> Tensor:
    """From ranks one after the other to the order of ``layout.over(size / inner, ..)``, or back. Same shape."""
    key = ("gathered", inner)
    if key not in layout.cache:
        layout.cache[key] = layout.gathered(inner, tensor.device)
        layout.cache["back", inner] = inverse(layout.cache[key])
    there, again = layout.cache[key], layout.cache["back", inner]
    return reorder(tensor, again, there) if back else reorder(tensor, there, again)
