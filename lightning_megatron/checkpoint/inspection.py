"""Look at a checkpoint without a model: what it holds, whether it is sound, and as one file. One process, on the host."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_megatron.checkpoint import files, reading, storage
from lightning_megatron.checkpoint.optimizer_state import num_optimizers
from lightning_megatron.checkpoint.state import COPIES, nested


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint.

    Args:
        key: ``model.<name>``, ``optimizer_<i>.state.<name>.<key>``, ...
        shape: global.
        dtype: of its elements.
        num_parts: how many parts it was written in.
        num_bytes: of its elements.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_parts: int
    num_bytes: int


@dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Args:
        path: where it is.
        meta: ``meta.pt``: epoch, step, and what else Lightning and the strategy have put there.
        tensors: in the order of their keys.
        num_optimizers: optimizers whose states are there.
        file_bytes: of the directory on the disk.
        missing: data files that are not there or end too early, a line each: it is complete if there are none.
        leftovers: what interrupted saves have left beside it.
    """

    path: Path
    meta: dict[str, Any]
    tensors: tuple[SavedTensor, ...]
    num_optimizers: int
    file_bytes: int
    missing: tuple[str, ...]
    leftovers: tuple[Path, ...]

    def num_bytes(self, head: str) -> int:
        """Of the tensors whose keys begin with ``head``."""
        return sum(tensor.num_bytes for tensor in self.tensors if tensor.key.startswith(head))


def summarize(path: Path) -> Summary:
    """Read the index and ``meta.pt`` of a checkpoint.

    Raises:
        FileNotFoundError: there is none, or an incomplete one.
        ValueError: something else is there, or it is damaged.
    """
    index, meta, _ = reading.small_files(path, False, verify=True)
    tensors = []
    for key, saved in sorted(index.state_dict_metadata.items()):
        if isinstance(saved, TensorStorageMetadata):
            numel, dtype = saved.size.numel(), saved.properties.dtype
            tensors.append(SavedTensor(key, tuple(saved.size), dtype, len(saved.chunks), numel * dtype.itemsize))
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    missing, left = reading.short_files(path, storage.places_of(index)), files.leftovers(path.absolute().parent)
    return Summary(path, meta, tuple(tensors), num_optimizers(index), size, tuple(missing), tuple(left))


def verify(path: Path) -> list[str]:
    """Read everything in a checkpoint. Returns what is wrong, a line each; nothing if it is sound.

    Checked are: that each tensor is covered by its parts once, that each part lies whole in its file with the bytes that were
    written, and that it is of the shape and dtype of the index.

    Raises:
        FileNotFoundError: there is no checkpoint, or an incomplete one.
        ValueError: something else is there, or its index is damaged.
    """
    index, _, sums = reading.small_files(path, False, verify=True)
    problems = []
    if sums is None:
        problems.append(f"{files.SUMS_FILE} is missing: the bytes cannot be compared with those that were written")
    for key, saved in index.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            held = sum(chunk.sizes.numel() for chunk in saved.chunks)
            if held != saved.size.numel():
                problems.append(f"{key}: its parts hold {held} of {saved.size.numel()} elements of {tuple(saved.size)}")
    places = storage.places_of(index)
    problems += reading.short_files(path, places, exactly=True)
    if problems:
        return problems
    return reading.changed_parts(path, places) or _unlike(path, index)


def _unlike(path: Path, index: Metadata) -> list[str]:
    """Parts that are not what the index says."""
    problems, parts = [], _Parts(path, index)
    for key, saved in index.state_dict_metadata.items():
        for at, part in parts.of(key):
            if isinstance(saved, BytesStorageMetadata) or isinstance(part, io.BytesIO):
                continue
            chunk = next(chunk for chunk in saved.chunks if at.offset is None or chunk.offsets == at.offset)
            wanted = (tuple(chunk.sizes), saved.properties.dtype)
            if (tuple(part.shape), part.dtype) != wanted:
                problems.append(f"{key}: a part of shape {tuple(part.shape)} {part.dtype}, where the index has {wanted}")
    return problems


