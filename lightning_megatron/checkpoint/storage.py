"""Reader and writer of a checkpoint's data files, in the layout of torch's ``FileSystemWriter``."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class SafeWriter(FileSystemWriter):
    """Writes one file a rank, item by item, and completes only when every planned item has been written.

    Differs from the stock writer in two ways. Host memory holds one item at a time, not all of the rank's. The number of
    items is checked before the metadata is written (the stock writer's threads lose errors).

    Args:
        path: an empty or missing directory.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and flush it to the disk."""
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with open(Path(self.path) / name, "wb") as stream:
                results = [self.write_item(stream, name, item, planner) for item in plan.items]
                stream.flush()
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def write_item(self, stream: BinaryIO, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
        """Append one tensor part or pickled value to the file."""
        begin = stream.tell()
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            stream.write(data.getbuffer())
        else:
            torch.save(_compact(data), stream)
        length = stream.tell() - begin
        return WriteResult(index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, begin, length))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata (on the first rank), which makes the data readable.

        Raises:
            RuntimeError: some items were not written.
        """
        planned = sum(
            1 if isinstance(saved, BytesStorageMetadata) else len(saved.chunks)
            for saved in metadata.state_dict_metadata.values()
        )
        written = len({result.index for of_rank in results for result in of_rank})
        if written != planned:
            raise RuntimeError(f"only {written} of {planned} parts of the checkpoint were written to {self.path}.")
        super().finish(metadata, results)


def _compact(data: Tensor) -> Tensor:
    """The tensor on the CPU, in a storage of its own size (``torch.save`` writes whole storages)."""
    data = data.detach().cpu()
    if data.untyped_storage().size() != data.numel() * data.element_size() or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data


class ChunkReader(FileSystemReader):
    """Reads each saved part once, however many targets want a piece of it.

    Args:
        path: the checkpoint's directory.
        metadata: its metadata, read beforehand.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was given."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Report files that are missing or cut short before anything is read."""
        ends: dict[str, int] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for name, end in sorted(ends.items()):
            file = Path(self.path) / name
            if not file.is_file():
                problems.append(f"{name}: this data file is missing from {self.path}")
            elif file.stat().st_size < end:
                problems.append(f"{name}: this data file has {file.stat().st_size} bytes where {end} were written")
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
        chunk = load_tensor(source)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(_piece(chunk, item))
            planner.commit_tensor(item, target)


def load_tensor(source: Any) -> Tensor:
    """The saved part in a stream, on the CPU."""
    seekable = source if source.seekable() else io.BytesIO(source.read(-1))
    tensor: Tensor = torch.load(seekable, map_location="cpu", weights_only=True)
    return tensor


def _piece(chunk: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    return chunk


__all__ = ["ChunkReader", "SafeWriter"]
