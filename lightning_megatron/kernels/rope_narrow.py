"""Rotary positions on the way into 8-bit attention, and on the way of 8-bit gradients back; one pass each, fp32 inside.

What is rotated is rounded to bf16 first and then to 8 bits, as if it had been written in between.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_HEADS = 8  # of a program, one after another
_NUMBERS, _WARPS = 1024, 4  # of half of a head that a program takes at a time
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
    grid, tile = _tiles(seq * batch, heads, size)
    with torch.cuda.device_of(fused):
        _rotate_narrow[grid](*(fused, cos, sin, *parts, scale, amax, seq * batch, batch, num_q, num_kv), **tile)
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
    num_kv = k.shape[2]
    fused = torch.empty((seq, batch, (num_q + 2 * num_kv) * size), dtype=torch.bfloat16, device=q.device)
    grid, tile = _tiles(seq * batch, (num_q, num_kv), size)
    with torch.cuda.device_of(q):
        _rotate_narrow_back[grid](*(q, k, v, *scale_inv, cos, sin, fused, seq * batch, batch, num_q, num_kv), **tile)
    return fused


def _tiles(num: int, heads: tuple[int, int], size: int) -> tuple[tuple[int, int], dict[str, int]]:
    # The programs, and what each works on.
    num_q, num_kv = heads
    each, tokens = gcd(num_q, num_kv, _MOST_HEADS), max(_NUMBERS // (size // 2), 1)
    tile = {"HALF": size // 2, "HEADS": each, "TOKENS": tokens, "num_warps": _WARPS}
    return (triton.cdiv(num, tokens), (num_q + 2 * num_kv) // each), tile


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
    wide = fused.float().view(32, 2, 8, size)
    expected = torch.cat((_turned(wide[:, :, :6], cos, sin), wide[:, :, 6:]), dim=2).bfloat16().float()
    for factor in (32.0, 1024.0):  # the second is too large
        scale, amax = torch.full((1,), factor, device=device), torch.zeros(1, device=device)
        parts = rotate_narrow(fused, heads, cos=cos, sin=sin, scale=scale, amax=amax)
        made = torch.cat([part.view(E4M3).float() for part in parts], dim=2)
        rounded = (expected * scale).clamp(-448.0, 448.0).to(E4M3).float()
        if not ((made == rounded).float().mean() > 0.99 and torch.allclose(amax, expected.abs().amax(), rtol=0.01)):
            return False
    narrow = [x.to(E5M2).contiguous() for x in expected.split([4, 2, 2], dim=2)]
    inverses = tuple(torch.full((1,), value, device=device) for value in (1.0, 0.5, 2.0))
    back = rotate_narrow_back(*(x.view(torch.uint8) for x in narrow), scale_inv=inverses, cos=cos, sin=sin)
    wide = torch.cat([x.float() * inverse for x, inverse in zip(narrow, inverses, strict=True)], dim=2)
    wide = torch.cat((_turned(wide[:, :, :6], cos, -sin), wide[:, :, 6:]), dim=2).flatten(2)
    return torch.allclose(back.float(), wide, rtol=0.01, atol=0.01)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


@triton.jit
def _of_part(head, num_q, num_kv, of_q, of_k, of_v):
    # What belongs to the part that a head is of.
    return tl.where(head < num_q, of_q, tl.where(head < num_q + num_kv, of_k, of_v))


@triton.jit
def _part_of(q, k, v, token, head, num_q, num_kv, HALF: tl.constexpr):
    # Where the tokens' rows of a head begin in the part, contiguous, that it is of.
    number = head - _of_part(head, num_q, num_kv, 0, num_q, num_q + num_kv)
    width = _of_part(head, num_q, num_kv, num_q, num_kv, num_kv) * (2 * HALF)
    return (
        _of_part(head, num_q, num_kv, q, k, v) + token.to(tl.int64) * width + number * (2 * HALF) + tl.arange(0, HALF)[None, :]
    )


@triton.jit
def _angles(cos, sin, token, num_batch, inside, HALF: tl.constexpr):
    table = (token // num_batch).to(tl.int64) * (2 * HALF) + tl.arange(0, HALF)[None, :]
    return tl.load(cos + table, mask=inside, other=1.0), tl.load(sin + table, mask=inside, other=0.0)


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
    num,
    num_batch,
    num_q,
    num_kv,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # As `_rotate_heads` in rope.py. Rounding to 8 bits goes to the largest number of the format by itself; `are_right` looks
    # whether it does.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.program_id(1) * HEADS
    inside = token < num
    row = token.to(tl.int64) * ((num_q + 2 * num_kv) * 2 * HALF) + head * 2 * HALF + tl.arange(0, HALF)[None, :]
    first, second = tl.load(fused + row, mask=inside, other=0.0), tl.load(fused + row + HALF, mask=inside, other=0.0)
    c, s = _angles(cos, sin, token, num_batch, inside & (head < num_q + num_kv), HALF)  # values turn by an angle of zero
    minus = s * -1.0
    place = _part_of(q, k, v, token, head, num_q, num_kv, HALF)
    factor = tl.load(scale)
    largest = tl.zeros((TOKENS, HALF), dtype=tl.float32)
    for done in tl.static_range(HEADS):
        one, two = first.to(tl.float32), second.to(tl.float32)
        if done + 1 < HEADS:
            row += 2 * HALF
            first, second = tl.load(fused + row, mask=inside, other=0.0), tl.load(fused + row + HALF, mask=inside, other=0.0)
        turned, behind = tl.fma(one, c, two * minus), tl.fma(two, c, one * s)
        turned, behind = turned.to(tl.bfloat16).to(tl.float32), behind.to(tl.bfloat16).to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(turned), tl.abs(behind)))
        tl.store(place, (turned * factor).to(tl.float8e4nv), mask=inside)
        tl.store(place + HALF, (behind * factor).to(tl.float8e4nv), mask=inside)
        place += 2 * HALF
    met = tl.max(largest)
    if met > tl.load(amax):  # most programs find a larger one there already
        tl.atomic_max(amax, met, sem="relaxed")


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
    num,
    num_batch,
    num_q,
    num_kv,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.program_id(1) * HEADS
    inside = token < num
    place = _part_of(q, k, v, token, head, num_q, num_kv, HALF)
    first, second = tl.load(place, mask=inside, other=0), tl.load(place + HALF, mask=inside, other=0)
    c, s = _angles(cos, sin, token, num_batch, inside & (head < num_q + num_kv), HALF)
    minus = s * -1.0
    inverse = tl.load(_of_part(head, num_q, num_kv, q_inverse, k_inverse, v_inverse))
    row = token.to(tl.int64) * ((num_q + 2 * num_kv) * 2 * HALF) + head * 2 * HALF + tl.arange(0, HALF)[None, :]
    for done in tl.static_range(HEADS):
        one, two = _wide(first) * inverse, _wide(second) * inverse
        if done + 1 < HEADS:
            place += 2 * HALF
            first, second = tl.load(place, mask=inside, other=0), tl.load(place + HALF, mask=inside, other=0)
        tl.store(fused + row, tl.fma(one, c, two * s), mask=inside)
        tl.store(fused + row + HALF, tl.fma(two, c, one * minus), mask=inside)
        row += 2 * HALF
