"""Reading blocks of files on several threads: to compare their checksums, or into tensors anywhere."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.checkpoint.staging import BLOCK_BYTES, Staging, num_threads, raw_bytes, read_exactly
from lightning_megatron.checkpoint.storage import Place, Sums

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Transfer:
    """A block of a saved part, and where its values go.

    Args:
        file: name of the file.
        offset: where the block begins in it.
        num_bytes: from the block's first element to its last.
        dtype: of the elements.
        strides: of the wanted values in the block; those between them are left out.
        target: where they go: of their shape, on any device, of any dtype.
    """

    file: str
    offset: int
    num_bytes: int
    dtype: torch.dtype
    strides: tuple[int, ...]
    target: Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file are those of the target, in host memory."""
        target = self.target
        fits = self.dtype == target.dtype and self.num_bytes == target.numel() * target.element_size()
        return fits and target.device.type == "cpu" and target.is_contiguous()


def transfers(
    file: str,
    begin: int,
    dtype: torch.dtype,
    *,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: Tensor,
) -> Iterator[Transfer]:
    """Cut the reading of a box of a saved part into blocks.

    Args:
        file: name of the file.
        begin: where the elements of the part begin in it, in row-major order.
        dtype: of the elements.
        sizes: of the saved part.
        offsets: of the box in the part.
        target: where its values go; its shape is the size of the box.
    """
    strides = tuple(prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for element, num_elements, part in _cut(target, strides, first, limit=BLOCK_BYTES // dtype.itemsize):
        own_strides = strides[len(strides) - part.dim() :]
        yield Transfer(file, begin + element * dtype.itemsize, num_elements * dtype.itemsize, dtype, own_strides, part)


def _cut(target: Tensor, strides: tuple[int, ...], first: int, *, limit: int) -> Iterator[tuple[int, int, Tensor]]:
    """``(first element, number of elements from first to last, part of the target)`` of each block of rows."""
    if target.dim() == 0:
        yield first, 1, target
        return
    of_row = 1 + sum((length - 1) * stride for length, stride in zip(target.shape[1:], strides[1:], strict=True))
    if of_row > limit:
        for row in range(target.shape[0]):
            yield from _cut(target[row], strides[1:], first + row * strides[0], limit=limit)
        return
    rows = (limit - of_row) // strides[0] + 1
    for row in range(0, target.shape[0], rows):
        part = target[row : row + rows]
        yield first + row * strides[0], of_row + (part.shape[0] - 1) * strides[0], part


class BlockReader:
    """Reads files of one folder on several threads. A context manager.

    Args:
        folder: where they are.
        device: the GPU that tensors are on, if there is one.
    """

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(num_threads(), "checkpoint-reader")
        self._staging = Staging(num_threads(), device)
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _open(self, name: str) -> int:
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY)
        return self._descriptors[name]

    def start(self, wanted: Sequence[Transfer]) -> list[Future[None]]:
        """Begin to read. The targets hold their values when all futures have a result.

        On a GPU what is on the current stream now is done before, and the current stream may use them afterwards.
        """
        on_gpu = next((one.target.device for one in wanted if one.target.is_cuda), None)
        ready = None if on_gpu is None else torch.cuda.current_stream(on_gpu).record_event()
        return [self._pool.submit(self._read, self._open(one.file), one, ready) for one in wanted]

    def _read(self, descriptor: int, one: Transfer, ready: Any) -> None:
        if one.is_direct:
            self._fill(descriptor, one, raw_bytes(one.target))
            return
        with self._staging.lend() as (buffer, stream):
            block = buffer[: one.num_bytes]
            self._fill(descriptor, one, raw_bytes(block))
            values = block.view(one.dtype).as_strided(one.target.shape, one.strides)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if ready is not None:
                    stream.wait_event(ready)
                _copy(values, one.target)
            if stream is not None:
                stream.synchronize()

    def _fill(self, descriptor: int, one: Transfer, target: memoryview) -> None:
        if (found := read_exactly(descriptor, target, one.offset)) < one.num_bytes:
            raise RuntimeError(f"{self._folder / one.file} ends at byte {one.offset + found}, in the middle of a tensor.")

    def changed(self, places: Sequence[Place], sums: Sums) -> list[str]:
        """What is wrong with the bytes of some places, by their checksums, a line each."""
        problems, found = [], []
        for place in sorted(places, key=lambda place: (place.file, place.offset)):
            blocks = sums.of(place)
            if not blocks:
                problems.append(f"{place.key}: {place.file} has no checksum for the {place.length} bytes at {place.offset}")
            for block in blocks:
                found.append((place, self._pool.submit(self._is_sound, self._open(place.file), *block)))
        broken = dict.fromkeys(place for place, sound in found if not sound.result())
        problems += [
            f"{place.key}: the {place.length} bytes at {place.offset} of {place.file} are not those that were written"
            for place in broken
        ]
        return problems

    def _is_sound(self, descriptor: int, offset: int, length: int, crc: int) -> bool:
        found = 0
        with self._staging.lend() as (buffer, _):
            view = raw_bytes(buffer)
            while length > 0:  # a block that has a frame is a little larger than a buffer
                number = read_exactly(descriptor, view[: min(length, len(view))], offset)
                if not number:
                    return False
                found, offset, length = zlib.crc32(view[:number], found), offset + number, length - number
        return found == crc


def _copy(values: Tensor, target: Tensor) -> None:
    """Copy from host memory. On the host without torch's own threads, of which each of ours would start a set."""
    if target.is_cuda or values.dtype != target.dtype or values.dtype.itemsize not in _INTEGERS:
        target.copy_(values, non_blocking=True)
        return
    same = _INTEGERS[values.dtype.itemsize]
    np.copyto(target.view(same).numpy(), values.view(same).numpy())