class _Parts:
    """What was saved under each key, read when it is asked for."""

    def __init__(self, path: Path, index: Metadata) -> None:
        self._path, self._index = path, index
        self._places: dict[str, list[tuple[MetadataIndex, storage.Place]]] = {}
        for at, place in zip(index.storage_data or {}, storage.places_of(index), strict=True):
            self._places.setdefault(at.fqn, []).append((at, place))

    def of(self, key: str) -> Iterator[tuple[MetadataIndex, Tensor | io.BytesIO]]:
        """Each part with its place; a Python value as its bytes."""
        is_value = isinstance(self._index.state_dict_metadata[key], BytesStorageMetadata)
        for at, place in self._places.get(key, ()):
            content = reading.read_bytes(self._path, place)
            yield at, content if is_value else reading.load_tensor(content)

    def whole(self, key: str) -> Any:
        """The tensor or value."""
        saved = self._index.state_dict_metadata[key]
        if isinstance(saved, BytesStorageMetadata):
            (_, content), *_ = self.of(key)
            return torch.load(content, weights_only=False)  # type: ignore[arg-type]
        full = torch.empty(saved.size, dtype=saved.properties.dtype)
        for at, part in self.of(key):
            assert isinstance(part, Tensor)
            offsets = at.offset or torch.Size([0] * full.dim())
            full[tuple(slice(start, start + length) for start, length in zip(offsets, part.shape, strict=True))] = part
        return full


def consolidate(path: Path, file: Path, *, with_optimizer: bool = False) -> int:
    """Write one ordinary Lightning checkpoint: ``state_dict`` of unsharded tensors and what ``meta.pt`` holds.

    The whole model has to fit into host memory. The file appears when it is complete.

    Args:
        path: the checkpoint directory.
        file: the file to write; one that is there is replaced.
        with_optimizer: also put the optimizers' states together (``optimizer_states``), which may need trust in the checkpoint.

    Returns:
        The number of tensors in ``state_dict``.

    Raises:
        FileNotFoundError, ValueError: as ``summarize``; also what ``verify`` finds, before anything is written, and if
            ``file`` is a directory.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a directory; give the name of a file.")
    index, content, sums = reading.small_files(path, False, verify=True)
    places = storage.places_of(index)
    if problems := reading.short_files(path, places) or (reading.changed_parts(path, places) if sums is not None else []):
        raise ValueError(f"{path} is damaged:\n  " + "\n  ".join(problems[:8]))
    parts = _Parts(path, index)
    content["state_dict"] = _together(parts, index, "model", flat=True)
    for key in {place[1] for place in (index.planner_data or {}).values() if place[0] == COPIES}:
        content[key] = content.get(key, {}) | _together(parts, index, COPIES, key, flat=True)
    if with_optimizer:
        heads = [f"optimizer_{number}" for number in range(num_optimizers(index))]
        content["optimizer_states"] = [_together(parts, index, head) for head in heads]
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.tmp")
    with open(unfinished, "wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, file)
    return len(content["state_dict"])


def _together(parts: _Parts, index: Metadata, *head: str, flat: bool = False) -> Any:
    """The unsharded values whose path begins with ``head``, as a nest, or ``flat`` by their names."""
    leaves: dict[tuple[Any, ...], Any] = {}
    for key, place in (index.planner_data or {}).items():
        if tuple(place[: len(head)]) == head:
            leaves[tuple(place[len(head) :])] = parts.whole(key)
    if not flat:
        return nested(leaves)
    names: dict[str, dict[tuple[Any, ...], Any]] = {}
    for (name, *inside), value in leaves.items():
        names.setdefault(name, {})[tuple(inside)] = value
    return {name: nested(values) for name, values in names.items()}
