"""Residual addition and RMSNorm, rounded to 8 bits in the same pass: see ``narrow.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.kernels.narrow import Factor, Narrow, Tile, _factor, _pair, _rounded, _store_across, narrowed

# Two programs a multiprocessor by their registers, so that the 256 of 8192 tokens run at once. By times on an H200, of
# [8192, 4096]: the fastest of seven alone, and within 0.4 % of it with the addition.
ADDING, ALONE = Tile(32, 512, 4), Tile(32, 512, 8)


def add_rms_norm_narrow(
    hidden: Tensor, added: Tensor | None, gain: Tensor, factor: Factor, *, eps: float, tile: Tile | None = None
) -> tuple[Tensor, Narrow, Tensor]:
    """``x = hidden + added``, its RMSNorm in e4m3, and ``1 / rms(x)`` in fp32: ``[N, H] -> [N, H]``, ``[N, H]``, ``[N]``.

    Args:
        hidden: bf16, contiguous, of whole tiles (``fits``).
        added: the same, or nothing: x is then ``hidden`` itself.
        gain: ``[H]``.
        factor: what to multiply the norm by.
        eps: added to the mean square.
        tile: what one program works on; by default what suits.
    """
    num, size = hidden.shape
    tile = tile or (ALONE if added is None else ADDING)
    summed = hidden if added is None else torch.empty_like(hidden)
    scales = hidden.new_empty(num, dtype=torch.float32)

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        _add_rms_norm_narrow[(num // tile.tokens,)](
            *(hidden, hidden if added is None else added, gain, summed, scales, rows, columns, *numbers, num, size, eps),
            ADDS=added is not None,
            MODE=mode,
            TOKENS=tile.tokens,
            FEATURES=min(tile.features, size & -size),  # a power of two that divides
            num_warps=tile.warps,
        )

    return summed, narrowed(hidden, (num, size), torch.float8_e4m3fn, factor=factor, launch=launch), scales


@triton.jit
def _add_and_measure(
    hidden, added, summed, scales, size, eps, ADDS: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    # Writes the sums of a program's tokens, and 1 / rms of each. All of its tokens' loads are under way at once.
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    squares = tl.zeros((TOKENS, FEATURES), dtype=tl.float32)
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
    scales,
    rows,
    columns,
    inverse,
    scale,
    amax,
    num,
    size,
    eps,
    ADDS: tl.constexpr,
    MODE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # See Note [Four tokens in a word].
    factor, is_needed = _factor(inverse, scale, amax, MODE, 448.0)
    if is_needed:
        words = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
        if MODE != 2:
            _add_and_measure(hidden, added, summed, scales, size, eps, ADDS, TOKENS, FEATURES)
            tl.debug_barrier()  # sums and scales are read again by other threads than wrote them
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
                first, second = _rounded(first, factor, 448.0), _rounded(second, factor, 448.0)
                tl.store(rows + places, first.to(tl.float8e4nv))
                tl.store(rows + places + size, second.to(tl.float8e4nv))
                packed = packed | (_pair(first, second, False) << (16 * pair))
            _store_across(columns, features, words, num, packed)
        if MODE != 2:
            tl.atomic_max(amax, tl.max(largest), sem="relaxed")
