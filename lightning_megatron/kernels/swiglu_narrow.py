"""SwiGLU and its gradient, rounded to 8 bits in the same pass: see ``narrow.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.kernels.narrow import Factor, Narrow, Tile, _factor, _pair, _rounded, _store_across, _words, narrowed

FORWARD, BACKWARD = Tile(64, 64, 4), Tile(64, 64, 4)  # the fastest of ten on an H200, for [8192, 14336]


def swiglu_narrow(gate_up: Tensor, factor: Factor, *, tile: Tile = FORWARD) -> Narrow:
    """``silu(gate) * up`` in e4m3: ``[N, 2n] -> [N, n]``.

    Args:
        gate_up: bf16, contiguous, of whole tiles (``fits``).
        factor: what to multiply by.
        tile: what one program works on.
    """
    num, size = gate_up.shape[0], gate_up.shape[1] // 2

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        _swiglu_narrow[tile.grid(num, size, mode)](
            *(gate_up, rows, columns, *numbers, num, size),
            MODE=mode,
            TOKENS=tile.tokens,
            FEATURES=tile.features,
            num_warps=tile.warps,
        )

    return narrowed(gate_up, (num, size), torch.float8_e4m3fn, factor=factor, launch=launch)


def swiglu_backward_narrow(grad: Tensor, gate_up: Tensor, factor: Factor, *, tile: Tile = BACKWARD) -> Narrow:
    """The gradient of ``gate_up`` in e5m2, ``[N, 2n]``, by that of the result ``[N, n]``. Arguments as above."""
    num, size = grad.shape

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        _swiglu_backward_narrow[tile.grid(num, size, mode)](
            *(grad, gate_up, rows, columns, *numbers, num, size),
            MODE=mode,
            TOKENS=tile.tokens,
            FEATURES=tile.features,
            num_warps=tile.warps,
        )

    return narrowed(grad, (num, 2 * size), torch.float8_e5m2, factor=factor, launch=launch)


@triton.jit
def _swiglu_of(gate_up, tokens, features, size):
    source = gate_up + tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(source).to(tl.float32)
    up = tl.load(source + size).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_tile(
    gate_up,
    rows,
    columns,
    factor,
    column,
    num,
    size,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # Rounds, and returns the largest magnitude. See Note [Four tokens in a word].
    words = _words(TOKENS)
    features = column * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    packed = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    for pair in tl.static_range(2):
        tokens = words * 4 + 2 * pair
        first = _swiglu_of(gate_up, tokens, features, size)
        second = _swiglu_of(gate_up, tokens + 1, features, size)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
        first, second = _rounded(first, factor, 448.0), _rounded(second, factor, 448.0)
        places = tokens[:, None] * size + features[None, :]
        tl.store(rows + places, first.to(tl.float8e4nv))
        tl.store(rows + places + size, second.to(tl.float8e4nv))
        packed = packed | (_pair(first, second, False) << (16 * pair))
    _store_across(columns, features, words, num, packed)
    return tl.max(largest)


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
    MODE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    factor, is_needed = _factor(inverse, scale, amax, MODE, 448.0)
    if MODE == 2:
        if is_needed:
            for column in tl.range(tl.program_id(1), size // FEATURES, tl.num_programs(1)):
                _swiglu_tile(gate_up, rows, columns, factor, column, num, size, TOKENS, FEATURES)
    else:
        largest = _swiglu_tile(gate_up, rows, columns, factor, tl.program_id(1), num, size, TOKENS, FEATURES)
        tl.atomic_max(amax, largest, sem="relaxed")


@triton.jit
def _swiglu_gradients_of(grad, gate_up, tokens, features, size):
    places = tokens[:, None] * (2 * size) + features[None, :]
    gate = tl.load(gate_up + places).to(tl.float32)
    up = tl.load(gate_up + places + size).to(tl.float32)
    of_result = tl.load(grad + tokens[:, None] * size + features[None, :]).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return of_result * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), of_result * gate * sigmoid


@triton.jit
def _swiglu_backward_tile(
    grad,
    gate_up,
    rows,
    columns,
    factor,
    column,
    num,
    size,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # Rounds, and returns the largest magnitude. See Note [Four tokens in a word].
    words = _words(TOKENS)
    features = column * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    packed_gate = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    packed_up = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    for pair in tl.static_range(2):
        tokens = words * 4 + 2 * pair
        first_gate, first_up = _swiglu_gradients_of(grad, gate_up, tokens, features, size)
        second_gate, second_up = _swiglu_gradients_of(grad, gate_up, tokens + 1, features, size)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first_gate), tl.abs(first_up)))
        largest = tl.maximum(largest, tl.maximum(tl.abs(second_gate), tl.abs(second_up)))
        first_gate, second_gate = _rounded(first_gate, factor, 57344.0), _rounded(second_gate, factor, 57344.0)
        first_up, second_up = _rounded(first_up, factor, 57344.0), _rounded(second_up, factor, 57344.0)
        places = tokens[:, None] * (2 * size) + features[None, :]
        tl.store(rows + places, first_gate.to(tl.float8e5))
        tl.store(rows + places + size, first_up.to(tl.float8e5))
        tl.store(rows + places + 2 * size, second_gate.to(tl.float8e5))
        tl.store(rows + places + 3 * size, second_up.to(tl.float8e5))
        packed_gate = packed_gate | (_pair(first_gate, second_gate, True) << (16 * pair))
        packed_up = packed_up | (_pair(first_up, second_up, True) << (16 * pair))
    _store_across(columns, features, words, num, packed_gate)
    _store_across(columns + tl.cast(size, tl.int64) * (num // 4), features, words, num, packed_up)
    return tl.max(largest)


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
    MODE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    factor, is_needed = _factor(inverse, scale, amax, MODE, 57344.0)
    if MODE == 2:
        if is_needed:
            for column in tl.range(tl.program_id(1), size // FEATURES, tl.num_programs(1)):
                _swiglu_backward_tile(grad, gate_up, rows, columns, factor, column, num, size, TOKENS, FEATURES)
    else:
        largest = _swiglu_backward_tile(grad, gate_up, rows, columns, factor, tl.program_id(1), num, size, TOKENS, FEATURES)
        tl.atomic_max(amax, largest, sem="relaxed")
