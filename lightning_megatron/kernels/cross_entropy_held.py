"""Cross entropy over a whole vocabulary and its gradient on Hopper, with each row on chip between the two.

Note [A row on chip]
``cross_entropy.losses_with_gradient`` looks at a row twice, and with hundreds of rows of 256 KB under way the cache has lost
half of them by the second look. Here (``cuda/cross_entropy.cu``) four multiprocessors take a row together, a quarter each in
shared memory, so that memory is read once and written once. Sums are in fp32; of an element's exponential only the factor
that is the same for a thread's whole share is known later, so the gradient is rounded once more in fp32 than there, before
it is rounded to bf16.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from ctypes import byref, c_int, c_uint, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.kernels import hopper
from lightning_megatron.kernels.hopper import Kernel, in_context, kernel, runs_on

_PROGRAMS_A_CLUSTER, _NUM_THREADS, _PIECE = 4, 512, 8
_MOST_COLUMNS = _PROGRAMS_A_CLUSTER * 480 * 9 * _PIECE  # 9 pieces for each of the threads of a program that compute
_COPY_BYTES = 1 << 17  # of one copy at most: a program's whole part of a row
_MOST_ROWS = 1 << 30


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        *((f"{of}_{axis}", c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_memory", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("num_attributes", c_uint),
    ]


def fits(logits: Tensor, labels: Tensor, *, ignore_index: int) -> bool:
    """Whether the kernel takes logits ``[N, C]`` and labels ``[N]``: bf16 and int64, rows of whole pieces of 16 bytes."""
    return (
        logits.dtype == torch.bfloat16
        and labels.dtype == torch.int64
        and logits.dim() == 2
        and labels.shape == logits.shape[:1]
        and labels.device == logits.device
        and all(t.is_cuda and t.is_contiguous() for t in (logits, labels))
        and logits.shape[0] <= _MOST_ROWS
        and 0 < logits.shape[1] <= _MOST_COLUMNS
        and not (logits.shape[1] % _PIECE or logits.data_ptr() % 16)
        and -(2**31) <= ignore_index < 2**31
        and runs_on(logits.device)
        and _is_right(logits.device)
    )


def losses_with_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    num_real: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    copy_bytes: int = _COPY_BYTES,
) -> Tensor:
    """Losses ``[N, C], [N] -> fp32 [N]`` over a whole vocabulary; ``logits`` become the gradient of each row's loss.

    Args:
        logits: rows that fit; written over. 0 beyond ``num_real``, and in rows that do not count.
        labels: columns, ``ignore_index`` for rows that do not count.
        num_real: columns that count, at least 1.
        ignore_index: see ``labels``.
        label_smoothing: see ``tensor_parallel.cross_entropy``.
        z_loss: likewise.
        copy_bytes: of one copy between memory and a multiprocessor at most, a multiple of 16.
    """
    num, columns = logits.shape
    losses = logits.new_empty(num, dtype=torch.float32)
    if num:
        factors = (1.0 - label_smoothing, label_smoothing / num_real, z_loss)
        with in_context(logits.device):
            found = _kernel("held_losses_smoothed" if label_smoothing > 0.0 else "held_losses", logits.device)
            found.launch(
                _PROGRAMS_A_CLUSTER * min(num, _num_clusters(logits.device)),
                *(logits, labels, losses, num, columns, num_real, ignore_index),
                *(_bits(factor) for factor in factors),
                copy_bytes,
                device=logits.device,
            )
    return losses


_right: dict[torch.device, bool] = {}


def _is_right(device: torch.device) -> bool:
    """Whether this machine makes a kernel of the source that computes the right thing; looked at once, and said if not."""
    if device not in _right:
        if torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compared while it is only recorded
        _right[device] = _agrees(device)
        if not _right[device]:
            warnings.warn(
                "Cross entropy that reads logits once does not work on this machine; one that reads them twice takes its "
                "place, slower by a quarter.",
                stacklevel=2,
            )
    return _right[device]


def _agrees(device: torch.device) -> bool:
    """Whether losses and gradients of a few rows are those of plain torch. Waits for the device."""
    num_real, z_loss = 1001, 1e-3
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(9, 1024, device=device, generator=generator).mul_(3.0).bfloat16()
    labels = torch.randint(num_real, (9,), device=device, generator=generator)
    labels[4] = -100
    counts = (labels != -100).float()
    wide, places = logits.float()[:, :num_real], labels.clamp(min=0)[:, None]
    lse = wide.logsumexp(-1)
    for smoothing in (0.0, 0.1):
        found = logits.clone()
        options: dict[str, Any] = {"num_real": num_real, "label_smoothing": smoothing, "z_loss": z_loss}
        try:
            losses = losses_with_gradient(found, labels, ignore_index=-100, **options)
        except RuntimeError:
            return False
        of_target = (1.0 - smoothing) * wide.gather(1, places)[:, 0] + smoothing / num_real * wide.sum(-1)
        gradient = (wide - lse[:, None]).exp() * (1.0 + 2.0 * z_loss * lse)[:, None] - smoothing / num_real
        gradient.scatter_add_(1, places, torch.full_like(places, smoothing - 1.0, dtype=torch.float32))
        expected = torch.cat((gradient, torch.zeros(9, 1024 - num_real, device=device)), dim=1) * counts[:, None]
        near = torch.allclose(losses, (lse - of_target + z_loss * lse.square()) * counts, rtol=1e-4, atol=1e-4)
        if not (near and torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-6)):
            return False
    return True


def _bits(value: float) -> int:
    """Of the fp32 number: what is launched takes integers of 32 bits."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


@cache
def _num_clusters(device: torch.device) -> int:
    """How many run at once.

    At most a quarter of the multiprocessors, and less where groups of them that can share memory are not of multiples of
    four (30 of 132 / 4 = 33 on an H200). One cluster too many would take its rows after all others were done.
    """
    found = c_int()
    config = _LaunchConfig(block_x=_NUM_THREADS, block_y=1, block_z=1, shared_memory=hopper.SHARED_MEMORY)
    config.grid_x = torch.cuda.get_device_properties(device).multi_processor_count // _PROGRAMS_A_CLUSTER * _PROGRAMS_A_CLUSTER
    config.grid_y = config.grid_z = 1
    with in_context(device):
        function = _kernel("held_losses", device)._function
        status = hopper._driver().cuOccupancyMaxActiveClusters(byref(found), function, byref(config))
    hopper._check(status, "cuOccupancyMaxActiveClusters")
    return max(1, found.value)


def _kernel(name: str, device: torch.device) -> Kernel:
    return kernel("cross_entropy.cu", name, device, num_threads=_NUM_THREADS)
