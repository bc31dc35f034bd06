"""Norm and SwiGLU that write 8 bits, in rows and in columns, in one pass over memory; fp32 inside.

A product over tokens (a weight gradient) wants its 8-bit factors with the tokens contiguous, the other products with the
features; so both forms are written from one tile. What exceeds the format is rounded to its largest number.

Where the factor is known beforehand (``scale``), the kernels also take the largest magnitude of what they round. Where it is
not (``scale=None``), a first pass over the inputs finds the largest magnitude and writes nothing, which costs less than to
write 16 bits and read them twice; the factor is then the largest power of two that fits.
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


SWIGLU, SWIGLU_BACKWARD, NORM = Tile(128, 64, 8), Tile(128, 64, 8), Tile(32, 128, 8)
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
) -> tuple[Tensor, Narrow, Tensor]:
    """``x = hidden + added``, its RMSNorm in e4m3, and ``1 / rms(x)`` in fp32: ``[N, H] -> [N, H]``, ``[N, H]``, ``[N]``.

    Args:
        hidden: bf16, contiguous, of whole tiles (``fits``).
        added: the same, or nothing: x is then ``hidden`` itself.
        gain: ``[H]``.
        eps: added to the mean square.
        amax: raised to the largest magnitude of the norm, fp32 ``[1]``; zero at first if there is no ``scale``.
        scale: what to multiply by before rounding, fp32 ``[1]``; by the largest magnitude if not given.
        scale_inv: its inverse.
    """
    num, size = hidden.shape
    summed = hidden if added is None else torch.empty_like(hidden)
    scales = hidden.new_empty(num, dtype=torch.float32)
    result = _empty(hidden, num, size, torch.float8_e4m3fn, scale_inv)
    tensors = (gain, summed, *result, scales)
    other = hidden if added is None else added
    factor = amax if scale is None else scale
    with torch.cuda.device_of(hidden):
        for first in (True, False) if scale is None else (False,):
            again = scale is None and not first
            source, beside = (summed, summed) if again else (hidden, other)
            _add_rms_norm_narrow[(num // NORM.tokens,)](
                *(source, beside, *tensors, factor, amax, num, size, eps),
                ADDS=added is not None and not again,
                KNOWN=scale is not None,
                FIRST=first,
                TOKENS=NORM.tokens,
                FEATURES=NORM.features,
                num_warps=NORM.warps,
            )
    return summed, _finished(result), scales


def swiglu_narrow(
    gate_up: Tensor, *, amax: Tensor, scale: Tensor | None = None, scale_inv: Tensor | None = None, tile: Tile = SWIGLU
) -> Narrow:
    """``silu(gate) * up`` in e4m3: ``[N, 2n] -> [N, n]``. Arguments as of ``add_rms_norm_narrow``."""
    num, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = _empty(gate_up, num, size, torch.float8_e4m3fn, scale_inv)
    grid = (num // tile.tokens, size // tile.features)
    factor = amax if scale is None else scale
    with torch.cuda.device_of(gate_up):
        for first in (True, False) if scale is None else (False,):
            _swiglu_narrow[grid](
                *(gate_up, *result, factor, amax, num, size),
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
    with torch.cuda.device_of(grad):
        for first in (True, False) if scale is None else (False,):
            _swiglu_backward_narrow[grid](
                *(grad, gate_up, *result, factor, amax, num, size),
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
def _add_rms_norm_narrow(
    hidden,
    added,
    gain,
    summed,
    rows,
    columns,
    inverse,
    scales,
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
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    if KNOWN or FIRST:
        squares = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
        for start in tl.range(0, size, FEATURES, num_stages=3):
            places = tokens[:, None] * size + (start + tl.arange(0, FEATURES))[None, :]
            stored = tl.load(hidden + places)
            if ADDS:
                stored = (stored.to(tl.float32) + tl.load(added + places).to(tl.float32)).to(stored.dtype)
                tl.store(summed + places, stored)
            x = stored.to(tl.float32)
            squares += x * x
        rms_inv = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / size + eps)
        tl.store(scales + tokens, rms_inv)
        tl.debug_barrier()  # the sums are read again by other threads than wrote them
    else:
        rms_inv = tl.load(scales + tokens)
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 448.0)
    largest = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for start in tl.range(0, size, FEATURES, num_stages=3):
        features = start + tl.arange(0, FEATURES)
        places = tokens[:, None] * size + features[None, :]
        x = tl.load(summed + places).to(tl.float32)
        normed = x * rms_inv[:, None] * tl.load(gain + features).to(tl.float32)[None, :]
        largest = tl.maximum(largest, tl.abs(normed))
        if not FIRST:
            narrow = _rounded(normed, factor, 448.0).to(tl.float8e4nv)
            tl.store(rows + places, narrow)
            tl.store(columns + features[:, None].to(tl.int64) * num + tokens[None, :], tl.trans(narrow))
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(largest), sem="relaxed")


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
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    source = gate_up + tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(source).to(tl.float32)
    up = tl.load(source + size).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(tl.abs(result)), sem="relaxed")
    if not FIRST:
        narrow = _rounded(result, _factor(scale, inverse, KNOWN, 448.0), 448.0).to(tl.float8e4nv)
        tl.store(rows + tokens[:, None] * size + features[None, :], narrow)
        tl.store(columns + features[:, None].to(tl.int64) * num + tokens[None, :], tl.trans(narrow))


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
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    places = tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(gate_up + places).to(tl.float32)
    up = tl.load(gate_up + places + size).to(tl.float32)
    of_result = tl.load(grad + tokens[:, None] * size + features[None, :]).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_up = of_result * gate * sigmoid
    of_gate = of_result * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if KNOWN or FIRST:
        tl.atomic_max(amax, tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up))), sem="relaxed")
    if not FIRST:
        factor = _factor(scale, inverse, KNOWN, 57344.0)
        across = features[:, None].to(tl.int64) * num + tokens[None, :]
        narrow = _rounded(of_gate, factor, 57344.0).to(tl.float8e5)
        tl.store(rows + places, narrow)
        tl.store(columns + across, tl.trans(narrow))
        narrow = _rounded(of_up, factor, 57344.0).to(tl.float8e5)
        tl.store(rows + places + size, narrow)
        tl.store(columns + tl.cast(size, tl.int64) * num + across, tl.trans(narrow))
