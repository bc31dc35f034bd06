"""Triton kernels for what is bound by memory. Each file imports Triton, so import one only where ``available()``."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def available() -> bool:
    """Whether Triton kernels can run here: a CUDA device, and the package (it comes with torch's CUDA builds)."""
    return torch.cuda.is_available() and find_spec("triton") is not None
