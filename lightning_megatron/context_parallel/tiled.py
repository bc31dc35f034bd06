"""Attention over keys that are all at hand: the tiles of one rank, each set of queries in one tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.parts import add, put, take
from lightning_megatron.context_parallel.tiles import Tile


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], block: BlockAttention) -> Tensor:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=_wide(q.dtype), device=q.device)
        ctx.random, ctx.tiles, ctx.block = [], tiles, block
        for tile in tiles:
            own, own_lse, random = block.forward(take(q, tile.q), take(k, tile.k), take(v, tile.k), tile)
            put(out, tile.q, own.to(out.dtype))
            put(lse, tile.q, own_lse)
            ctx.random.append(random)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        wide = _wide(k.dtype)
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
            put(grad_q, tile.q, own_q.to(q.dtype))
            add(grad_k, tile.k, own_k)
            add(grad_v, tile.k, own_v)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, *, tiles: list[Tile], block: BlockAttention) -> Tensor:
    """Queries ``[n, B, h, d]``, keys and values ``[S, B, g, d]``, to ``[n, B, h, d]``. Tiles hold each query once."""
    attended: Tensor = _TiledAttention.apply(q, k, v, tiles, block)  # type: ignore[no-untyped-call]
    return attended
