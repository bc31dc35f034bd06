"""Kernels: Triton for what is bound by memory, CUDA C++ for products on Hopper, and what chooses among products.

``products.py`` says what multiplies, ``tuned_products.py`` times what is the fastest; ``cuda`` and ``hopper*.py`` hold the
kernels in C++. Each file of Triton kernels imports Triton, so import one only where ``available()``.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether Triton kernels can run here: a CUDA device, and the package (it comes with torch's CUDA builds)."""
    return torch.cuda.is_available() and find_spec("triton") is not None


def stream_of(device: torch.device) -> int:
    """The handle of the current stream of a CUDA device; a tenth of the time that it takes to make a ``torch.cuda.Stream``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether kernels can work on this tensor: it is on CUDA, and not in double precision, which they do not keep."""
    return tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and available()
