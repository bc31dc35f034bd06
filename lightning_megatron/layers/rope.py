"""Rotary position embeddings (Su et al. 2021), in the half-rotation convention of Hugging Face Llama."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor


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


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    waves_in_context = scaling.original_max_seq_len * frequencies / (2 * pi)
    kept = (waves_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, kept.clamp(0.0, 1.0))


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + head_dim/2)``: heads ``[S, B, h, head_dim]``, tables ``[S, 1, 1, head_dim]``. Same shape.

    Computed in the wider of the two dtypes (fp32 for 16-bit heads), rounded once to the dtype of the heads.
    """
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (heads * cos + turned * sin).to(heads.dtype)
