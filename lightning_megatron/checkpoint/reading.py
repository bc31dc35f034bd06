"""Reads what a checkpoint's data files hold, straight to where it belongs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as Reading
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_megatron.checkpoint import files
from lightning_megatron.checkpoint.blocks import BlockReader, Transfer, transfers
from lightning_megatron.checkpoint.boxes import KeptPart
from lightning_megatron.checkpoint.planner import StrictLoadPlanner
from lightning_megatron.checkpoint.storage import SMALL_FILES, Place, Sums, read_sums
from lightning_megatron.optim.kept import Kept


class ChunkReader(FileSystemReader):
    """Reads each wanted element once, on several threads, in the order in which they lie in the files.

    Args:
        path: the checkpoint's directory.
        metadata: its metadata, read beforehand.
        sums: its checksums, likewise; ``None`` if it has none.
        verify: compare checksums before anything is loaded, where the checkpoint has them.
        device: the GPU that targets are on, if they are.
        read_later: places that are to be checked with what is loaded now.
    """

    def __init__(
        self,
        path: Path,
        metadata: Metadata,
        sums: Sums | None,
        *,
        verify: bool = True,
        device: torch.device | None = None,
        read_later: Sequence[Place] = (),
    ) -> None:
        super().__init__(path)
        self._folder, self._metadata, self._sums = path, metadata, sums
        self._verify, self._device, self._read_later = verify, device, read_later

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was given."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Report files that are missing, cut short or changed before anything is loaded."""
        places = list(dict.fromkeys([*(self._place(item.storage_index) for item in plan.items), *self._read_later]))
        problems = short_files(self._folder, places)
        if self._verify and self._sums is not None and not problems:
            with BlockReader(self._folder) as reader:
                problems = reader.changed(places, self._sums)
        return replace(plan, planner_data=(*(plan.planner_data or ()), *problems))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the targets."""
        assert isinstance(planner, StrictLoadPlanner)
        wanted: list[Transfer] = []
        pieces: dict[tuple[int, int], _Piece] = {}
        with BlockReader(self._folder, self._device) as reader:
            for item in sorted(plan.items, key=self._position):
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, read_bytes(self._folder, self._place(item.storage_index)))
                elif (part := planner.kept_part(item)) is not None:
                    pieces.setdefault((id(part.values), part.piece.start), _Piece(part.values, part.piece)).add(item, part)
                else:
                    wanted += self._transfers(item, planner.resolve_tensor(item).detach())
            _finish(reader.start(wanted))
            self._read_pieces(reader, list(pieces.values()), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_pieces(self, reader: BlockReader, pieces: Sequence[_Piece], planner: StrictLoadPlanner) -> None:
        """Read values that are kept in another form, the next piece while one is put away."""
        under_way: list[Callable[[], None]] = []
        for piece in pieces:
            values = piece.values.read(piece.elements.start, piece.elements.stop)
            wanted = chain.from_iterable(
                self._transfers(item, planner.transform_tensor(item, part.within(values))) for item, part in piece.items
            )
            under_way.append(partial(piece.put_away, values, reader.start(list(wanted))))
            if len(under_way) > 1:
                under_way.pop(0)()
        for put_away in under_way:
            put_away()

    def _place(self, index: MetadataIndex) -> Place:
        info = self.storage_data[index]
        return Place(index.fqn, info.relative_path, info.offset, info.length)

    def _position(self, item: ReadItem) -> tuple[str, int]:
        info = self.storage_data[item.storage_index]
        return info.relative_path, info.offset

    def _transfers(self, item: ReadItem, target: Tensor) -> Iterator[Transfer]:
        """How to read one item; what does not lie in the file as it does in memory is read at once."""
        info, saved = self.storage_data[item.storage_index], self._metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        begin = None if self._sums is None else self._sums.elements.get((info.relative_path, info.offset))
        if begin is None:
            part = read_part(self._folder, self._place(item.storage_index))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target.copy_(part)
            return
        sizes = _chunk_sizes(saved, item.storage_index)
        offsets, dtype = item.storage_offsets, saved.properties.dtype
        yield from transfers(info.relative_path, begin, dtype, sizes=sizes, offsets=offsets, target=target)


class _Piece:
    """A range of values that are kept in another form, and what is read into it."""

    def __init__(self, values: Kept, elements: range) -> None:
        self.values, self.elements = values, elements
        self.items: list[tuple[ReadItem, KeptPart]] = []

    def add(self, item: ReadItem, part: KeptPart) -> None:
        """Read an item into one of its parts."""
        self.items.append((item, part))

    def put_away(self, values: Tensor, reads: Sequence[Reading[None]]) -> None:
        """Keep the values when they have been read."""
        _finish(reads)
        self.values.write(values, self.elements.start, self.elements.stop)


def _chunk_sizes(saved: TensorStorageMetadata, index: MetadataIndex) -> torch.Size:
    """Of the saved part that begins at the index's offset."""
    if index.index is not None and saved.chunks[index.index].offsets == index.offset:
        return saved.chunks[index.index].sizes
    return next(chunk.sizes for chunk in saved.chunks if index.offset is None or chunk.offsets == index.offset)


