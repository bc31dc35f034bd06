"""The gradient of a fused projection before its rotation, in 8 bits, of those of queries, keys and values; fp32 inside."""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.kernels.narrow import Narrow, _empty, _factor, _finished, _pair, _rounded, _words

_TOKENS, _MOST_HEADS, _WARPS = 64, 8, 8


def fits(q: Tensor, k: Tensor, v: Tensor, cos: Tensor) -> bool:
    """Whether the kernel takes gradients ``[S, B, h, d], [S, B, g, d] x 2`` and such tables."""
    seq, batch, _, size = q.shape
    is_table = cos.shape == (seq, 1, 1, size) and cos.dtype == torch.float32
    kinds = {part.dtype for part in (q, k, v)}
    return kinds == {torch.bfloat16} and is_table and size >= 32 and size & (size - 1) == 0 and seq * batch % 128 == 0


def unrotate_narrow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    amax: Tensor,
    scale: Tensor | None = None,
    scale_inv: Tensor | None = None,
) -> Narrow:
    """Rotate gradients of q and k back, put them beside that of v, and round to e5m2: ``[S * B, (h + 2g) * d]``.

    Args:
        q: ``[S, B, h, d]``, any strides.
        k: ``[S, B, g, d]``, likewise.
        v: likewise.
        cos: fp32 ``[S, 1, 1, d]``, the two halves of the last dim alike.
        sin: likewise.
        amax: raised to the largest magnitude, fp32 ``[1]``; zero if there is no ``scale``.
        scale: what to multiply by before rounding, fp32 ``[1]``; if not given, it follows from the largest magnitude.
        scale_inv: its inverse.
    """
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    seq, batch, num_q, size = q.shape
    num_kv, num = k.shape[2], seq * batch
    total = num_q + 2 * num_kv
    result = _empty(q, num, total * size, torch.float8_e5m2, scale_inv)
    rows, columns, inverse = result
    heads = gcd(total, _MOST_HEADS)
    with torch.cuda.device_of(q):
        for first in (True, False) if scale is None else (False,):
            _unrotate_narrow[(num // _TOKENS, total // heads)](
                *(q, k, v, cos.contiguous(), sin.contiguous(), rows, _words(columns), inverse),
                *(amax if scale is None else scale, amax),
                *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
                *(num, batch, num_q, num_kv),
                HALF=size // 2,
                HEADS=heads,
                KNOWN=scale is not None,
                FIRST=first,
                TOKENS=_TOKENS,
                num_warps=_WARPS,
            )
    return _finished(result)


@cache
def is_right(device: torch.device) -> bool:
    """Whether the kernel is right as this machine compiles it. Waits for the device."""
    generator = torch.Generator(device).manual_seed(0)
    fused = torch.randn(128, 2, 8, 64, device=device, dtype=torch.bfloat16, generator=generator)
    q, k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in fused.split([4, 2, 2], dim=2))
    angles = torch.rand(128, 1, 1, 32, device=device, generator=generator).repeat(1, 1, 1, 2) * 6.0
    first, second = fused[:, :, :6].float().chunk(2, dim=-1)
    turned = fused[:, :, :6].float() * angles.cos() + torch.cat((second, -first), dim=-1) * angles.sin()
    expected = torch.cat((turned, fused[:, :, 6:].float()), dim=2).reshape(256, -1)
    scale = torch.full((1,), 256.0, device=device)
    for options in ({"scale": scale, "scale_inv": scale.reciprocal()}, {}):
        amax = torch.zeros(1, device=device)
        made = unrotate_narrow(q, k, v, cos=angles.cos(), sin=angles.sin(), amax=amax, **options)
        rounded = (expected / made.scale_inv).clamp(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8)
        same = bool((rounded == made.rows).float().mean() > 0.99) and torch.equal(made.rows.t(), made.columns)
        if not same or not torch.allclose(amax, expected.abs().amax(), rtol=1e-4):
            return False
    return True


