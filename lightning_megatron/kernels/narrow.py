"""Norm and SwiGLU that write 8 bits, in rows and in columns, in one pass over memory; fp32 inside.

A product over tokens (a weight gradient) wants its 8-bit factors with the tokens contiguous, the other products with the
features; so both forms are written from one tile. What exceeds the format is rounded to its largest number.

The kernels also take the largest magnitude of what they round. They may be without a factor (``scale=None``): a first pass
over the inputs then finds the largest magnitude and writes no result, which costs less than to write 16 bits and read them
twice; the factor is the largest power of two that fits.

Note [Four tokens in a word]
A tile is turned in words of 32 bits, each of four neighbouring tokens: a quarter of the moves. The words come from
instructions that round two numbers into 16 bits. To take single bytes out of numbers that ``to(float8)`` has rounded gives
wrong bytes on an H200 (Triton 3.6 and CUDA 13.0: two of four neighbours, even if the word is stored as it stands), though the
same numbers stored as a whole are right and so is the PTX; so nothing here does that. ``narrow_check.py`` looks once in a
process whether what this machine compiles is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one program works on."""

    tokens: int
    features: int
    warps: int


SWIGLU, SWIGLU_BACKWARD, NORM = Tile(64, 128, 8), Tile(64, 128, 8), Tile(32, 1024, 8)
_MULTIPLE = 128  # of tokens and features: whole tiles


@dataclass(frozen=True)
class Narrow:
    """A matrix in 8 bits: rows ``[N, n]``, columns ``[n, N]``, both as bytes, and the inverse of its factor, fp32 ``[1]``."""

    rows: Tensor
    columns: Tensor
    scale_inv: Tensor


def fits(num: int, size: int) -> bool:
    """Whether the kernels take ``[num, size]``: whole tiles only."""
    return num > 0 and num % _MULTIPLE == 0 and size % _MULTIPLE == 0


