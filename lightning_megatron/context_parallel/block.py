"""Softmax attention over one tile, with the log-sum-exp that tiles are put together by, and its backward.

Note [Tiles of one softmax]
With ``lse`` the log-sum-exp of a query's scores over all its tiles, the weights of a tile are ``exp(scores - lse)``. So a
tile's backward needs the final output and ``lse`` only, and no other tile; and outputs of tiles add up, each weighted by
``exp(lse_of_tile - lse)`` (Milakov & Gimelshein 2018; Dao et al. 2022, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.context_parallel.flash import (
    FlashCalls,
    PackageFlash,
    TorchFlash,
    flash_backward,
    flash_forward,
    insists_on_order,
)
from lightning_megatron.context_parallel.tiles import Tile

Kernel = Literal["auto", "math", "flash", "flash_attn", "cudnn"]
# Scores that the plain form holds at once: 2**26 in fp32 are 256 MB.
_MAX_SCORES = 2**26
_FLASH: dict[str, FlashCalls] = {"flash": TorchFlash(), "flash_attn": PackageFlash()}


@dataclass(frozen=True)
class BlockAttention:
    """How a tile is computed.

    Args:
        dropout: probability of dropping an attention weight.
        kernel: ``math`` for plain torch in fp32 or wider; ``flash`` and ``cudnn`` for fused kernels of torch on CUDA, where a
            tile has a form that they know; ``flash_attn`` for the package of that name; ``auto`` for cuDNN on Hopper and later
            if the tile is worth it, and flash, always under ``torch.use_deterministic_algorithms``: cuDNN's backward sums in
            another order each time.
    """

    dropout: float = 0.0
    kernel: Kernel = "auto"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Attention over the tile's keys alone.

        Args:
            q: queries, ``[n_q, B, h, d]``.
            k: keys, ``[n_k, B, g, d]``, g dividing h.
            v: values, the same.
            tile: which pairs.

        Returns:
            The output ``[n_q, B, h, d]`` and the log-sum-exp ``[n_q, B, h]``, fp32 or wider (``-inf``, with output 0, for a
            query that sees no key), and the random state that the backward repeats.
        """
        kernel = self._kernel(q, k, tile)
        if kernel == "cudnn":
            return _cudnn_forward(q, k, v, tile, self.dropout)
        if kernel != "math":
            return flash_forward(q, k, v, tile, dropout=self.dropout, calls=_FLASH[kernel])
        seed = torch.randint(2**31, (), device="cpu") if self.dropout > 0.0 else torch.zeros(())
        return *_math_forward(q, k, v, tile, _Masks(self.dropout, seed, q.device)), (seed,)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        tile: Tile,
        random: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tile's share of the gradients of q, k and v, from the final output and log-sum-exp of its queries.

        Shapes as in ``forward``; in the dtype of q or wider.
        """
        kernel = self._kernel(q, k, tile)
        if kernel == "cudnn":
            return _cudnn_backward(grad, q, k, v, out, lse, tile, self.dropout, random)
        if kernel != "math":
            calls = _FLASH[kernel]
            return flash_backward(grad, (q, k, v), tile, out=out, lse=lse, random=random, dropout=self.dropout, calls=calls)
        return _math_backward(grad, q, k, v, out, lse, tile, _Masks(self.dropout, random[0], q.device))

    def _kernel(self, q: Tensor, k: Tensor, tile: Tile) -> Kernel:
        size = q.shape[-1]
        narrow = q.dtype in (torch.float16, torch.bfloat16)
        if self.kernel == "math" or q.device.type != "cuda" or not narrow or size % 8 or size > 256:
            return "math"
        # Of a causal tile that is not square cuDNN would take another diagonal.
        plain = tile.lengths is None and (tile.form == "full" or (tile.form == "causal" and q.shape[0] == k.shape[0]))
        wanted = self.kernel == "cudnn" or (self.kernel == "auto" and self.dropout == 0.0 and _suits_cudnn(q, k))
        if plain and wanted:
            return "cudnn"
        return "flash_attn" if self.kernel == "flash_attn" else "flash"


def _suits_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN is the faster: on Hopper and later, at lengths that it does not have to plan anew for each time."""
    suits = all(length >= 1024 and length % 128 == 0 for length in (q.shape[0], k.shape[0]))
    suits = suits and not insists_on_order()
    return suits and torch.cuda.get_device_capability(q.device) >= (9, 0)


