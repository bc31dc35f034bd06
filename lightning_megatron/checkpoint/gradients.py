"""Gradients of batches that wait for their optimizer step: saved by rank, summed up again at another layout.

Note [Shares of a gradient]
Before the reduction a rank holds a share of each gradient: of the tokens that it saw, or, where its box is partial over an
axis, of the sum over that axis. Each rank saves its shares box by box, under ``gradients.<rank>.<name>.<offset>``; a box that
other ranks hold alike goes under ``copies`` on all of them but the first. In the same layout every rank takes its own back, bit
for bit. In another one a single rank of those that will be summed takes the sum of all shares, and the others take zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint import reading, storage
from lightning_megatron.checkpoint.files import read_index
from lightning_megatron.checkpoint.ranks import Ranks
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer
from lightning_megatron.sharding import Box, ParamSharding, sharding_of


def gradient_state(optimizers: Sequence[DistributedOptimizer], *, mesh: Mesh) -> dict[str, Any]:
    """What this rank saves: ``{"gradients" | "copies": {rank: {name: {offset: share}}}}``."""
    state: dict[str, Any] = {}
    for optimizer in optimizers:
        for name, param, view in optimizer.local_gradients():
            for box, part in _rows(view, sharding_of(param)):
                same = set(box.replicated) - set(box.partial)
                kind = "gradients" if all(mesh[axis].is_first for axis in same) else "copies"
                state.setdefault(kind, {}).setdefault(str(mesh.rank), {}).setdefault(name, {})[_text(box.offset)] = part
    return state


def load_gradients(path: Path, optimizers: Sequence[DistributedOptimizer], *, mesh: Mesh, same_layout: bool) -> None:
    """Put saved shares into the gradient buffers. All ranks call it together.

    Args:
        path: the checkpoint.
        optimizers: as they were when it was saved.
        mesh: the running layout.
        same_layout: as the one that saved it, so that each rank takes its own shares.

    Raises:
        ValueError: the files do not hold what was written; nothing has been restored then.
    """
    ranks = Ranks()
    index = ranks.together(lambda: read_index(path))
    shares = _Shares(path, index, only_rank=mesh.rank if same_layout else None)
    ranks.together(shares.check)
    for optimizer in optimizers:
        for name, param, view in optimizer.local_gradients():
            sharding = sharding_of(param)
            view.zero_()
            for box, part in _rows(view, sharding):
                if same_layout or _takes(box, sharding, mesh):
                    shares.add_to(part, box, name)


def sum_of_own(path: Path, key: str) -> Tensor:
    """The sum of what all ranks have saved as their own under ``key``."""
    index = read_index(path)
    places = [place for place in storage.places_of(index) if place.key.startswith("rank.") and place.key.endswith(f".{key}")]
    return torch.stack([reading.read_part(path, place) for place in places]).sum(0)


class _Shares:
    """The saved shares.

    Args:
        path: the checkpoint.
        index: its index.
        only_rank: use those of this rank alone, copies included; ``None`` for those of all ranks, each share once.
    """

    def __init__(self, path: Path, index: Metadata, *, only_rank: int | None) -> None:
        self._path, self._index = path, index
        self._by_name: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        self._places = {place.key: place for place in storage.places_of(index)}
        kinds = ("gradients",) if only_rank is None else ("gradients", "copies")
        for key, place in (index.planner_data or {}).items():
            if place[0] in kinds and only_rank in (None, int(place[1])):
                self._by_name.setdefault(place[2], []).append((_numbers(place[3]), key))

    def check(self) -> None:
        """Compare checksums.

        Raises:
            ValueError: a part is not what was written.
        """
        keys = {key for shares in self._by_name.values() for _, key in shares}
        if problems := reading.changed_parts(self._path, storage.places_of(self._index, keys)):
            raise ValueError("The checkpoint is damaged:\n  " + "\n  ".join(problems[:8]))

    def add_to(self, part: Tensor, box: Box, name: str) -> None:
        """Add what the shares hold of a box."""
        for offset, key in self._by_name.get(name, ()):
            saved = self._index.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            size = saved.size
            if (shared := _shared(box, offset, tuple(size))) is not None:
                share = reading.read_part(self._path, self._places[key])
                part[shared[0]] += share[shared[1]].to(part.device)


def _takes(box: Box, sharding: ParamSharding, mesh: Mesh) -> bool:
    """Whether this rank takes the sum of all shares: one among those whose gradients will be summed."""
    summed = ["edp" if sharding.expert else "dp_cp", *box.partial, *(["ends"] if sharding.tied else [])]
    return all(mesh[axis].is_first for axis in summed)


def _rows(view: Tensor, sharding: ParamSharding) -> Iterator[tuple[Box, Tensor]]:
    """Each box with its rows of the local tensor."""
    row = 0
    for box in sharding.boxes:
        rows = box.size[0] if box.size else 0
        part = view.narrow(0, row, rows) if box.size else view
        row += rows
        if part.numel():
            yield box, part


def _shared(box: Box, offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a box and a saved part have in common, in the coordinates of each."""
    here, there = [], []
    for start, length, other, other_length in zip(box.offset, box.size, offset, size, strict=True):
        first, last = max(start, other), min(start + length, other + other_length)
        if first >= last:
            return None
        here.append(slice(first - start, last - start))
        there.append(slice(first - other, last - other))
    return tuple(here), tuple(there)


def _text(offset: tuple[int, ...]) -> str:
    return ",".join(map(str, offset))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",")) if text else ()


__all__ = ["gradient_state", "load_gradients", "sum_of_own"]