@triton.jit
def _back(q, k, v, tokens, head, c, s, strides, num_batch, num_q, num_kv, HALF: tl.constexpr):
    # Both halves of one head's gradient, rotated back: [.., HALF] each.
    q_seq, q_batch, q_head, k_seq, k_batch, k_head, v_seq, v_batch, v_head = strides
    position, batch = (tokens // num_batch)[:, None], (tokens % num_batch)[:, None]
    column = tl.arange(0, HALF)[None, :]
    if head < num_q:
        start = q + position * q_seq + batch * q_batch + head * q_head + column
        first, second = tl.load(start).to(tl.float32), tl.load(start + HALF).to(tl.float32)
        one, two = first * c + second * s, second * c - first * s
    elif head < num_q + num_kv:
        start = k + position * k_seq + batch * k_batch + (head - num_q) * k_head + column
        first, second = tl.load(start).to(tl.float32), tl.load(start + HALF).to(tl.float32)
        one, two = first * c + second * s, second * c - first * s
    else:
        start = v + position * v_seq + batch * v_batch + (head - num_q - num_kv) * v_head + column
        one, two = tl.load(start).to(tl.float32), tl.load(start + HALF).to(tl.float32)
    return one, two


@triton.jit
def _token_back(q, k, v, cos, sin, tokens, head, strides, num_batch, num_q, num_kv, HALF: tl.constexpr):
    # The same with the tokens' own angles, and the largest magnitude.
    table = (tokens // num_batch)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    c, s = tl.load(cos + table), tl.load(sin + table)
    one, two = _back(q, k, v, tokens, head, c, s, strides, num_batch, num_q, num_kv, HALF)
    return one, two, tl.max(tl.maximum(tl.abs(one), tl.abs(two)))


@triton.jit
def _store_row(place, one, two, factor, HALF: tl.constexpr):
    # Rounds both halves of a head and writes them; what was rounded, in fp32.
    one, two = _rounded(one, factor, 57344.0), _rounded(two, factor, 57344.0)
    tl.store(place, one.to(tl.float8e5))
    tl.store(place + HALF, two.to(tl.float8e5))
    return one, two


@triton.jit
def _unrotate_narrow(
    q,
    k,
    v,
    cos,
    sin,
    rows,
    columns,
    inverse,
    scale,
    amax,
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
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KNOWN: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # Four tokens in a word: see the Note of narrow.py.
    words = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    column = tl.arange(0, HALF)
    width = (num_q + 2 * num_kv) * 2 * HALF
    strides = (q_seq, q_batch, q_head, k_seq, k_batch, k_head, v_seq, v_batch, v_head)
    largest = 0.0
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 57344.0)
    for number in tl.range(HEADS):
        head = tl.program_id(1) * HEADS + number
        packed_one = tl.zeros((TOKENS // 4, HALF), dtype=tl.int32)
        packed_two = tl.zeros((TOKENS // 4, HALF), dtype=tl.int32)
        for pair in tl.static_range(2):
            token = words * 4 + 2 * pair
            one, two, met = _token_back(q, k, v, cos, sin, token, head, strides, num_batch, num_q, num_kv, HALF)
            after, behind, more = _token_back(q, k, v, cos, sin, token + 1, head, strides, num_batch, num_q, num_kv, HALF)
            largest = tl.maximum(largest, tl.maximum(met, more))
            if not FIRST:
                place = rows + token[:, None] * width + head * 2 * HALF + column[None, :]
                one, two = _store_row(place, one, two, factor, HALF)
                after, behind = _store_row(place + width, after, behind, factor, HALF)
                packed_one = packed_one | (_pair(one, after, True) << (16 * pair))
                packed_two = packed_two | (_pair(two, behind, True) << (16 * pair))
        if not FIRST:
            across = columns + (head * 2 * HALF + column)[:, None].to(tl.int64) * (num // 4) + words[None, :]
            tl.store(across, tl.trans(packed_one))
            tl.store(across + tl.cast(HALF, tl.int64) * (num // 4), tl.trans(packed_two))
    if KNOWN or FIRST:
        tl.atomic_max(amax, largest, sem="relaxed")
