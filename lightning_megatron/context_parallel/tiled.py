"""Attention over keys that are all at hand: the tiles of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.merge import Merge
from lightning_megatron.context_parallel.parts import Part, add, num_places, put, take
from lightning_megatron.context_parallel.tiles import Tile


class _Apart:
    """As ``Merge``, for tiles that hold each query once."""

    def __init__(self, q: Tensor) -> None:
        self._out, self._lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=_wide(q.dtype), device=q.device)

    def add(self, part: Part, *, out: Tensor, lse: Tensor) -> None:
        put(self._out, part, out.to(self._out.dtype))
        put(self._lse, part, lse)

    def done(self) -> tuple[Tensor, Tensor]:
        return self._out, self._lse


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], block: BlockAttention) -> Tensor:
        # Where each query is in one tile there is nothing to merge, and no output is held in fp32.
        outputs = _Apart(q) if sum(num_places(tile.q, q) for tile in tiles) == len(q) else Merge(q)
        ctx.random, ctx.tiles, ctx.block = [], tiles, block
        for tile in tiles:
            own, own_lse, random = block.forward(take(q, tile.q), take(k, tile.k), take(v, tile.k), tile)
            outputs.add(tile.q, out=own, lse=own_lse)
            ctx.random.append(random)
        out, lse = outputs.done()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wide = _wide(k.dtype)
        is_apart = sum(num_places(tile.q, q) for tile in ctx.tiles) == len(q)
        grad_q = torch.empty_like(q) if is_apart else torch.zeros_like(q, dtype=wide)
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for tile, random in zip(ctx.tiles, ctx.random, strict=True):
            own_q, own_k, own_v = ctx.block.backward(
                take(grad, tile.q),
                take(q, tile.q),
                take(k, tile.k),
                take(v, tile.k),
                out=take(out, tile.q),
                lse=take(lse, tile.q),
                tile=tile,
                random=random,
            )
            if is_apart:
                put(grad_q, tile.q, own_q.to(q.dtype))
            else:
                add(grad_q, tile.q, own_q)
            add(grad_k, tile.k, own_k)
            add(grad_v, tile.k, own_v)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, *, tiles: list[Tile], block: BlockAttention) -> Tensor:
    """Queries ``[n, B, h, d]``, keys and values ``[S, B, g, d]``, to ``[n, B, h, d]``."""
    attended: Tensor = _TiledAttention.apply(q, k, v, tiles, block)  # type: ignore[no-untyped-call]
    return attended
