"""Writer of a rank's data file, in the layout of torch's ``FileSystemWriter``: archives of ``torch.save``, one after the other.

Note [Frames]
``torch.save`` surrounds the bytes of a tensor with an archive of a few hundred more. They depend on shape and dtype alone, so
they come from saving a tensor whose memory is reserved and never touched; the bytes themselves go to the disk from where they
are, in blocks (see Note [Blocks] in ``checkpoint/staging.py``). Nothing is held in memory twice.
"""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from lightning_megatron.checkpoint import staging
from lightning_megatron.checkpoint.staging import BLOCK_BYTES, Staging, raw_bytes, write_exactly

Resolve = Callable[[WriteItem], Tensor | io.BytesIO]
_IN_FLIGHT_BYTES = 2**26
_EMPTY = memoryview(b"")


@dataclass(frozen=True)
class Written:
    """Where one tensor part or pickled value lies.

    Args:
        index: which one.
        file: name of the file.
        offset: where it begins.
        length: its bytes.
        elements: where the tensor's elements begin in the file; ``None`` if they do not lie there as they are in memory.
        blocks: ``(offset, length, crc)`` of the blocks that it was written in.
    """

    index: MetadataIndex
    file: str
    offset: int
    length: int
    elements: int | None
    blocks: tuple[tuple[int, int, int], ...]


def write_data(
    folder: Path, name: str, items: Sequence[WriteItem], resolve: Resolve, *, num_threads: int | None = None
) -> list[Written]:
    """Write one rank's file and flush it to the disk. Little more than one item at a time is in memory because of it.

    Args:
        folder: the directory.
        name: the file's name in it.
        items: what to write; if there are none, no file is made.
        resolve: gives the tensor, on any device, or the bytes of an item.
        num_threads: that write; by default as many as suit the machine.
    """
    if not items:
        return []
    with open(folder / name, "wb", buffering=0) as raw, _without_inner_checksums():
        with _BlockWriter(raw.fileno(), num_threads or staging.num_threads()) as writer:
            pending = [write_item(writer, name, item, resolve) for item in items]
        written = [finish() for finish in pending]
        os.fsync(raw.fileno())
    return written


def write_item(writer: _BlockWriter, name: str, item: WriteItem, resolve: Resolve) -> Callable[[], Written]:
    """Append one tensor part or pickled value to the file. What is returned tells where it lies, when all is written."""
    data, begin, elements = resolve(item), writer.position, None
    if isinstance(data, Tensor) and _is_plain(data) and (frame := _Frame(data)).is_whole:
        elements = begin + len(frame.head)
        blocks = writer.append(data.detach(), head=frame.head, tail=frame.tail)
    else:
        blocks = writer.append(None, head=memoryview(_pickled(data)))
    length = writer.position - begin
    return lambda: Written(item.index, name, begin, length, elements, tuple(block.result() for block in blocks))


def _is_plain(data: Tensor) -> bool:
    """Whether its elements are bytes in a row, or can be made so."""
    whole = type(data) in (Tensor, nn.Parameter) and data.layout == torch.strided and data.numel() > 0
    return whole and not (data.is_conj() or data.is_neg() or data.is_quantized)


def _pickled(data: Tensor | io.BytesIO) -> bytes:
    if isinstance(data, io.BytesIO):
        return data.getvalue()
    buffer = io.BytesIO()
    torch.save(data.detach().cpu().clone(memory_format=torch.contiguous_format), buffer)
    return buffer.getvalue()


