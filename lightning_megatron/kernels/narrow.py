"""Norm and SwiGLU that write 8 bits, in rows and in columns, in one pass over memory; fp32 inside.

A product over tokens (a weight gradient) wants its 8-bit factors with the tokens contiguous, the other products with the
features; so both forms are written from one tile. Each kernel also takes the largest magnitude of what it rounds, for the
factors of later steps, and rounds what exceeds the format to its largest number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _FEATURES = 128, 64  # a tile; 64 and more contiguous bytes in either form
_NORM_TOKENS, _NORM_FEATURES = 32, 128

Forms = tuple[Tensor, Tensor]


def fits(num: int, size: int) -> bool:
    """Whether the kernels take ``[num, size]``: whole tiles only."""
    return num > 0 and num % _TOKENS == 0 and size % _NORM_FEATURES == 0


def add_rms_norm_narrow(
    hidden: Tensor, added: Tensor | None, gain: Tensor, *, eps: float, scale: Tensor, amax: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x = hidden + added`` and its RMSNorm in e4m3: ``[N, H] -> [N, H]``, rows ``[N, H]``, columns ``[H, N]``, ``[N]``.

    The last is ``1 / rms(x)`` in fp32; x is ``hidden`` itself if nothing is added.

    Args:
        hidden: bf16, contiguous, of whole tiles (``fits``).
        added: the same, or nothing.
        gain: ``[H]``.
        eps: added to the mean square.
        scale: what to multiply by before rounding, fp32 ``[1]``.
        amax: raised to the largest magnitude before scaling, fp32 ``[1]``.
    """
    num, size = hidden.shape
    summed = hidden if added is None else torch.empty_like(hidden)
    rows, columns = _forms(hidden, num, size, torch.float8_e4m3fn)
    scales = hidden.new_empty(num, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _add_rms_norm[(num // _NORM_TOKENS,)](
            *(hidden, hidden if added is None else added, gain, summed, rows, columns, scales, scale, amax),
            *(num, size, eps),
            ADDS=added is not None,
            TOKENS=_NORM_TOKENS,
            FEATURES=_NORM_FEATURES,
            num_warps=8,
        )
    return summed, rows.view(torch.uint8), columns.view(torch.uint8), scales


def swiglu_narrow(gate_up: Tensor, *, scale: Tensor, amax: Tensor) -> Forms:
    """``silu(gate) * up`` in e4m3: ``[N, 2n]`` to rows ``[N, n]`` and columns ``[n, N]``. Arguments as above."""
    num, size = gate_up.shape[0], gate_up.shape[1] // 2
    rows, columns = _forms(gate_up, num, size, torch.float8_e4m3fn)
    with torch.cuda.device_of(gate_up):
        _swiglu[(num // _TOKENS, size // _FEATURES)](
            *(gate_up, rows, columns, scale, amax, num, size), TOKENS=_TOKENS, FEATURES=_FEATURES, num_warps=8
        )
    return rows.view(torch.uint8), columns.view(torch.uint8)


def swiglu_backward_narrow(grad: Tensor, gate_up: Tensor, *, scale: Tensor, amax: Tensor) -> Forms:
    """The gradient of ``gate_up`` in e5m2, rows ``[N, 2n]`` and columns ``[2n, N]``, by that of the result ``[N, n]``."""
    num, size = grad.shape
    rows, columns = _forms(grad, num, 2 * size, torch.float8_e5m2)
    with torch.cuda.device_of(grad):
        _swiglu_backward[(num // _TOKENS, size // _FEATURES)](
            *(grad, gate_up, rows, columns, scale, amax, num, size), TOKENS=_TOKENS, FEATURES=_FEATURES, num_warps=8
        )
    return rows.view(torch.uint8), columns.view(torch.uint8)


def _forms(like: Tensor, num: int, size: int, dtype: torch.dtype) -> Forms:
    return like.new_empty((num, size), dtype=dtype), like.new_empty((size, num), dtype=dtype)


@triton.jit
def _rounded(x, scale, LIMIT: tl.constexpr):
    x = tl.minimum(x * scale, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_rms_norm(
    hidden,
    added,
    gain,
    summed,
    rows,
    columns,
    scales,
    scale,
    amax,
    num,
    size,
    eps,
    ADDS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    squares = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    for start in tl.range(0, size, FEATURES, num_stages=3):
        features = start + tl.arange(0, FEATURES)
        places = tokens[:, None] * size + features[None, :]
        stored = tl.load(hidden + places)
        if ADDS:
            stored = (stored.to(tl.float32) + tl.load(added + places).to(tl.float32)).to(stored.dtype)
            tl.store(summed + places, stored)
        x = stored.to(tl.float32)
        squares += x * x
    rms_inv = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / size + eps)
    tl.store(scales + tokens, rms_inv)
    factor = tl.load(scale)
    largest = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
    tl.debug_barrier()  # the sums are read again by other threads than wrote them
    for start in tl.range(0, size, FEATURES, num_stages=3):
        features = start + tl.arange(0, FEATURES)
        places = tokens[:, None] * size + features[None, :]
        x = tl.load(summed + places).to(tl.float32)
        normed = x * rms_inv[:, None] * tl.load(gain + features).to(tl.float32)[None, :]
        largest = tl.maximum(largest, tl.abs(normed))
        narrow = _rounded(normed, factor, 448.0).to(tl.float8e4nv)
        tl.store(rows + places, narrow)
        tl.store(columns + features[:, None].to(tl.int64) * num + tokens[None, :], tl.trans(narrow))
    tl.atomic_max(amax, tl.max(largest), sem="relaxed")


@triton.jit
def _swiglu(gate_up, rows, columns, scale, amax, num, size, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    source = gate_up + tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(source).to(tl.float32)
    up = tl.load(source + size).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.atomic_max(amax, tl.max(tl.abs(result)), sem="relaxed")
    narrow = _rounded(result, tl.load(scale), 448.0).to(tl.float8e4nv)
    tl.store(rows + tokens[:, None] * size + features[None, :], narrow)
    tl.store(columns + features[:, None].to(tl.int64) * num + tokens[None, :], tl.trans(narrow))


@triton.jit
def _swiglu_backward(grad, gate_up, rows, columns, scale, amax, num, size, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    places = tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(gate_up + places).to(tl.float32)
    up = tl.load(gate_up + places + size).to(tl.float32)
    of_result = tl.load(grad + tokens[:, None] * size + features[None, :]).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_up = of_result * gate * sigmoid
    of_gate = of_result * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.atomic_max(amax, tl.max(tl.maximum(tl.abs(of_gate), tl.abs(of_up))), sem="relaxed")
    factor = tl.load(scale)
    across = features[:, None].to(tl.int64) * num + tokens[None, :]
    narrow = _rounded(of_gate, factor, 57344.0).to(tl.float8e5)
    tl.store(rows + places, narrow)
    tl.store(columns + across, tl.trans(narrow))
    narrow = _rounded(of_up, factor, 57344.0).to(tl.float8e5)
    tl.store(rows + places + size, narrow)
    tl.store(columns + tl.cast(size, tl.int64) * num + across, tl.trans(narrow))
