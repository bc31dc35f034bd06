"""Rotating heads (Su et al. 2021) in the half-rotation convention: one pass where there are kernels, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.kernels import runs_on


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + head_dim/2)``: heads ``[S, B, h, head_dim]``, tables ``[S, 1, 1, head_dim]``. Same shape.

    Computed in the wider of the two dtypes (fp32 for 16-bit heads), rounded once to the dtype of the heads.
    """
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (heads * cos + turned * sin).to(heads.dtype)


def split_heads(fused: Tensor, heads: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views ``[S, B, h, d]``, ``[S, B, g, d]`` and again of ``[S, B, (h + 2g) * d]``; ``heads`` are h and g."""
    num_q, num_kv = heads
    parts = torch.split(fused, [num_q * head_dim, num_kv * head_dim, num_kv * head_dim], dim=-1)
    q, k, v = (part.view(*part.shape[:-1], -1, head_dim) for part in parts)
    return q, k, v


def rotate_together(q: Tensor, k: Tensor, v: Tensor, *, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """``[S, B, h, d], [S, B, g, d] x 2 -> [S, B, (h + 2g) * d]``; ``inverse`` rotates back, which is the gradient."""
    if runs_on(q) and cos.shape == (q.shape[0], 1, 1, q.shape[3]):
        from lightning_megatron.kernels.rope import rotate_together as by_kernel

        q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
        return by_kernel(q, k, v, cos=cos.contiguous(), sin=sin.contiguous(), inverse=inverse)
    sin = -sin if inverse else sin
    return torch.cat((apply_rope(q, cos, sin).flatten(2), apply_rope(k, cos, sin).flatten(2), v.flatten(2)), dim=-1)
