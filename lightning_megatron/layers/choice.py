"""Which backend a model is built on: chosen by the strategy, read by a model's root constructor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from lightning_megatron.context_parallel.block import Kernel
from lightning_megatron.context_parallel.flash import flash_attn_interface
from lightning_megatron.layers.backend import Backend
from lightning_megatron.layers.te_backend import Fp8Options, TeBackend, why_unavailable
from lightning_megatron.layers.torch_backend import TorchBackend

BackendName = Literal["auto", "torch", "te"]

_AMBIENT: ContextVar[Backend | None] = ContextVar("lightning_megatron_backend", default=None)


def current_backend() -> Backend:
    """The backend that the strategy sets around ``configure_model``; plain torch outside of it."""
    return _AMBIENT.get() or TorchBackend()


@contextmanager
def use_backend(backend: Backend) -> Iterator[Backend]:
    """Make ``backend`` the ambient one inside the ``with`` block."""
    token = _AMBIENT.set(backend)
    try:
        yield backend
    finally:
        _AMBIENT.reset(token)


def choose_backend(
    name: BackendName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    fp8: Fp8Options | None = None,
    compiles: bool = False,
    attention_kernel: Kernel = "auto",
) -> Backend:
    """The backend of that name. Loads Transformer Engine if it may be used.

    Args:
        name: ``te`` for Transformer Engine, ``torch`` for plain torch with this project's kernels, ``auto`` for Transformer
            Engine with FP8 and plain torch without: in 16 bits the library brings no speed that the kernels have not, and
            it may load an older cuDNN, whose attention is slower.
        device: where the model will run.
        dtype: of its parameters.
        fp8: what to multiply in 8 bits; needs Transformer Engine.
        compiles: let ``torch.compile`` fuse what this project has no kernels for.
        attention_kernel: whose attention in 16 bits, see ``BlockAttention``.

    Raises:
        ValueError: what was asked for cannot be had here; the message says why.
    """
    asker = f"fp8={fp8.recipe!r}" if fp8 is not None else f"backend={name!r}"
    if fp8 is not None and name == "torch":
        raise ValueError(f"{asker} needs Transformer Engine, but backend='torch'; set backend='te' or 'auto', or fp8=None.")
    _check_attention(attention_kernel, device, dtype, fp8)
    chosen: dict[str, Any] = {"compiles": compiles, "attention_kernel": attention_kernel}
    if name != "te" and fp8 is None:
        return TorchBackend(**chosen)
    reason = _why_not(device, dtype)
    if reason is not None:
        raise ValueError(f"{asker} needs Transformer Engine: {reason}. Use backend='torch' and fp8=None without it.")
    if fp8 is not None:
        fp8.check_chip(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    from lightning_megatron.layers.te_backend.te_operations import TeOperations

    return TeBackend(TeOperations(fp8, device=device), fp8, **chosen)


def _check_attention(kernel: Kernel, device: torch.device, dtype: torch.dtype, fp8: Fp8Options | None) -> None:
    """Refuse a kernel that cannot run here.

    Raises:
        ValueError: why, and what to take instead.
    """
    if kernel in ("auto", "math"):
        return
    reason = ""
    if fp8 is not None and fp8.attention:
        reason = "is for attention in 16 bits, but fp8_attention=True; leave out one of them"
    elif device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        reason = f"is for 16 bits on a GPU, but the model is {dtype} on {device.type}; use 'auto'"
    elif kernel == "flash_attn":
        try:
            flash_attn_interface()
        except ImportError as error:
            reason = f"needs the package flash-attn, which cannot be imported ({error}); install it, or use 'auto'"
    if reason:
        raise ValueError(f"attention_kernel={kernel!r} {reason}.")


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"the model runs on {device.type}, not on a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"its layers are for 16-bit parameters, and this precision's are {dtype}"
    return why_unavailable()
