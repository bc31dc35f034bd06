"""Matrices rounded to 8 bits, in rows and in columns, in one pass over memory; fp32 inside.

A product over tokens (a weight gradient) wants its 8-bit factors with the tokens contiguous, the other products with the
features; so both forms are written from one tile. What exceeds the format is rounded to its largest number. The kernels also
take the largest magnitude of what they round. ``norm_narrow.py``, ``swiglu_narrow.py`` and ``unrotate_narrow.py`` compute what
they round.

Note [Guessed factors]
A factor that follows from the very matrix that is rounded (``current``) is known when all of it has been computed, which
would take a pass over the inputs before the one that writes. But factors are coarse, powers of 4 (e4m3) and of 16 (e5m2), so
from one micro-batch to the next one mostly stays the same: a first launch writes with the factor of last time and takes the
largest magnitude, and a second one leaves at once if the factor that follows from it is that, and writes everything again if
not. What is written does not depend on the guess. With powers of two the guess for SwiGLU failed in two of three micro-batches
forward and in one of three backward; see Note [Scales change between optimizer steps] in ``layers/te_backend/scales.py``.

Note [Four tokens in a word]
A tile is turned in words of 32 bits, each of four neighbouring tokens: a quarter of the moves. The words come from
instructions that round two numbers into 16 bits. To take single bytes out of numbers that ``to(float8)`` has rounded gives
wrong bytes on an H200 (Triton 3.6 and CUDA 13.0: two of four neighbours, even if the word is stored as it stands), though the
same numbers stored as a whole are right and so is the PTX; so nothing here does that. ``narrow_check.py`` looks once in a
process whether what this machine compiles is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

KNOWN, GUESS, CHECK = 0, 1, 2  # modes of the kernels, see Note [Guessed factors]
_MULTIPLE = 128  # of tokens and features: whole tiles
_CHECKING = 16  # programs side by side, of those that check
_LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class Tile:
    """What one program works on.

    Programs of the same 128 tokens start one after the other, so that rows are read from end to end and what is written across
    fills lines of 128 bytes.
    """

    tokens: int
    features: int
    warps: int

    def grid(self, num: int, size: int, mode: int) -> tuple[int, int, int]:
        """How many programs there are for ``[num, size]``; fewer of those that check, which mostly leave at once."""
        columns, beside = size // self.features, _MULTIPLE // self.tokens
        return beside, min(columns, _CHECKING) if mode == CHECK else columns, num // _MULTIPLE


ROUND = Tile(64, 128, 8)


@dataclass(frozen=True)
class Narrow:
    """A matrix in 8 bits: rows ``[N, n]``, columns ``[n, N]``, both as bytes, and the inverse of its factor, fp32 ``[1]``."""

    rows: Tensor
    columns: Tensor
    scale_inv: Tensor


@dataclass(frozen=True)
class Factor:
    """What a matrix is multiplied by before it is rounded; fp32 ``[1]`` each.

    Args:
        amax: raised to the largest magnitude; zero if there is no ``scale``.
        scale: the factor, where it is known beforehand; else it is the largest power of 4 (e4m3) or 16 (e5m2) by which the
            largest magnitude fits.
        scale_inv: its inverse.
        guess: what it was last time, replaced by what it is now. Without ``scale``; see Note [Guessed factors].
    """

    amax: Tensor
    scale: Tensor | None = None
    scale_inv: Tensor | None = None
    guess: Tensor | None = None


class ZeroCells:
    """Zeros, fp32 ``[1]``, for ``Factor.amax``: each once, many of one launch.

    Args:
        device: where they are.
    """

    _NUM = 1024

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: list[Tensor] = []

    def take(self) -> Tensor:
        """The next one. Of a graph that is being captured a new one, which is zero again whenever the graph runs."""
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, device=self._device)
        if not self._left:  # 16 bytes apart, as Triton likes addresses
            self._left = list(torch.zeros((self._NUM, 4), device=self._device)[:, :1].unbind())
        return self._left.pop()


def fits(num: int, size: int) -> bool:
    """Whether the kernels take ``[num, size]``: whole tiles only."""
    return num > 0 and num % _MULTIPLE == 0 and size % _MULTIPLE == 0


def round_narrow(x: Tensor, dtype: torch.dtype, factor: Factor, *, tile: Tile = ROUND) -> Narrow:
    """``[N, n]`` in bf16, contiguous and of whole tiles, in e4m3 or e5m2.

    Args:
        x: the matrix.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        factor: what to multiply by.
        tile: what one program works on.
    """
    num, size = x.shape

    def launch(rows: Tensor, columns: Tensor, numbers: tuple[Tensor, ...], mode: int) -> None:
        _round_narrow[tile.grid(num, size, mode)](
            *(x, rows, columns, *numbers, num, size),
            MODE=mode,
            WIDE_EXPONENT=dtype == torch.float8_e5m2,
            LIMIT=_LIMITS[dtype],
            TOKENS=tile.tokens,
            FEATURES=tile.features,
            num_warps=tile.warps,
        )

    return narrowed(x, (num, size), dtype, factor=factor, launch=launch)


def narrowed(
    like: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    factor: Factor,
    launch: Callable[[Tensor, Tensor, tuple[Tensor, ...], int], None],
) -> Narrow:
    """What a kernel writes: launched once by a known factor, else twice, see Note [Guessed factors].

    Args:
        like: says the device.
        shape: ``[N, n]``.
        dtype: the 8-bit format.
        factor: what to multiply by.
        launch: starts the kernel, given rows, columns as words of four tokens, ``(inverse, scale, amax)`` and the mode.
    """
    num, size = shape
    rows, columns = like.new_empty((num, size), dtype=dtype), like.new_empty((size, num), dtype=torch.uint8)
    words = columns.view(torch.int32)
    with torch.cuda.device_of(like):
        if factor.scale is not None:
            assert factor.scale_inv is not None
            inverse = factor.scale_inv
            launch(rows, words, (inverse, factor.scale, factor.amax), KNOWN)
        else:
            assert factor.guess is not None
            inverse = like.new_empty(2, dtype=torch.float32)  # and what the first launch has multiplied by
            for mode in (GUESS, CHECK):
                launch(rows, words, (inverse, factor.guess, factor.amax), mode)
    return Narrow(rows.view(torch.uint8), columns, inverse[:1])


@triton.jit
def _factor(inverse, scale, amax, MODE: tl.constexpr, LIMIT: tl.constexpr):
    # The factor, and whether anything is to be written. See Note [Guessed factors]: who guesses notes by what, who checks
    # notes what it should have been.
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    is_needed = True
    if MODE == 2:
        factor = LIMIT / tl.load(amax)
        usable = (factor > 0.0) & (factor < float("inf"))
        exponent = tl.maximum((factor.to(tl.int32, bitcast=True) >> 23) - 127, -124)
        exponent = exponent & (-4 if LIMIT > 448.0 else -2)  # down to a multiple of ``SPACING`` in ``scales.py``
        factor = tl.where(usable, ((exponent + 127) << 23).to(tl.float32, bitcast=True), 1.0)
        is_needed = factor != tl.load(inverse + 1)
        if is_first:
            tl.store(inverse, 1.0 / factor)
            tl.store(scale, factor)
    else:
        factor = tl.load(scale)
        if MODE == 1:  # noqa: SIM102  (decided when this is compiled)
            if is_first:
                tl.store(inverse + 1, factor)
    return factor, is_needed


@triton.jit
def _words(TOKENS: tl.constexpr):
    # The words of four tokens that are this program's. See ``Tile.grid``.
    block = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    return block.to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)


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
def _store_across(columns, features, words, num, packed):
    # ``packed``: [words, features], to where the tokens of a feature lie side by side.
    tl.store(columns + features[:, None].to(tl.int64) * (num // 4) + words[None, :], tl.trans(packed))


@triton.jit
def _round_tile(
    x,
    rows,
    columns,
    factor,
    column,
    num,
    size,
    WIDE_EXPONENT: tl.constexpr,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # Rounds, and returns the largest magnitude. See Note [Four tokens in a word].
    words = _words(TOKENS)
    features = column * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.float32)
    packed = tl.zeros((TOKENS // 4, FEATURES), dtype=tl.int32)
    for pair in tl.static_range(2):
        places = (words * 4 + 2 * pair)[:, None] * size + features[None, :]
        first, second = tl.load(x + places).to(tl.float32), tl.load(x + places + size).to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
        first, second = _rounded(first, factor, LIMIT), _rounded(second, factor, LIMIT)
        tl.store(rows + places, first.to(rows.dtype.element_ty))
        tl.store(rows + places + size, second.to(rows.dtype.element_ty))
        packed = packed | (_pair(first, second, WIDE_EXPONENT) << (16 * pair))
    _store_across(columns, features, words, num, packed)
    return tl.max(largest)


@triton.jit
def _round_narrow(
    x,
    rows,
    columns,
    inverse,
    scale,
    amax,
    num,
    size,
    MODE: tl.constexpr,
    WIDE_EXPONENT: tl.constexpr,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    factor, is_needed = _factor(inverse, scale, amax, MODE, LIMIT)
    if MODE == 2:
        if is_needed:
            for column in tl.range(tl.program_id(1), size // FEATURES, tl.num_programs(1)):
                _round_tile(x, rows, columns, factor, column, num, size, WIDE_EXPONENT, LIMIT, TOKENS, FEATURES)
    else:
        column = tl.program_id(1)
        largest = _round_tile(x, rows, columns, factor, column, num, size, WIDE_EXPONENT, LIMIT, TOKENS, FEATURES)
        tl.atomic_max(amax, largest, sem="relaxed")
