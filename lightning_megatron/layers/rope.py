"""Rotary position embeddings (Su et al. 2021), in the half-rotation convention of Hugging Face Llama."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatron.kernels.rotation import rotate_together, split_heads


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Stretching of low rotary frequencies to a longer context, as Llama 3.1 does it (``rope_type: llama3``).

    Waves longer than ``original_max_seq_len / low_freq_factor`` tokens are slowed by ``factor``, waves shorter than
    ``original_max_seq_len / high_freq_factor`` are kept, and those between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if not self.high_freq_factor > self.low_freq_factor > 0 or self.factor <= 0 or self.original_max_seq_len < 1:
            raise ValueError(f"{self}: needs high_freq_factor > low_freq_factor > 0, factor > 0 and original_max_seq_len >= 1.")


@dataclass(frozen=True)
class RopeTables:
    """Cosines and sines of a run of positions, fp32 ``[S, 1, 1, head_dim]`` each, the two halves of the last dim alike."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The frequencies of one model; holds no tensor, so nothing has to be materialised, moved or saved.

    Args:
        head_dim: size of an attention head (even).
        theta: base of the frequencies: ``theta^(-2i / head_dim)``.
        scaling: stretching to a longer context.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians a position, fp32 ``[head_dim / 2]``."""
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else _stretched(frequencies, self.scaling)

    def tables(self, positions: Tensor) -> RopeTables:
        """Cosines and sines for integer ``positions`` ``[S]``, on their device."""
        angles = positions.float()[:, None] * self.frequencies(positions.device)
        angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]
        return RopeTables(angles.cos(), angles.sin())


class WholeRows:
    """Tables of rows that begin at position 0, made once for all steps with rows of the same length.

    Args:
        rope: the frequencies.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._made: tuple[object, RopeTables] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> WholeRows:
        return WholeRows(self._rope)

    def __reduce__(self) -> tuple[type[WholeRows], tuple[Rope]]:
        return WholeRows, (self._rope,)

    def tables(self, num_real: int, num_padded: int, device: torch.device) -> RopeTables:
        """Of positions 0 to ``num_real - 1``, and of padding to ``num_padded``: ``[num_padded, 1, 1, head_dim]``."""
        key = (num_real, num_padded, device)
        if self._made is None or self._made[0] != key:
            with torch.inference_mode(False):  # a step that trains uses what an evaluation has made
                positions = F.pad(torch.arange(num_real, device=device), (0, num_padded - num_real))
                self._made = key, self._rope.tables(positions)
        return self._made[1]


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    waves_in_context = scaling.original_max_seq_len * frequencies / (2 * pi)
    kept = (waves_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0))


def rotate_fused(fused: Tensor, heads: tuple[int, int], *, head_dim: int, tables: RopeTables) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of a fused projection, rotated, and values: ``[S, B, (h + 2g) * d]`` to ``[S, B, h or g, d]`` each.

    One pass forward and one backward where there are kernels. The three results are views of one tensor.

    Args:
        fused: ``[q; k; v]`` along the last dim.
        heads: h and g.
        head_dim: d.
        tables: of the S positions.
    """
    q, k, v = RotateFused.apply(fused, tables.cos, tables.sin, heads, head_dim)  # type: ignore[no-untyped-call]
    return q, k, v


def rotate_back(of_q: Tensor, of_k: Tensor, of_v: Tensor, tables: RopeTables) -> Tensor:
    """The gradient of what ``rotate_fused`` was given, ``[S, B, (h + 2g) * d]``, of those of its results."""
    return rotate_together(of_q, of_k, of_v, cos=tables.cos, sin=tables.sin, inverse=True)


class RotateFused(torch.autograd.Function):
    """See ``rotate_fused``."""

    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs as of ``rotate_fused``."""
        ctx.save_for_backward(cos, sin)
        parts = split_heads(fused, heads, head_dim)
        return split_heads(rotate_together(*parts, cos=cos, sin=sin, inverse=False), heads, head_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_q: Tensor, of_k: Tensor, of_v: Tensor) -> tuple[Tensor | None, ...]:
        """Rotates back."""
        cos, sin = ctx.saved_tensors
        return rotate_back(of_q, of_k, of_v, RopeTables(cos, sin)), None, None, None, None


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope`` in one pass forward and one backward where there are kernels: heads ``[S, B, h, d]``, same shape out."""
    rotated: Tensor = _RotateHeads.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        none = heads[:, :, :0]
        return rotate_together(heads, none, none, cos=cos, sin=sin, inverse=False).view(heads.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        none = grad[:, :, :0]
        return rotate_together(grad, none, none, cos=cos, sin=sin, inverse=True).view(grad.shape), None, None
