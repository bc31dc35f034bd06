"""Rotary positions on the way into 8-bit attention, and on the way of 8-bit gradients back; one pass each, fp32 inside.

What is rotated is rounded to bf16 first and then to 8 bits, as if it had been written in between.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16  # heads that a program works on
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rotate_narrow(
    fused: Tensor, heads: tuple[int, int], *, cos: Tensor, sin: Tensor, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate q and k, and round them and v to e4m3: ``[S, B, (h + 2g) * d]`` to bytes ``[S, B, h, d], [S, B, g, d] x 2``.

    Args:
        fused: ``[q; k; v]`` along the last dim, bf16, contiguous.
        heads: h and g.
        cos: fp32 ``[S, 1, 1, d]``, contiguous, the two halves of the last dim alike.
        sin: likewise.
        scale: what to multiply by before rounding, fp32 ``[1]``.
        amax: raised to the largest magnitude, fp32 ``[1]``.
    """
    seq, batch, _ = fused.shape
    (num_q, num_kv), size = heads, cos.shape[-1]
    parts = [torch.empty((seq, batch, num, size), dtype=E4M3, device=fused.device) for num in (num_q, num_kv, num_kv)]
    with torch.cuda.device_of(fused):
        _rotate_narrow[(seq * batch, triton.cdiv(num_q + 2 * num_kv, _HEADS))](
            *(fused, cos, sin, *parts, scale, amax, batch, num_q, num_kv),
            HALF=size // 2,
            HEADS=_HEADS,
            num_warps=4,
        )
    q, k, v = (part.view(torch.uint8) for part in parts)
    return q, k, v