def _finish(reads: Iterable[Reading[None]]) -> None:
    for one in reads:
        one.result()


def short_files(folder: Path, places: Sequence[Place], *, exactly: bool = False) -> list[str]:
    """Files that are missing or end too early, a line each.

    Args:
        folder: where they are.
        places: what is wanted of them.
        exactly: also name files that are longer than what is wanted.
    """
    by_file: dict[str, list[Place]] = {}
    for place in places:
        by_file.setdefault(place.file, []).append(place)
    problems = []
    for name, wanted in sorted(by_file.items()):
        file, end = folder / name, max(place.offset + place.length for place in wanted)
        size = file.stat().st_size if file.is_file() else 0
        lost = sorted({place.key for place in wanted if place.offset + place.length > size})  # "model." comes first
        holds = f" ({', '.join(lost[:2])}{f' and {len(lost) - 2} more' if len(lost) > 2 else ''})"
        if not file.is_file():
            problems.append(f"{name}: this data file is missing from {folder}{holds}")
        elif size < end or (exactly and size != end):
            problems.append(f"{name}: this data file has {size} bytes where {end} were written{holds if lost else ''}")
    return problems


def small_files(path: Path, weights_only: bool | None, *, verify: bool) -> tuple[Metadata, dict[str, Any], Sums | None]:
    """The index, ``meta.pt`` and the checksums of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint, or an incomplete one.
        ValueError: something else is there, or one of them is damaged.
    """
    files.check(path)
    sums = read_sums(path)
    for name in SMALL_FILES if verify and sums is not None else ():
        if changed_parts(path, [Place(name, name, 0, (path / name).stat().st_size)]):
            raise ValueError(f"{path / name} is damaged: its bytes are not those that were written.")
    return files.read_index(path), files.read_pickled(path / files.META_FILE, weights_only), sums


def changed_parts(folder: Path, places: Sequence[Place]) -> list[str]:
    """What is wrong with the bytes of some places, by the checkpoint's checksums, if it has any. Reads all of them."""
    sums = read_sums(folder)
    if sums is None:
        return []
    with BlockReader(folder) as reader:
        return reader.changed(places, sums)


def read_bytes(folder: Path, place: Place) -> io.BytesIO:
    """What lies at a place."""
    with open(folder / place.file, "rb") as stream:
        stream.seek(place.offset)
        return io.BytesIO(stream.read(place.length))


def read_part(folder: Path, place: Place) -> Tensor:
    """A tensor that was saved whole by one rank, on the CPU."""
    return load_tensor(read_bytes(folder, place))


def load_tensor(source: io.BytesIO) -> Tensor:
    """The saved part in a stream, on the CPU."""
    tensor: Tensor = torch.load(source, map_location="cpu", weights_only=True)
    return tensor


__all__ = ["ChunkReader", "changed_parts", "load_tensor", "read_part", "short_files", "small_files"]
