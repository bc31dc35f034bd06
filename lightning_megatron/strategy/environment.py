"""Environment variables that libraries read once, chosen by the layout; and what is said about them.

What the user has set is never changed. Variables that CUDA reads when it starts are set only before that (importing
Transformer Engine starts it); processes that this one starts have them in any case. The allocator is told directly, which it
hears at any time: memory that it has taken stays as it is, and what it takes from then on is as it was told.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch

from lightning_megatron.parallelism import Parallelism

_BLACKWELL = 10
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the old name of the first


@dataclass(frozen=True)
class Setting:
    """One environment variable.

    Args:
        name: of the variable.
        value: what it is to be.
        why: said to the user.
        before_cuda: whether it is read when CUDA starts.
        other_names: of the same thing; the user may have set one of these.
    """

    name: str
    value: str
    why: str
    before_cuda: bool = False
    other_names: tuple[str, ...] = ()


def settings_for(
    parallelism: Parallelism, *, capability: tuple[int, int] | None, allocator_listens: bool = True
) -> list[Setting]:
    """What a layout wants.

    Args:
        parallelism: the layout.
        capability: of the GPU; ``None`` if it is not known.
        allocator_listens: whether torch's allocator can be told after CUDA has started.
    """
    settings = []
    axes = [f"{name}={size}" for name, size in (("tp", parallelism.tp), ("cp", parallelism.cp)) if size > 1]
    if axes and capability is not None and capability[0] < _BLACKWELL:
        # Before Blackwell kernels of two streams start in the order of their launch only if they share a queue: a collective
        # that is launched before the product that it runs beside must not find the whole GPU taken.
        why = f"{', '.join(axes)}: collectives start before the products that they run beside"
        settings.append(Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, before_cuda=True))
    why = "memory that is let go fits again"
    late, others = not allocator_listens, _ALLOCATOR[1:]
    settings.append(Setting(_ALLOCATOR[0], "expandable_segments:True", why, before_cuda=late, other_names=others))
    why = "groups of two ranks are meant"
    settings.append(Setting("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false", why))
    return settings


def apply(settings: list[Setting], environ: MutableMapping[str, str], *, cuda_has_started: bool) -> tuple[list[Setting], str]:
    """Set what is not set yet.

    Args:
        settings: what is wanted.
        environ: the process's environment.
        cuda_has_started: whether it is too late for some.

    Returns:
        What was set, and a line about all of it.
    """
    done, said = [], []
    for setting in settings:
        there = next((name for name in (setting.name, *setting.other_names) if name in environ), None)
        if there is not None:
            said.append(f"{there}={environ[there]} (as it was set)")
        elif setting.before_cuda and cuda_has_started:
            said.append(f"not {setting.name}={setting.value}: CUDA has started already, set it in the shell")
        else:
            environ[setting.name] = setting.value
            done.append(setting)
            said.append(f"{setting.name}={setting.value} ({setting.why})")
    return done, f"environment: {'; '.join(said)}."


def set_environment(parallelism: Parallelism, device: torch.device) -> str | None:
    """Set this process's environment; a line for the user, ``None`` where there is no CUDA device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    capability = torch.cuda.get_device_capability(device) if has_started else _capability_by_driver()
    setter = _allocator_setter()
    settings = settings_for(parallelism, capability=capability, allocator_listens=setter is not None)
    done, line = apply(settings, os.environ, cuda_has_started=has_started)
    for setting in done:
        if setting.name in _ALLOCATOR and setter is not None:
            setter(setting.value)  # torch may have read its variable when it was imported
    return line


def _allocator_setter() -> Callable[[str], None] | None:
    """Tells torch's allocator what its variable would have; the second name is that of torch before 2.9."""
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    return next((setter for name in names if (setter := getattr(torch._C, name, None)) is not None), None)


def _capability_by_driver() -> tuple[int, int] | None:
    """Of the machine's first GPU, without starting CUDA, for which it would be too late then."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    finally:
        nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)
