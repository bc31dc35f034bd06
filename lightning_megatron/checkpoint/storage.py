"""The small files of a checkpoint: the index, and the checksums of everything."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron.checkpoint.files import INDEX_FILE, META_FILE, SUMS_FILE, write_file
from lightning_megatron.checkpoint.writing import Written

SMALL_FILES = (INDEX_FILE, META_FILE)
BlockSum = tuple[int, int, int]  # offset, length, CRC-32


def data_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True)
class Place:
    """Bytes of a file, and what they are."""

    key: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Sums:
    """Checksums of a checkpoint, and where its elements lie.

    Args:
        blocks: ``file -> [(offset, length, crc)]``, in the order of the offsets.
        elements: ``(file, offset of a part) -> offset`` of the first element of the tensor in it.
    """

    blocks: dict[str, list[BlockSum]]
    elements: dict[tuple[str, int], int]

    def of(self, place: Place) -> list[BlockSum]:
        """The blocks that make up a place; none, if they do not."""
        blocks = self.blocks.get(place.file, [])
        first, position = bisect_left(blocks, (place.offset,)), place.offset
        last = first
        while last < len(blocks) and blocks[last][0] == position < place.offset + place.length:
            position += blocks[last][1]
            last += 1
        return blocks[first:last] if position == place.offset + place.length else []


def places_of(index: Metadata, keys: set[str] | None = None) -> list[Place]:
    """Where the parts of tensors and the values lie; of all keys, or of some."""
    data = index.storage_data or {}
    return [
        Place(at.fqn, info.relative_path, info.offset, info.length)
        for at, info in data.items()
        if keys is None or at.fqn in keys
    ]


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
    blocks: dict[str, list[BlockSum]] = {}
    elements: dict[str, list[tuple[int, int]]] = {}
    for part in sorted(written, key=lambda part: (part.file, part.offset)):
        blocks.setdefault(part.file, []).extend(part.blocks)
        if part.elements is not None:
            elements.setdefault(part.file, []).append((part.offset, part.elements))
    index = (folder / INDEX_FILE).read_bytes()
    blocks |= {name: [(0, len(data), zlib.crc32(data))] for name, data in ((INDEX_FILE, index), (META_FILE, meta))}
    content = {"files": blocks, "elements": elements}
    write_file(folder, SUMS_FILE, json.dumps({"algorithm": "crc32", **content, "own": _sum_of(content)}).encode())


def _sum_of(content: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def read_sums(folder: Path) -> Sums | None:
    """The checksums of a checkpoint; ``None`` if it has none.

    Raises:
        ValueError: the file that holds them is damaged.
    """
    file = folder / SUMS_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
        own = content.pop("own")
        content.pop("algorithm")
        if own != _sum_of(content):
            raise ValueError("its bytes are not those that were written")
        blocks = {name: [(offset, length, crc) for offset, length, crc in of] for name, of in content["files"].items()}
        elements = {(name, part): begin for name, of in content["elements"].items() for part, begin in of}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error}.") from error
    return Sums(blocks, elements)