class _Masks:
    """Dropout masks, scaled, drawn in the same order in the forward and in the backward."""

    def __init__(self, p: float, seed: Tensor, device: torch.device) -> None:
        self._p = p
        self._generator = torch.Generator(device).manual_seed(int(seed)) if p > 0.0 else None

    def draw(self, like: Tensor) -> Tensor | None:
        if self._generator is None:
            return None
        kept = torch.rand(like.shape, generator=self._generator, device=like.device, dtype=torch.float32) >= self._p
        return kept.to(like.dtype) / (1.0 - self._p)


def _math_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, masks: _Masks) -> tuple[Tensor, Tensor]:
    wide_v = _wide(v)
    outs, lses = [], []
    for _, scores in _score_blocks(q, k, tile):
        lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, lse)
        dropped = masks.draw(weights)
        weights = weights if dropped is None else weights * dropped
        outs.append(torch.einsum("bgnst,tbgd->sbgnd", weights, wide_v).flatten(2, 3))
        lses.append(lse.permute(3, 0, 1, 2).flatten(2))
    return torch.cat(outs), torch.cat(lses)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, masks: _Masks
) -> tuple[Tensor, Tensor, Tensor]:
    groups, scale = k.shape[2], 1.0 / sqrt(q.shape[-1])
    wide_k, wide_v = _wide(k), _wide(v)
    grad_k, grad_v, grads_q = torch.zeros_like(wide_k), torch.zeros_like(wide_v), []
    for rows, scores in _score_blocks(q, k, tile):
        own_grad = _grouped(_wide(grad[rows]), groups)
        delta = (own_grad * _grouped(_wide(out[rows]), groups)).sum(-1).permute(1, 2, 3, 0)
        weights = _weights(scores, _grouped(lse[rows], groups).permute(1, 2, 3, 0))
        grad_weights = torch.einsum("sbgnd,tbgd->bgnst", own_grad, wide_v)
        dropped = masks.draw(weights)
        kept = weights if dropped is None else weights * dropped
        grad_weights = grad_weights if dropped is None else grad_weights * dropped
        grad_v += torch.einsum("bgnst,sbgnd->tbgd", kept, own_grad)
        grad_scores = weights * (grad_weights - delta[..., None]) * scale
        grads_q.append(torch.einsum("bgnst,tbgd->sbgnd", grad_scores, wide_k).flatten(2, 3))
        grad_k += torch.einsum("bgnst,sbgnd->tbgd", grad_scores, _grouped(_wide(q[rows]), groups))
    return torch.cat(grads_q), grad_k, grad_v


def _score_blocks(q: Tensor, k: Tensor, tile: Tile) -> Iterator[tuple[slice, Tensor]]:
    """Masked scores ``[B, g, h/g, rows, n_k]``, a run of queries at a time, so that not all are held at once."""
    wide_k, groups = _wide(k), k.shape[2]
    per_query = max(1, q.shape[1] * q.shape[2] * k.shape[0])
    step = max(1, min(q.shape[0], _MAX_SCORES // per_query))
    for start in range(0, q.shape[0], step):
        rows = slice(start, start + step)
        mask = tile.mask(q.shape[0], k.shape[0], num_rows=q.shape[1], device=q.device, queries=rows)
        own = _grouped(_wide(q[rows]), groups)
        scores = torch.einsum("sbgnd,tbgd->bgnst", own, wide_k) / sqrt(q.shape[-1])
        yield rows, scores if mask is None else scores.masked_fill(~mask[:, None, None], float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """``exp(scores - lse)``, 0 for a query that sees no key."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[n, B, h, ...] -> [n, B, groups, h / groups, ...]``."""
    return tensor.reshape(*tensor.shape[:2], groups, -1, *tensor.shape[3:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# cuDNN's kernels take [B, h, S, d].


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile, dropout: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    heads = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, dropout, tile.form == "causal", False
    )
    return out.permute(2, 0, 1, 3).float(), lse.reshape(out.shape[:3]).permute(2, 0, 1), (seed, offset)


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    dropout: float,
    random: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (tensor.permute(1, 2, 0, 3) for tensor in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.permute(1, 2, 0)[..., None].contiguous(),
        random[0],
        random[1],
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        dropout,
        tile.form == "causal",
    )
    return tuple(tensor.permute(2, 0, 1, 3) for tensor in grads)
