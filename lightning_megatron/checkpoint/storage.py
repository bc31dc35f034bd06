"""Reader and writer of a checkpoint's data files, in the layout of torch's ``FileSystemWriter``."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_megatron.checkpoint.files import INDEX_FILE, META_FILE, SUMS_FILE, write_file

_DIRECTORY = 2**14  # the end of an archive of torch.save, in which its list of entries lies
Resolve = Callable[[WriteItem], Tensor | io.BytesIO]


@dataclass(frozen=True)
class Written:
    """Where one tensor part or pickled value lies, and the CRC-32 of its bytes there."""

    index: MetadataIndex
    file: str
    offset: int
    length: int
    crc: int


def write_data(folder: Path, name: str, items: Sequence[WriteItem], resolve: Resolve) -> list[Written]:
    """Write one rank's file, item by item, and flush it to the disk. Host memory holds one item at a time.

    Args:
        folder: the directory.
        name: the file's name in it.
        items: what to write; if there are none, no file is made.
        resolve: gives the tensor, on any device, or the bytes of an item.
    """
    if not items:
        return []
    with open(folder / name, "wb") as raw, _without_inner_checksums():
        stream = _Summing(raw)
        written = []
        for item in items:
            written.append(write_item(stream, name, item, resolve))
            _start_writing_back(raw)  # or all of it waits for the flush
        raw.flush()
        os.fsync(raw.fileno())
    return written


def _start_writing_back(raw: BinaryIO) -> None:
    """Let the system begin to write to the disk what it has got; it need not stay in the page cache."""
    raw.flush()
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_item(stream: _Summing, name: str, item: WriteItem, resolve: Resolve) -> Written:
    """Append one tensor part or pickled value to the file."""
    begin, stream.crc = stream.tell(), 0
    data = resolve(item)
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        torch.save(_compact(data), stream)  # type: ignore[arg-type]
    return Written(item.index, name, begin, stream.tell() - begin, stream.crc)


class _Summing:
    """A file that is appended to, with the CRC-32 of what has been written since ``crc`` was last set to 0."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self.crc = raw, 0
        self.tell, self.flush = raw.tell, raw.flush

    def write(self, data: Any) -> int:
        """Append."""
        self.crc = zlib.crc32(data, self.crc)
        return self._raw.write(data)


@contextmanager
def _without_inner_checksums() -> Iterator[None]:
    """Leave out those that ``torch.save`` adds to its archives, at a third of the speed: the whole item has one of ours."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_index(folder: Path, metadata: Metadata, written: Sequence[Written], *, meta: bytes) -> None:
    """Write the metadata and the checksums (on the first rank), which makes the data readable.

    Args:
        folder: the directory.
        metadata: of all ranks' parts.
        written: where they lie.
        meta: what will be ``meta.pt``.

    Raises:
        RuntimeError: some items were not written.
    """
    planned = sum(
        1 if isinstance(saved, BytesStorageMetadata) else len(saved.chunks) for saved in metadata.state_dict_metadata.values()
    )
    if (number := len({part.index for part in written})) != planned:
        raise RuntimeError(f"only {number} of {planned} parts of the checkpoint were written to {folder}.")
    results = [WriteResult(p.index, p.length, _StorageInfo(p.file, p.offset, p.length)) for p in written]
    FileSystemWriter(folder, sync_files=True).finish(metadata, [results])
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for part in sorted(written, key=lambda part: (part.file, part.offset)):
        parts.setdefault(part.file, []).append((part.offset, part.length, part.crc))
    index = (folder / INDEX_FILE).read_bytes()
    parts |= {name: [(0, len(data), zlib.crc32(data))] for name, data in ((INDEX_FILE, index), (META_FILE, meta))}
    write_file(folder, SUMS_FILE, json.dumps({"algorithm": "crc32", "files": parts}).encode())


def _compact(data: Tensor) -> Tensor:
    """The tensor on the CPU, in a storage of its own size (``torch.save`` writes whole storages)."""
    data = data.detach().cpu()
    if data.untyped_storage().size() != data.numel() * data.element_size() or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data


def data_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"__{rank}_0.distcp"


def read_sums(folder: Path) -> dict[str, dict[int, tuple[int, int]]]:
    """Checksums of a checkpoint, by file and offset: ``(length, crc)``; empty if it has none.

    Raises:
        ValueError: the file that holds them cannot be read.
    """
    file = folder / SUMS_FILE
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())["files"]
        return {name: {offset: (length, crc) for offset, length, crc in parts} for name, parts in content.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}.") from error


def changed_parts(folder: Path, places: Sequence[tuple[str, str, int, int]]) -> list[str]:
    """What is wrong with parts ``(key, file, offset, length)``, by their checksums. Reads all of them, on several threads."""
    sums = read_sums(folder)
    if not sums:
        return []

    def problem(place: tuple[str, str, int, int]) -> str | None:
        key, name, offset, length = place
        expected = sums.get(name, {}).get(offset)
        if expected is None or expected[0] != length:
            return f"{key}: {name} has no checksum for the {length} bytes at {offset}"
        found = _crc_of(folder / name, offset, length)
        return (
            None if found == expected[1] else f"{key}: the {length} bytes at {offset} of {name} are not those that were written"
        )

    with ThreadPoolExecutor(max_workers=4) as pool:
        return [text for text in pool.map(problem, sorted(places, key=lambda place: place[1:])) if text is not None]


def _crc_of(file: Path, offset: int, length: int) -> int:
    crc, block = 0, 2**24
    with open(file, "rb", buffering=0) as stream:
        stream.seek(offset)
        while length > 0 and (data := stream.read(min(block, length))):
            crc, length = zlib.crc32(data, crc), length - len(data)
    return crc


class ChunkReader(FileSystemReader):
    """Reads each saved part once, however many targets want a piece of it.

    Args:
        path: the checkpoint's directory.
        metadata: its metadata, read beforehand.
        verify: compare checksums before anything is loaded, where the checkpoint has them.
    """

    def __init__(self, path: Path, metadata: Metadata, *, verify: bool = True) -> None:
        super().__init__(path)
        self._metadata, self._verify = metadata, verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was given."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Report files that are missing, cut short or changed before anything is loaded."""
        parts = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        ends: dict[str, int] = {}
        for info in parts.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for name, end in sorted(ends.items()):
            file = Path(self.path) / name
            if not file.is_file():
                problems.append(f"{name}: this data file is missing from {self.path}")
            elif file.stat().st_size < end:
                problems.append(f"{name}: this data file has {file.stat().st_size} bytes where {end} were written")
        if self._verify and not problems:
            places = [(index.fqn, info.relative_path, info.offset, info.length) for index, info in parts.items()]
            problems = changed_parts(Path(self.path), places)
        return replace(plan, planner_data=(*(plan.planner_data or ()), *problems))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, in the order in which the parts lie there."""
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            chunks = files.setdefault(self.storage_data[item.storage_index].relative_path, {})
            chunks.setdefault(item.storage_index, []).append(item)
        for name, chunks in files.items():
            with self.fs.create_stream(Path(self.path) / name, "rb") as stream:
                for index in sorted(chunks, key=lambda index: self.storage_data[index].offset):
                    self._serve(stream, index, chunks[index], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _serve(self, stream: Any, index: MetadataIndex, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Read one saved part and hand its pieces out."""
        info = self.storage_data[index]
        source = self._slice_file(stream, info)
        source = self.transforms.transform_load_stream(items[0], info.transform_descriptors or (), source)
        if items[0].type == LoadItemType.BYTE_IO:
            planner.load_bytes(items[0], io.BytesIO(source.read(-1)))
            return
        saved = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in saved.chunks if index.offset is None or chunk.offsets == index.offset)
        target = planner.resolve_tensor(items[0]).detach()
        whole = len(items) == 1 and items[0].lengths == sizes and _can_be_read_into(target, saved.properties.dtype)
        place = target if whole else torch.empty(sizes, dtype=saved.properties.dtype)
        chunk = read_chunk(stream, info.offset, info.length, into=place)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            if chunk is not place or not whole:
                target.copy_(_piece(chunk, item))
            planner.commit_tensor(item, target)


