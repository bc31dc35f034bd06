"""Rotary positions on queries and keys, written beside the values into one fused tensor, in one pass; fp32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16  # heads that a program works on


def rotate_together(q: Tensor, k: Tensor, v: Tensor, *, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate q and k, leave v, and put them side by side: ``[S, B, h, d], [S, B, g, d] x 2 -> [S, B, (h + 2g) * d]``.

    Args:
        q: any strides, that of the last dim 1.
        k: likewise.
        v: likewise.
        cos: fp32 ``[S, 1, 1, d]``, contiguous, the two halves of the last dim alike.
        sin: likewise.
        inverse: rotate back, which is the gradient of rotating.
    """
    seq, batch, num_q, size = q.shape
    num_kv = k.shape[2]
    total = num_q + 2 * num_kv
    fused = q.new_empty((seq, batch, total * size))
    if fused.numel():
        with torch.cuda.device_of(q):
            _rotate_heads[(seq * batch, triton.cdiv(total, _HEADS))](
                *(q, k, v, cos, sin, fused),
                *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
                *(batch, num_q, num_kv, size // 2),
                SIGN=-1 if inverse else 1,
                HEADS=_HEADS,
                BLOCK=triton.next_power_of_2(size // 2),
                num_warps=4,
            )
    return fused


@triton.jit
def _rotate_heads(
    q,
    k,
    v,
    cos,
    sin,
    fused,
    q_seq,
    q_batch,
    q_head,
    k_seq,
    k_batch,
    k_head,
    v_seq,
    v_batch,
    v_head,
    num_batch,
    num_q,
    num_kv,
    half,
    SIGN: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position, batch = token // num_batch, token % num_batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < half
    is_q, is_k = inside & (head < num_q), inside & (head >= num_q) & (head < num_q + num_kv)
    is_v = inside & (head >= num_q + num_kv) & (head < num_q + 2 * num_kv)
    from_q = q + position * q_seq + batch * q_batch + head * q_head + column
    from_k = k + position * k_seq + batch * k_batch + (head - num_q) * k_head + column
    from_v = v + position * v_seq + batch * v_batch + (head - num_q - num_kv) * v_head + column
    # Of the three loads one finds something: adding them puts them together.
    first = tl.load(from_q, mask=is_q, other=0.0).to(tl.float32)
    first += tl.load(from_k, mask=is_k, other=0.0).to(tl.float32)
    first += tl.load(from_v, mask=is_v, other=0.0).to(tl.float32)
    second = tl.load(from_q + half, mask=is_q, other=0.0).to(tl.float32)
    second += tl.load(from_k + half, mask=is_k, other=0.0).to(tl.float32)
    second += tl.load(from_v + half, mask=is_v, other=0.0).to(tl.float32)
    turns = head < num_q + num_kv
    table = position * 2 * half + column
    c = tl.where(turns, tl.load(cos + table, mask=inside, other=0.0), 1.0)
    s = tl.where(turns, tl.load(sin + table, mask=inside, other=0.0), 0.0) * SIGN
    place = fused + (token * (num_q + 2 * num_kv) + head) * 2 * half + column
    is_any = inside & (head < num_q + 2 * num_kv)
    tl.store(place, first * c - second * s, mask=is_any)
    tl.store(place + half, second * c + first * s, mask=is_any)