def rotate_narrow_back(q: Tensor, k: Tensor, v: Tensor, *, scale_inv: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the fused tensor in bf16, ``[S, B, (h + 2g) * d]``, of those of its parts in e5m2 bytes.

    Args:
        q: ``[S, B, h, d]``, contiguous.
        k: ``[S, B, g, d]``, contiguous.
        v: likewise.
        scale_inv: the inverse factor of each, fp32 ``[1]``.
        cos: see ``rotate_narrow``.
        sin: likewise.
    """
    seq, batch, num_q, size = q.shape
    total = num_q + 2 * k.shape[2]
    fused = torch.empty((seq, batch, total * size), dtype=torch.bfloat16, device=q.device)
    with torch.cuda.device_of(q):
        _rotate_narrow_back[(seq * batch, triton.cdiv(total, _HEADS))](
            *(q, k, v, *scale_inv, cos, sin, fused, batch, num_q, k.shape[2]),
            HALF=size // 2,
            HEADS=_HEADS,
            num_warps=4,
        )
    return fused


def fits(fused: Tensor, cos: Tensor) -> bool:
    """Whether the kernels take a fused tensor ``[S, B, n]`` and such tables."""
    size = cos.shape[-1]
    is_table = cos.shape == (fused.shape[0], 1, 1, size) and cos.dtype == torch.float32
    return fused.dtype == torch.bfloat16 and is_table and size >= 32 and size & (size - 1) == 0


@cache
def are_right(device: torch.device) -> bool:
    """Whether this machine compiles the kernels rightly. Waits for the device."""
    generator = torch.Generator(device).manual_seed(0)
    heads, size = (4, 2), 128
    fused = torch.randn(32, 2, 8 * size, device=device, dtype=torch.bfloat16, generator=generator)
    angles = torch.rand(32, 1, 1, size // 2, device=device, generator=generator).repeat(1, 1, 1, 2) * 6.0
    cos, sin = angles.cos(), angles.sin()
    scale, amax = torch.full((1,), 32.0, device=device), torch.zeros(1, device=device)
    parts = rotate_narrow(fused, heads, cos=cos, sin=sin, scale=scale, amax=amax)
    wide = fused.float().view(32, 2, 8, size)
    turned = _turned(wide[:, :, :6], cos, sin)
    expected = torch.cat((turned, wide[:, :, 6:]), dim=2).bfloat16().float()
    made = torch.cat([part.view(E4M3).float() for part in parts], dim=2) / scale
    rounded = (expected * scale).to(E4M3).float() / scale
    good = (made == rounded).float().mean() > 0.99 and torch.allclose(amax, expected.abs().amax(), rtol=0.01)
    narrow = [x.to(E5M2).contiguous() for x in expected.split([4, 2, 2], dim=2)]
    inverses = tuple(torch.full((1,), value, device=device) for value in (1.0, 0.5, 2.0))
    back = rotate_narrow_back(*(x.view(torch.uint8) for x in narrow), scale_inv=inverses, cos=cos, sin=sin)
    wide = torch.cat([x.float() * inverse for x, inverse in zip(narrow, inverses, strict=True)], dim=2)
    wide = torch.cat((_turned(wide[:, :, :6], cos, -sin), wide[:, :, 6:]), dim=2).flatten(2)
    return bool(good) and torch.allclose(back.float(), wide, rtol=0.01, atol=0.01)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


@triton.jit
def _clamped(x):
    """To e4m3's range; NaN stays NaN."""
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def _rotate_narrow(
    fused,
    cos,
    sin,
    q,
    k,
    v,
    scale,
    amax,
    num_batch,
    num_q,
    num_kv,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    total = num_q + 2 * num_kv
    inside = (head < total) & (column < HALF)
    place = fused + (token * total + head) * (2 * HALF) + column
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    table = (token // num_batch) * (2 * HALF) + column
    turns = head < num_q + num_kv
    c = tl.where(turns, tl.load(cos + table), 1.0)
    s = tl.where(turns, tl.load(sin + table), 0.0)
    one = (first * c - second * s).to(tl.bfloat16).to(tl.float32)
    two = (second * c + first * s).to(tl.bfloat16).to(tl.float32)
    met = tl.max(tl.max(tl.maximum(tl.abs(one), tl.abs(two)), axis=1), axis=0)
    if met > tl.load(amax):  # most programs find a larger one there already
        tl.atomic_max(amax, met, sem="relaxed")
    factor = tl.load(scale)
    one = _clamped(one * factor).to(tl.float8e4nv)
    two = _clamped(two * factor).to(tl.float8e4nv)
    is_q = inside & (head < num_q)
    is_k = inside & (head >= num_q) & (head < num_q + num_kv)
    is_v = inside & (head >= num_q + num_kv)
    to_q = q + (token * num_q + head) * (2 * HALF) + column
    to_k = k + (token * num_kv + head - num_q) * (2 * HALF) + column
    to_v = v + (token * num_kv + head - num_q - num_kv) * (2 * HALF) + column
    tl.store(to_q, one, mask=is_q)
    tl.store(to_q + HALF, two, mask=is_q)
    tl.store(to_k, one, mask=is_k)
    tl.store(to_k + HALF, two, mask=is_k)
    tl.store(to_v, one, mask=is_v)
    tl.store(to_v + HALF, two, mask=is_v)


@triton.jit
def _wide(bits):
    """e5m2 is the upper half of fp16."""
    return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _rotate_narrow_back(
    q,
    k,
    v,
    q_inverse,
    k_inverse,
    v_inverse,
    cos,
    sin,
    fused,
    num_batch,
    num_q,
    num_kv,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    total = num_q + 2 * num_kv
    inside = (head < total) & (column < HALF)
    is_q = inside & (head < num_q)
    is_k = inside & (head >= num_q) & (head < num_q + num_kv)
    is_v = inside & (head >= num_q + num_kv)
    from_q = q + (token * num_q + head) * (2 * HALF) + column
    from_k = k + (token * num_kv + head - num_q) * (2 * HALF) + column
    from_v = v + (token * num_kv + head - num_q - num_kv) * (2 * HALF) + column
    # Of the three loads one finds something: adding them puts them together.
    first = tl.load(from_q, mask=is_q, other=0) + tl.load(from_k, mask=is_k, other=0) + tl.load(from_v, mask=is_v, other=0)
    second = tl.load(from_q + HALF, mask=is_q, other=0) + tl.load(from_k + HALF, mask=is_k, other=0)
    second += tl.load(from_v + HALF, mask=is_v, other=0)
    inverse = tl.where(
        head < num_q, tl.load(q_inverse), tl.where(head < num_q + num_kv, tl.load(k_inverse), tl.load(v_inverse))
    )
    one, two = _wide(first) * inverse, _wide(second) * inverse
    table = (token // num_batch) * (2 * HALF) + column
    turns = head < num_q + num_kv
    c = tl.where(turns, tl.load(cos + table), 1.0)
    s = tl.where(turns, tl.load(sin + table), 0.0)
    place = fused + (token * total + head) * (2 * HALF) + column
    tl.store(place, one * c + two * s, mask=inside)
    tl.store(place + HALF, two * c - one * s, mask=inside)
