"""Memory through which bytes pass on their way between a disk and a tensor, in blocks, on several threads.

Note [Blocks]
Files are written, summed and read in blocks of 8 MiB. Several threads do so at once, as a checksum or a copy takes about as
long as the disk; none of these holds Python's lock. A block of a tensor in host memory goes to the disk and comes from there
without a copy; any other passes through one of a few buffers, which are page-locked if a GPU is at the other end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import LifoQueue
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 2**23
NUM_THREADS_BESIDE = 2  # while the training has better uses for the cores
_MOST_THREADS = 8


class Staging:
    """At most ``number`` buffers of one block each, made when they are wanted.

    Args:
        number: how many.
        device: the GPU at the other end, if there is one: each buffer then has a stream of its own.
    """

    def __init__(self, number: int, device: torch.device | None = None) -> None:
        self._device = device
        self._free: LifoQueue[tuple[Tensor, Any] | None] = LifoQueue()
        for _ in range(number):
            self._free.put(None)

    @contextmanager
    def lend(self) -> Iterator[tuple[Tensor, Any]]:
        """A buffer, ``[BLOCK_BYTES]`` uint8, and its stream (``None`` without a GPU), until the block ends. May wait."""
        one = self._free.get()
        try:
            if one is None:
                one = self._make()
            yield one
        finally:
            self._free.put(one)

    def _make(self) -> tuple[Tensor, Any]:
        stream = None if self._device is None else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=stream is not None), stream


def num_threads() -> int:
    """How many threads read or write: one for each core that this process may use, 2 to 8 of them.

    More than the cores take turns, and so ask for the blocks of a file out of order.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(cores, _MOST_THREADS))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def read_exactly(descriptor: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` from a file. Returns how many bytes there were: fewer if the file ends."""
    done = 0
    while done < len(target) and (number := os.preadv(descriptor, [target[done:]], offset + done)):
        done += number
    return done


def write_exactly(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        number = os.pwritev(descriptor, left, offset)
        offset += number
        while left and number >= len(left[0]):
            number -= len(left.pop(0))
        if number:
            left[0] = left[0][number:]
