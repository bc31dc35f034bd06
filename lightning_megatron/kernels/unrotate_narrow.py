"""The gradient of a fused projection before its rotation, in 8 bits, of those of queries, keys and values; fp32 inside."""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.kernels.narrow import Factor, Narrow, _factor, _pair, narrowed

_MOST_HEADS, _MOST_TOKENS = 8, 128  # of a program, one head after another
_TILE, _A_WARP = 8192, 1024  # numbers of a head that a program takes at a time, and a warp


def fits(q: Tensor, k: Tensor, v: Tensor, cos: Tensor) -> bool:
    """Whether the kernel takes gradients ``[S, B, h, d], [S, B, g, d] x 2`` and such tables."""
    seq, batch, _, size = q.shape
    is_table = cos.shape == (seq, 1, 1, size) and cos.dtype == torch.float32
    kinds = {part.dtype for part in (q, k, v)}
    return kinds == {torch.bfloat16} and is_table and size >= 32 and size & (size - 1) == 0 and seq * batch % 128 == 0


def unrotate_narrow(q: Tensor, k: Tensor, v: Tensor, factor: Factor, *, cos: Tensor, sin: Tensor) -> Narrow:
    """Rotate gradients of q and k back, put them beside that of v, and round to e5m2: ``[S * B, (h + 2g) * d]``.

    Args:
        q: ``[S, B, h, d]``, any strides.
        k: ``[S, B, g, d]``, likewise.
        v: likewise.
        factor: what to multiply by before rounding.
        cos: fp32 ``[S, 1, 1, d]``, the two halves of the last dim alike.
        sin: likewise.
    """
    q, k, v = (part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v))
    seq, batch, num_q, size = q.shape
    num_kv, num = k.shape[2], seq * batch
    total = num_q + 2 * num_kv
    heads = gcd(num_q, num_kv, _MOST_HEADS)
    tokens = min(_MOST_TOKENS, max(_TILE // size, 4))

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        _unrotate_narrow[(num // tokens, total // heads)](
            *(q, k, v, cos.contiguous(), sin.contiguous(), rows, columns, *numbers),
            *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
            *(num, batch, num_q, num_kv),
            HALF=size // 2,
            HEADS=heads,
            MODE=mode,
            TOKENS=tokens,
            num_warps=max(tokens * size // _A_WARP, 1),
        )

    return narrowed(q, (num, total * size), torch.float8_e5m2, factor=factor, launch=launch)


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
    scales = [torch.full((1,), factor, device=device) for factor in (256.0, 65536.0)]  # the second is too large
    factors = [Factor(torch.zeros(1, device=device), scale=scale, scale_inv=scale.reciprocal()) for scale in scales]
    factors += [Factor(torch.zeros(1, device=device), guess=guess) for guess in (torch.zeros(1, device=device), *scales)]
    for factor in factors:
        made = unrotate_narrow(q, k, v, factor, cos=angles.cos(), sin=angles.sin())
        rounded = (expected / made.scale_inv).clamp(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8)
        same = bool((rounded == made.rows).float().mean() > 0.99) and torch.equal(made.rows.t(), made.columns)
        if not same or not torch.allclose(factor.amax, expected.abs().amax(), rtol=1e-4):
            return False
    return True


@triton.jit
def _of_part(head, num_q, num_kv, of_q, of_k, of_v):
    # What belongs to the part that a head is of.
    return tl.where(head < num_q, of_q, tl.where(head < num_q + num_kv, of_k, of_v))


@triton.jit
def _part_of(q, k, v, head, strides, num_q, num_kv):
    # Where a program's first head begins, and its strides along S, B and heads.
    start = _of_part(head, num_q, num_kv, q, k, v)
    seq = _of_part(head, num_q, num_kv, strides[0], strides[3], strides[6])
    batch = _of_part(head, num_q, num_kv, strides[1], strides[4], strides[7])
    step = _of_part(head, num_q, num_kv, strides[2], strides[5], strides[8])
    number = head - _of_part(head, num_q, num_kv, 0, num_q, num_q + num_kv)
    return start + number.to(tl.int64) * step, seq, batch, step


@triton.jit
def _halves(start, token, num_batch, seq, batch, inside, HALF: tl.constexpr):
    # Both halves of one head's gradient, in 16 bits: [.., HALF] each.
    position = token // num_batch
    row = position.to(tl.int64) * seq + (token - position * num_batch).to(tl.int64) * batch
    place = start + row[:, None] + tl.arange(0, HALF)[None, :]
    return tl.load(place, mask=inside), tl.load(place + HALF, mask=inside)


@triton.jit
def _four(start, words, num_batch, seq, batch, inside, HALF: tl.constexpr):
    # The same of the four tokens of a word.
    return (
        _halves(start, words * 4, num_batch, seq, batch, inside, HALF),
        _halves(start, words * 4 + 1, num_batch, seq, batch, inside, HALF),
        _halves(start, words * 4 + 2, num_batch, seq, batch, inside, HALF),
        _halves(start, words * 4 + 3, num_batch, seq, batch, inside, HALF),
    )


@triton.jit
def _angles(cos, sin, token, num_batch, turns, HALF: tl.constexpr):
    place = (token // num_batch).to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    return tl.load(cos + place, mask=turns), tl.load(sin + place, mask=turns)


@triton.jit
def _four_angles(cos, sin, words, num_batch, turns, HALF: tl.constexpr):
    return (
        _angles(cos, sin, words * 4, num_batch, turns, HALF),
        _angles(cos, sin, words * 4 + 1, num_batch, turns, HALF),
        _angles(cos, sin, words * 4 + 2, num_batch, turns, HALF),
        _angles(cos, sin, words * 4 + 3, num_batch, turns, HALF),
    )


@triton.jit
def _turned_back(halves, angles, turns):
    first, second = halves[0].to(tl.float32), halves[1].to(tl.float32)
    c, s = angles
    one, two = tl.fma(first, c, second * s), tl.fma(second, c, first * (s * -1.0))  # rounded as on the way there
    return tl.where(turns, one, first), tl.where(turns, two, second)


@triton.jit
def _store_rows(place, first, second, factor, width):
    # Rounds what two neighbouring tokens have in one half of a head, writes it, and returns it as a pair. Rounding to
    # 8 bits goes to the largest number of the format by itself, in both instructions; `is_right` looks whether it does.
    first, second = first * factor, second * factor
    tl.store(place, first.to(tl.float8e5))
    tl.store(place + width, second.to(tl.float8e5))
    return _pair(first, second, True)


@triton.jit
def _head(given, angles, turns, row, largest, factor, width):
    # Rotates one head of four tokens a word back, and rounds and writes its rows; the words of both halves, and what is the
    # largest now.
    packed_one = tl.zeros(largest.shape, dtype=tl.int32)
    packed_two = tl.zeros(largest.shape, dtype=tl.int32)
    for pair in tl.static_range(2):
        one, two = _turned_back(given[2 * pair], angles[2 * pair], turns)
        after, behind = _turned_back(given[2 * pair + 1], angles[2 * pair + 1], turns)
        largest = tl.maximum(largest, tl.maximum(tl.abs(one), tl.abs(two)))
        largest = tl.maximum(largest, tl.maximum(tl.abs(after), tl.abs(behind)))
        place = row + 2 * pair * width
        packed_one = packed_one | (_store_rows(place, one, after, factor, width) << (16 * pair))
        packed_two = packed_two | (_store_rows(place + largest.shape[1], two, behind, factor, width) << (16 * pair))
    return packed_one, packed_two, largest


@triton.jit
def _heads(
    q,
    k,
    v,
    cos,
    sin,
    rows,
    columns,
    factor,
    strides,
    num,
    num_batch,
    num_q,
    num_kv,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # Four tokens in a word: see the Note of narrow.py. All heads of a program are of one part. A head is loaded while the
    # one before it is worked on; the angles stay in registers. Returns the largest magnitude.
    words = tl.program_id(0) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    head = tl.program_id(1) * HEADS
    turns = head < num_q + num_kv
    start, seq, batch, step = _part_of(q, k, v, head, strides, num_q, num_kv)
    given = _four(start, words, num_batch, seq, batch, True, HALF)
    angles = _four_angles(cos, sin, words, num_batch, turns, HALF)
    width = (num_q + 2 * num_kv) * 2 * HALF
    column = head * 2 * HALF + tl.arange(0, HALF)
    row = rows + (words * 4).to(tl.int64)[:, None] * width + column[None, :]
    across = columns + column[:, None].to(tl.int64) * (num // 4) + words[None, :]
    largest = tl.zeros((TOKENS // 4, HALF), dtype=tl.float32)
    for number in tl.range(HEADS):
        start += step
        ahead = _four(start, words, num_batch, seq, batch, number + 1 < HEADS, HALF)
        packed_one, packed_two, largest = _head(given, angles, turns, row, largest, factor, width)
        tl.store(across, tl.trans(packed_one))
        tl.store(across + tl.cast(HALF, tl.int64) * (num // 4), tl.trans(packed_two))
        given, row, across = ahead, row + 2 * HALF, across + tl.cast(2 * HALF, tl.int64) * (num // 4)
    return tl.max(largest)


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
    MODE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    strides = (q_seq, q_batch, q_head, k_seq, k_batch, k_head, v_seq, v_batch, v_head)
    factor, is_needed = _factor(inverse, scale, amax, MODE, 57344.0)
    if MODE == 2:
        if is_needed:
            _heads(q, k, v, cos, sin, rows, columns, factor, strides, num, num_batch, num_q, num_kv, HALF, HEADS, TOKENS)
    else:
        largest = _heads(q, k, v, cos, sin, rows, columns, factor, strides, num, num_batch, num_q, num_kv, HALF, HEADS, TOKENS)
        tl.atomic_max(amax, largest, sem="relaxed")
