"""fp32 values as 8-bit floats with a scale for each 256 of them.

Note [Scales that are powers of two]
A block's scale is the smallest power of two with which its largest magnitude fits into e4m3 (448). Values are then only
shifted, and turning 8-bit values into fp32 and back changes nothing: the scale that is found again is the same, or a smaller
one under which every value still is an 8-bit number.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256
DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0


def num_blocks(numel: int) -> int:
    """How many scales ``numel`` values have."""
    return -(-numel // BLOCK)


def widened(narrow: Tensor, scales: Tensor) -> Tensor:
    """``[n]`` e4m3 with ``[n / 256]`` scales to ``[n]`` fp32."""
    return narrow.float() * scales.repeat_interleave(BLOCK)[: narrow.numel()]


def narrowed(wide: Tensor) -> tuple[Tensor, Tensor]:
    """``[n]`` fp32 to ``[n]`` e4m3 and ``[n / 256]`` scales. See Note [Scales that are powers of two]."""
    padded = torch.nn.functional.pad(wide.float(), (0, -wide.numel() % BLOCK)).view(-1, BLOCK)
    scales = power_of_two_above(padded.abs().amax(1) / _LARGEST)
    return (padded / scales.unsqueeze(1)).view(-1)[: wide.numel()].to(DTYPE), scales


def power_of_two_above(values: Tensor) -> Tensor:
    """The smallest power of two that is not less than a value of fp32; 1 for 0."""
    exponent = (values.view(torch.int32) + 0x7F_FFFF) >> 23
    return torch.where(values == 0.0, 1.0, (exponent.clamp(min=1) << 23).view(torch.float32))


class Moment:
    """``[n]`` values in 8 bits, read and written in ranges that begin at whole blocks (``Kept`` of ``optim/kept.py``).

    Args:
        narrow: ``[n]`` e4m3.
        scales: ``[n / 256]`` fp32.
    """

    def __init__(self, narrow: Tensor, scales: Tensor) -> None:
        self.narrow, self.scales = narrow, scales

    @classmethod
    def zeros(cls, numel: int, device: torch.device) -> Moment:
        """Zeros."""
        scales = torch.ones(num_blocks(numel), dtype=torch.float32, device=device)
        return cls(torch.zeros(numel, dtype=torch.uint8, device=device).view(DTYPE), scales)

    def read(self, start: int, stop: int) -> Tensor:
        """The values ``[start, stop)`` in fp32."""
        return widened(self.narrow[start:stop], self.scales[start // BLOCK : num_blocks(stop)])

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """Keep new values."""
        narrow, scales = narrowed(values)
        self.narrow[start:stop].copy_(narrow)
        self.scales[start // BLOCK : num_blocks(stop)].copy_(scales)
