"""Pointwise functions fused by ``torch.compile``, where this project has no kernels of its own and the user asks for it.

Compiled functions are pure: tensors in, tensors out, no module, no random numbers and no collective, so that nothing else
changes. Functions that draw random numbers stay as they are: compiled ones draw others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call and anew for other shapes; as it is while somebody watches torch's functions.

    Parameters that are on their way are watched (``optim/guard.py``), which a compiled function would not notice.
    """
    if _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        return function
    return _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, dynamic=None)
    return made