def add_rms_norm_narrow(
    hidden: Tensor,
    added: Tensor | None,
    gain: Tensor,
    *,
    eps: float,
    amax: Tensor,
    scale: Tensor | None = None,
    scale_inv: Tensor | None = None,
    tile: Tile = NORM,
) -> tuple[Tensor, Narrow, Tensor]:
    """``x = hidden + added``, its RMSNorm in e4m3, and ``1 / rms(x)`` in fp32: ``[N, H] -> [N, H]``, ``[N, H]``, ``[N]``.

    Args:
        hidden: bf16, contiguous, of whole tiles (``fits``).
        added: the same, or nothing: x is then ``hidden`` itself.
        gain: ``[H]``.
        eps: added to the mean square.
        amax: raised to the largest magnitude of the norm, fp32 ``[1]``; zero if there is no ``scale``.
        scale: what to multiply by before rounding, fp32 ``[1]``; if not given, it follows from the largest magnitude.
        scale_inv: its inverse.
        tile: what one program works on.
    """
    num, size = hidden.shape
    summed = hidden if added is None else torch.empty_like(hidden)
    scales = hidden.new_empty(num, dtype=torch.float32)
    rows, columns, inverse = _empty(hidden, num, size, torch.float8_e4m3fn, scale_inv)
    factor = amax if scale is None else scale
    with torch.cuda.device_of(hidden):
        for first in (True, False) if scale is None else (False,):
            _add_rms_norm_narrow[(num // tile.tokens,)](
                *(hidden, hidden if added is None else added, gain, summed, rows, _words(columns)),
                *(scales, inverse, factor, amax, num, size, eps),
                ADDS=added is not None,
                KNOWN=scale is not None,
                FIRST=first,
                TOKENS=tile.tokens,
                FEATURES=min(tile.features, size & -size),  # a power of two that divides
                num_warps=tile.warps,
            )
    return summed, _finished((rows, columns, inverse)), scales


def swiglu_narrow(
    gate_up: Tensor, *, amax: Tensor, scale: Tensor | None = None, scale_inv: Tensor | None = None, tile: Tile = SWIGLU
) -> Narrow:
    """``silu(gate) * up`` in e4m3: ``[N, 2n] -> [N, n]``. Arguments as of ``add_rms_norm_narrow``."""
    num, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = _empty(gate_up, num, size, torch.float8_e4m3fn, scale_inv)
    grid = (num // tile.tokens, size // tile.features)
    factor = amax if scale is None else scale
    rows, columns, inverse = result
    with torch.cuda.device_of(gate_up):
        for first in (True, False) if scale is None else (False,):
            _swiglu_narrow[grid](
                *(gate_up, rows, _words(columns), inverse, factor, amax, num, size),
                KNOWN=scale is not None,
                FIRST=first,
                TOKENS=tile.tokens,
                FEATURES=tile.features,
                num_warps=tile.warps,
            )
    return _finished(result)


def swiglu_backward_narrow(
    grad: Tensor,
    gate_up: Tensor,
    *,
    amax: Tensor,
    scale: Tensor | None = None,
    scale_inv: Tensor | None = None,
    tile: Tile = SWIGLU_BACKWARD,
) -> Narrow:
    """The gradient of ``gate_up`` in e5m2, ``[N, 2n]``, by that of the result ``[N, n]``. Arguments as above."""
    num, size = grad.shape
    result = _empty(grad, num, 2 * size, torch.float8_e5m2, scale_inv)
    grid = (num // tile.tokens, size // tile.features)
    factor = amax if scale is None else scale
    rows, columns, inverse = result
    with torch.cuda.device_of(grad):
        for first in (True, False) if scale is None else (False,):
            _swiglu_backward_narrow[grid](
                *(grad, gate_up, rows, _words(columns), inverse, factor, amax, num, size),
                KNOWN=scale is not None,
                FIRST=first,
                TOKENS=tile.tokens,
                FEATURES=tile.features,
                num_warps=tile.warps,
            )
    return _finished(result)


def _empty(like: Tensor, num: int, size: int, dtype: torch.dtype, scale_inv: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    inverse = like.new_empty(1, dtype=torch.float32) if scale_inv is None else scale_inv
    return like.new_empty((num, size), dtype=dtype), like.new_empty((size, num), dtype=dtype), inverse


def _words(columns: Tensor) -> Tensor:
    """``[n, N]`` of 8 bits as ``[n, N/4]`` of 32."""
    return columns.view(torch.uint8).view(torch.int32)


def _finished(result: tuple[Tensor, Tensor, Tensor]) -> Narrow:
    rows, columns, inverse = result
    return Narrow(rows.view(torch.uint8), columns.view(torch.uint8), inverse)


@triton.jit
def _factor(scale, inverse, KNOWN: tl.constexpr, LIMIT: tl.constexpr):
    # The factor; or, from the largest magnitude, the largest power of two with which that does not exceed the format.
    factor = tl.load(scale)
    if not KNOWN:
        factor = LIMIT / factor
        usable = (factor > 0.0) & (factor < float("inf"))
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(usable, factor, 1.0)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse, 1.0 / factor)
    return factor


@triton.jit
def _rounded(x, factor, LIMIT: tl.constexpr):
    x = tl.minimum(x * factor, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _pair(first, second, WIDE_EXPONENT: tl.constexpr):
    # Two numbers rounded to e4m3 (or e5m2), the first in bits 0 to 7, the second in 8 to 15.
    if WIDE_EXPONENT:
        both = tl.inline_asm_elementwise(
            "{ .reg .b16 both; cvt.rn.satfinite.e5m2x2.f32 both, $2, $1; cvt.u32.u16 $0, both; }",
            "=r,f,f",
            [first, second],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        both = tl.inline_asm_elementwise(
            "{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, $2, $1; cvt.u32.u16 $0, both; }",
            "=r,f,f",
            [first, second],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return both


@triton.jit
def _add_and_measure(hidden, added, summed, scales, words, size, eps, ADDS: tl.constexpr, FEATURES: tl.constexpr):
    # Writes the sums of four tokens a word, and 1 / rms of each.
    for place in tl.static_range(4):
        tokens = words * 4 + place
        squares = tl.zeros((words.shape[0], FEATURES), dtype=tl.float32)
        for start in tl.range(0, size, FEATURES):
            places = tokens[:, None] * size + (start + tl.arange(0, FEATURES))[None, :]
            stored = tl.load(hidden + places)
            if ADDS:
                stored = (stored.to(tl.float32) + tl.load(added + places).to(tl.float32)).to(stored.dtype)
                tl.store(summed + places, stored)
            x = stored.to(tl.float32)
            squares += x * x
        tl.store(scales + tokens, 1.0 / tl.sqrt(tl.sum(squares, axis=1) / size + eps))


@triton.jit
def _add_rms_norm_narrow(
    hidden,
    added,
    gain,
    summed,
    rows,
    columns,
    scales,
    inverse,
    scale,
    amax,
    num,
    size,
    eps,
    ADDS: tl.constexpr,
    KNOWN: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # See Note [Four tokens in a word].
    words = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    if KNOWN or FIRST:
        _add_and_measure(hidden, added, summed, scales, words, size, eps, ADDS, FEATURES)
        tl.debug_barrier()  # sums and scales are read again by other threads than wrote them
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 448.0)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    for start in tl.range(0, size, FEATURES):
        features = start + tl.arange(0, FEATURES)
        gains = tl.load(gain + features).to(tl.float32)
        packed = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
        for pair in tl.static_range(2):
            tokens = words * 4 + 2 * pair
            places = tokens[:, None] * size + features[None, :]
            first = tl.load(summed + places).to(tl.float32) * tl.load(scales + tokens)[:, None] * gains[None, :]
            second = tl.load(summed + places + size).to(tl.float32) * tl.load(scales + tokens + 1)[:, None] * gains[None, :]
            largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
            if not FIRST:
                first, second = _rounded(first, factor, 448.0), _rounded(second, factor, 448.0)
                tl.store(rows + places, first.to(tl.float8e4nv))
                tl.store(rows + places + size, second.to(tl.float8e4nv))
                packed = packed | (_pair(first, second, False) << (16 * pair))
        if not FIRST:
            tl.store(columns + features[:, None].to(tl.int64) * (num // 4) + words[None, :], tl.trans(packed))
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")


@triton.jit
def _swiglu_of(gate_up, tokens, features, size):
    source = gate_up + tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(source).to(tl.float32)
    up = tl.load(source + size).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_narrow(
    gate_up,
    rows,
    columns,
    inverse,
    scale,
    amax,
    num,
    size,
    KNOWN: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # See Note [Four tokens in a word].
    words = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    packed = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 448.0)
    for pair in tl.static_range(2):
        tokens = words * 4 + 2 * pair
        first = _swiglu_of(gate_up, tokens, features, size)
        second = _swiglu_of(gate_up, tokens + 1, features, size)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
        if not FIRST:
            first, second = _rounded(first, factor, 448.0), _rounded(second, factor, 448.0)
            places = tokens[:, None] * size + features[None, :]
            tl.store(rows + places, first.to(tl.float8e4nv))
            tl.store(rows + places + size, second.to(tl.float8e4nv))
            packed = packed | (_pair(first, second, False) << (16 * pair))
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")
    if not FIRST:
        tl.store(columns + features[:, None].to(tl.int64) * (num // 4) + words[None, :], tl.trans(packed))


@triton.jit
def _swiglu_gradients_of(grad, gate_up, tokens, features, size):
    places = tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(gate_up + places).to(tl.float32)
    up = tl.load(gate_up + places + size).to(tl.float32)
    of_result = tl.load(grad + tokens[:, None] * size + features[None, :]).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return of_result * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), of_result * gate * sigmoid


@triton.jit
def _swiglu_backward_narrow(
    grad,
    gate_up,
    rows,
    columns,
    inverse,
    scale,
    amax,
    num,
    size,
    KNOWN: tl.constexpr,
    FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # See Note [Four tokens in a word].
    words = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    packed_gate = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    packed_up = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 57344.0)
    for pair in tl.static_range(2):
        tokens = words * 4 + 2 * pair
        first_gate, first_up = _swiglu_gradients_of(grad, gate_up, tokens, features, size)
        second_gate, second_up = _swiglu_gradients_of(grad, gate_up, tokens + 1, features, size)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first_gate), tl.abs(first_up)))
        largest = tl.maximum(largest, tl.maximum(tl.abs(second_gate), tl.abs(second_up)))
        if not FIRST:
            first_gate, second_gate = _rounded(first_gate, factor, 57344.0), _rounded(second_gate, factor, 57344.0)
            first_up, second_up = _rounded(first_up, factor, 57344.0), _rounded(second_up, factor, 57344.0)
            places = tokens[:, None] * (2 * size) + features[None, :]
            tl.store(rows + places, first_gate.to(tl.float8e5))
            tl.store(rows + places + size, first_up.to(tl.float8e5))
            tl.store(rows + places + 2 * size, second_gate.to(tl.float8e5))
            tl.store(rows + places + 3 * size, second_up.to(tl.float8e5))
            packed_gate = packed_gate | (_pair(first_gate, second_gate, True) << (16 * pair))
            packed_up = packed_up | (_pair(first_up, second_up, True) << (16 * pair))
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")
    if not FIRST:
        across = features[:, None].to(tl.int64) * (num // 4) + words[None, :]
        tl.store(columns + across, tl.trans(packed_gate))
        tl.store(columns + tl.cast(size, tl.int64) * (num // 4) + across, tl.trans(packed_up))
