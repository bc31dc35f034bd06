"""Rotary positions on queries and keys, written beside the values into one fused tensor, in one pass; fp32 inside."""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_HEADS = 8  # of a program, one after another
_NUMBERS, _WARPS = 1024, 4  # of half of a head that a program takes at a time: 16 bytes a thread


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
    heads, block = gcd(num_q, num_kv, _MOST_HEADS), triton.next_power_of_2(size // 2)
    tokens = max(_NUMBERS // block, 1)
    if fused.numel():
        with torch.cuda.device_of(q):
            _rotate_heads[(triton.cdiv(seq * batch, tokens), total // heads)](
                *(q, k, v, cos, sin, fused),
                *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
                *(seq * batch, batch, num_q, num_kv),
                SIGN=-1 if inverse else 1,
                HALF=size // 2,
                HEADS=heads,
                TOKENS=tokens,
                BLOCK=block,
                num_warps=_WARPS,
            )
    return fused


@triton.jit
def _of_part(head, num_q, num_kv, of_q, of_k, of_v):
    # What belongs to the part that a head is of.
    return tl.where(head < num_q, of_q, tl.where(head < num_q + num_kv, of_k, of_v))


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
    num,
    num_batch,
    num_q,
    num_kv,
    SIGN: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # All heads of a program are of one part. A head is loaded before the one before it is written: no load waits behind a
    # store. The products and sums are spelt out, so that they are rounded alike wherever they stand.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    head = tl.program_id(1) * HEADS
    inside = (token < num) & (column < HALF)
    position = token // num_batch
    seq = _of_part(head, num_q, num_kv, q_seq, k_seq, v_seq)
    batch = _of_part(head, num_q, num_kv, q_batch, k_batch, v_batch)
    step = _of_part(head, num_q, num_kv, q_head, k_head, v_head)
    number = head - _of_part(head, num_q, num_kv, 0, num_q, num_q + num_kv)
    start = _of_part(head, num_q, num_kv, q, k, v) + number.to(tl.int64) * step
    row = position.to(tl.int64) * seq + (token - position * num_batch).to(tl.int64) * batch + column
    first = tl.load(start + row, mask=inside)
    second = tl.load(start + row + HALF, mask=inside)
    turns = inside & (head < num_q + num_kv)
    table = position.to(tl.int64) * (2 * HALF) + column
    c = tl.load(cos + table, mask=turns, other=1.0)  # values turn by an angle of zero
    s = tl.load(sin + table, mask=turns, other=0.0) * SIGN
    minus = s * -1.0
    place = fused + token.to(tl.int64) * ((num_q + 2 * num_kv) * 2 * HALF) + head * 2 * HALF + column
    for done in tl.static_range(HEADS):
        one, two = first.to(tl.float32), second.to(tl.float32)
        if done + 1 < HEADS:
            start += step
            first, second = tl.load(start + row, mask=inside), tl.load(start + row + HALF, mask=inside)
        tl.store(place, tl.fma(one, c, two * minus), mask=inside)
        tl.store(place + HALF, tl.fma(two, c, one * s), mask=inside)
        place += 2 * HALF