def _can_be_read_into(target: Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype


def read_chunk(stream: BinaryIO, offset: int, length: int, *, into: Tensor) -> Tensor:
    """A saved part, on the CPU: ``into``, filled, or another tensor if the part is of another form.

    Args:
        stream: the file.
        offset: where the part begins.
        length: its bytes.
        into: contiguous, on the CPU, of the part's shape and dtype.
    """
    numel = into.numel() * into.element_size()
    begin = _elements(stream, offset, length, numel) if numel else None
    if begin is None:
        stream.seek(offset)
        return load_tensor(io.BytesIO(stream.read(length)))
    stream.seek(begin)
    stream.readinto(into.view(-1).view(torch.uint8).numpy())  # type: ignore[attr-defined]
    return into


def _elements(stream: BinaryIO, offset: int, length: int, num_bytes: int) -> int | None:
    """Where the elements lie that ``torch.save`` has written; ``None`` if they are not so many bytes in one stored entry."""
    stream.seek(offset + max(0, length - _DIRECTORY))
    tail = stream.read(min(length, _DIRECTORY))
    try:  # zipfile takes bytes before the archive for a prefix: offsets are then relative to what it has been given
        with zipfile.ZipFile(_Tail(tail, length)) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    except (zipfile.BadZipFile, ValueError):
        return None
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED or entries[0].file_size != num_bytes:
        return None
    stream.seek(offset + entries[0].header_offset + 26)
    name, extra = struct.unpack("<HH", stream.read(4))
    return offset + entries[0].header_offset + 30 + int(name) + int(extra)


class _Tail(io.BytesIO):
    """The end of an archive of ``length`` bytes, by positions in the whole of it."""

    def __init__(self, tail: bytes, length: int) -> None:
        super().__init__(tail)
        self._before = length - len(tail)

    def seek(self, position: int, whence: int = 0) -> int:
        """As of any file; what lies before the tail cannot be reached."""
        if whence == 0 and position < self._before:
            raise ValueError("before the tail")
        return super().seek(position - self._before if whence == 0 else position, whence) + self._before

    def tell(self) -> int:
        """As of any file."""
        return super().tell() + self._before


def read_part(folder: Path, index: Metadata, key: str) -> Tensor:
    """A tensor that was saved whole by one rank, on the CPU."""
    info = next(info for at, info in (index.storage_data or {}).items() if at.fqn == key)
    with open(folder / info.relative_path, "rb") as stream:
        stream.seek(info.offset)
        return load_tensor(io.BytesIO(stream.read(info.length)))


def load_tensor(source: Any) -> Tensor:
    """The saved part in a stream, on the CPU."""
    seekable = source if source.seekable() else io.BytesIO(source.read(-1))
    tensor: Tensor = torch.load(seekable, map_location="cpu", weights_only=True)
    return tensor


def _piece(chunk: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    return chunk


__all__ = ["ChunkReader", "Resolve", "Written", "data_file", "read_part", "write_data", "write_index", "write_item"]
