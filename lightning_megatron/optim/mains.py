"""Where the values that the optimizer updates are kept between steps: fp32 copies, remainders, on the device or the host."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron.optim.remainder import Remainder


class MainStore(Protocol):
    """The fp32 values of one shard of a 16-bit parameter, ``[n]``."""

    def read(self, start: int, stop: int) -> Tensor:
        """A tensor of the values ``[start, stop)`` on the parameter's device; ``start`` is a multiple of 8."""

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """Keep new values, and round them into the parameter's range."""

    def refresh(self) -> None:
        """Read the values from the parameter's range."""

    def follow(self) -> None:
        """Read the values from the parameter's range where it is not what they round to."""


class CopyStore:
    """A copy in fp32.

    Args:
        narrow: the range of the parameter buffer, ``[n]``.
        host: keep the copy in host memory.

    Attributes:
        wide: the copy, ``[n]``.
    """

    def __init__(self, narrow: Tensor, *, host: bool) -> None:
        self._narrow = narrow
        place = torch.device("cpu") if host else narrow.device
        self.wide = torch.empty(narrow.numel(), dtype=torch.float32, device=place, pin_memory=host and _can_pin())
        self.refresh()

    def read(self, start: int, stop: int) -> Tensor:
        """See ``MainStore``. On the device the values are a view."""
        return self.wide[start:stop].to(self._narrow.device, non_blocking=True)

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """See ``MainStore``."""
        self._narrow[start:stop].copy_(values)
        if values.data_ptr() != self.wide[start:stop].data_ptr():
            self.wide[start:stop].copy_(values, non_blocking=True)

    def refresh(self) -> None:
        """See ``MainStore``."""
        self.wide.copy_(self._narrow)

    def follow(self) -> None:
        """See ``MainStore``."""
        narrow = self._narrow.to(self.wide.device)
        self.wide.copy_(torch.where(self.wide.to(narrow.dtype) == narrow, self.wide, narrow))


class RemainderStore:
    """The bits that bf16 lacks: see Note [Exactly, and with 16 bits] in ``optim/remainder.py``.

    Args:
        narrow: the range of the parameter buffer, ``[n]`` in bf16.
        host: keep the bits in host memory.

    Attributes:
        rest: the bits.
    """

    def __init__(self, narrow: Tensor, *, host: bool) -> None:
        self._narrow = narrow
        place = torch.device("cpu") if host else narrow.device
        self.rest = Remainder(narrow.numel(), device=place, pinned=host and _can_pin())

    def read(self, start: int, stop: int) -> Tensor:
        """See ``MainStore``."""
        return self.rest.join(self._narrow[start:stop], start, stop)

    def write(self, values: Tensor, start: int, stop: int) -> None:
        """See ``MainStore``."""
        self.rest.split(values, self._narrow[start:stop], start, stop)

    def refresh(self) -> None:
        """See ``MainStore``."""
        self.rest.zero()

    def follow(self) -> None:
        """See ``MainStore``. What was in the range before is not known: all of it is read."""
        self.refresh()


def _can_pin() -> bool:
    return torch.cuda.is_available()
