"""Keep ``torch.autocast`` out of modules that run in the dtype of their own parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(method: Callable[P, T]) -> Callable[P, T]:
    """Run ``method`` with autocast off: inside it would cast each weight again on every call and norms to fp32."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ExitStack() as stack:
            for device_type in ("cuda", "cpu"):
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            return method(*args, **kwargs)

    return run
