"""An fp32 value as a bf16 value and 16 more bits.

Note [Exactly, and with 16 bits]
The bf16 value is the fp32 value rounded to nearest even, as a copy would round it, and the remainder is the difference of
their bit patterns. It lies in ``[-2**15, 2**15]``: one number more than 16 bits can hold, since a value exactly halfway goes
to the even neighbour from both sides. Which of the two ends a halfway value is at is kept in one more bit an element, so
that joining gives the fp32 value back in every case: 2.125 bytes beside the bf16 value.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 2**22  # elements: temporaries stay small and in cache


class Remainder:
    """The bits of ``[n]`` fp32 values that their bf16 values do not hold.

    Args:
        numel: n.
        device: where they are kept.
        pinned: in page-locked host memory, so that copies to a GPU can overlap.
    """

    def __init__(self, numel: int, *, device: torch.device, pinned: bool = False) -> None:
        self.low = torch.zeros(numel, dtype=torch.int16, device=device, pin_memory=pinned)
        self.ties = torch.zeros(-(-numel // 8), dtype=torch.uint8, device=device, pin_memory=pinned)

    @classmethod
    def of(cls, low: Tensor, ties: Tensor) -> Remainder:
        """Bits that are kept already: int16 ``[n]`` and uint8 ``[n / 8]``."""
        rest = cls.__new__(cls)
        rest.low, rest.ties = low, ties
        return rest

    def zero(self) -> None:
        """Make the fp32 values equal to the bf16 ones."""
        self.low.zero_()
        self.ties.zero_()

    def join(self, high: Tensor, start: int, stop: int) -> Tensor:
        """The fp32 values ``[start, stop)``, of which ``high`` are the bf16 values; ``start`` is a multiple of 8."""
        result = torch.empty(stop - start, dtype=torch.float32, device=high.device)
        for first in range(0, stop - start, _CHUNK):
            last = min(first + _CHUNK, stop - start)
            low = self.low[start + first : start + last].to(high.device, non_blocking=True)
            ties = self.ties[(start + first) // 8 : -(-(start + last) // 8)].to(high.device, non_blocking=True)
            bits = result[first:last].view(torch.int32)
            bits.copy_(high[first:last].view(torch.int16))
            bits.mul_(2**16).add_(low).add_(_unpacked(ties, last - first), alpha=2**16)
        return result

    def split(self, wide: Tensor, high: Tensor, start: int, stop: int) -> None:
        """Write fp32 values: the bf16 values into ``high``, the rest here at ``[start, stop)``."""
        for first in range(0, stop - start, _CHUNK):
            last = min(first + _CHUNK, stop - start)
            high[first:last].copy_(wide[first:last])
            rest = high[first:last].view(torch.int16).to(torch.int32).mul_(-(2**16)).add_(wide[first:last].view(torch.int32))
            self.low[start + first : start + last].copy_(rest, non_blocking=True)  # 2**15 wraps to -2**15, and is marked
            ties = self.ties[(start + first) // 8 : -(-(start + last) // 8)]
            ties.copy_(_packed(rest == 2**15), non_blocking=True)


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _packed(flags: Tensor) -> Tensor:
    """``[n]`` flags to ``[n / 8]`` bytes, rounded up."""
    flags = torch.nn.functional.pad(flags, (0, -flags.numel() % 8))
    return (flags.view(-1, 8) * _powers(flags.device)).sum(1, dtype=torch.uint8)


def _unpacked(bits: Tensor, numel: int) -> Tensor:
    """``[n / 8]`` bytes to ``[n]`` zeros and ones."""
    return bits.unsqueeze(1).bitwise_and(_powers(bits.device)).ne(0).view(-1)[:numel].to(torch.int32)