class _Frame:
    """What ``torch.save`` writes before and behind the elements of a tensor like the one given.

    Attributes:
        head: before.
        tail: behind.
    """

    def __init__(self, like: Tensor) -> None:
        shape = like.shape
        storage = torch.UntypedStorage(like.numel() * like.element_size())  # type: ignore[no-untyped-call]
        self._begin, self._num_bytes = storage.data_ptr(), storage.nbytes()
        self._parts = (io.BytesIO(), io.BytesIO())
        self._found = 0
        strides = torch.empty(shape, device="meta").stride()
        torch.save(torch.empty(0, dtype=like.dtype).set_(storage, 0, shape, strides), self)  # type: ignore[arg-type]
        self.head, self.tail = (memoryview(part.getvalue()) for part in self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether it was made as it is meant to be: ``torch.save`` might come to copy elements before it writes them."""
        return self._found == self._num_bytes

    def write(self, data: Any) -> int:
        """Take what belongs to the frame."""
        place = np.frombuffer(data, dtype=np.uint8).ctypes.data if len(data) else 0
        if self._begin <= place < self._begin + self._num_bytes:
            self._found += len(data)
        else:
            self._parts[self._found > 0].write(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


class _BlockWriter:
    """Appends to a file by several threads. Errors come with the block's ``result``, or from ``append``.

    Args:
        descriptor: the file, open for writing.
        num_threads: how many.
    """

    def __init__(self, descriptor: int, num_threads: int) -> None:
        self._descriptor, self.position = descriptor, 0
        self._pool, self._num_threads = ThreadPoolExecutor(num_threads, "checkpoint-writer"), num_threads
        self._staging: Staging | None = None
        self._hinting = threading.Lock()
        self._under_way: deque[tuple[Future[tuple[int, int, int]], int]] = deque()
        self._num_bytes = 0

    def __enter__(self) -> _BlockWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)

    def append(
        self, data: Tensor | None, *, head: memoryview = _EMPTY, tail: memoryview = _EMPTY
    ) -> list[Future[tuple[int, int, int]]]:
        """Write ``head``, the elements of ``data`` and ``tail``; returns ``(offset, length, crc)`` of each block."""
        source = _Source(data, self._staging_for(data)) if data is not None else None
        size, start, blocks = source.num_bytes if source is not None else 0, 0, []
        while True:
            stop = min(start + BLOCK_BYTES, size)
            ends = (head if start == 0 else _EMPTY, tail if stop == size else _EMPTY)
            length = len(ends[0]) + stop - start + len(ends[1])
            self._make_room(length)
            block = self._pool.submit(self._write, source, start, stop, ends=ends, offset=self.position)
            blocks.append(block)
            self._under_way.append((block, length))
            self._num_bytes += length
            self.position += length
            start = stop
            if start == size:
                return blocks

    def _make_room(self, length: int) -> None:
        while self._under_way and self._num_bytes + length > _IN_FLIGHT_BYTES:
            block, done = self._under_way.popleft()
            block.result()
            self._num_bytes -= done

    def _staging_for(self, data: Tensor) -> Staging | None:
        if data.is_cuda and self._staging is None:
            self._staging = Staging(self._num_threads, data.device)
        return self._staging

    def _write(
        self, source: _Source | None, start: int, stop: int, *, ends: tuple[memoryview, memoryview], offset: int
    ) -> tuple[int, int, int]:
        if source is None:
            return self._put(ends, offset)
        with source.host_bytes(start, stop) as view:
            return self._put((ends[0], view, ends[1]), offset)

    def _put(self, buffers: Sequence[memoryview], offset: int) -> tuple[int, int, int]:
        crc, length = 0, sum(len(buffer) for buffer in buffers)
        for buffer in buffers:
            crc = zlib.crc32(buffer, crc)
        write_exactly(self._descriptor, buffers, offset)
        self._start_writing_back()
        return offset, length, crc

    def _start_writing_back(self) -> None:
        """Let the system begin to write to the disk what it has got, or all waits for the flush; it need not be kept."""
        if hasattr(os, "posix_fadvise") and self._hinting.acquire(blocking=False):  # one thread is enough, and faster
            try:
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._hinting.release()


class _Source:
    """The elements of a tensor as bytes, which may lie on a GPU."""

    def __init__(self, data: Tensor, staging: Staging | None) -> None:
        self._flat = data.contiguous().view(-1).view(torch.uint8)
        self._staging = staging if data.is_cuda else None
        self._ready = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
        self.num_bytes = self._flat.numel()

    @contextmanager
    def host_bytes(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes ``[start, stop)``."""
        if self._staging is None:
            yield raw_bytes(self._flat[start:stop])
            return
        with self._staging.lend() as (buffer, stream):
            with torch.cuda.stream(stream):
                stream.wait_event(self._ready)
                buffer[: stop - start].copy_(self._flat[start:stop], non_blocking=True)
            stream.synchronize()
            yield raw_bytes(buffer[: stop - start])


@contextmanager
def _without_inner_checksums() -> Iterator[None]:
    """Leave out those that ``torch.save`` adds to its archives: our own cover each block."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


__all__ = ["Resolve", "Written", "write_data", "write_item"]
