"""``BoxedTensor``: what this rank holds of a global tensor, in the form that torch.distributed.checkpoint reads and writes.

Note [Why a tensor subclass]
The checkpoint planners dispatch on ``torch.Tensor`` and replace any other object by ``None`` when they load. A subclass
without storage, which answers the three methods of their ``_Checkpointable`` protocol, goes through them unchanged, and is
read by the stock tools as an ordinary tensor of the global shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_megatron.optim.kept import ALIGNMENT, Kept
from lightning_megatron.sharding import Box, ParamSharding, flat_boxes

Offset = tuple[int, ...]
PIECE_NUMEL = 2**21  # 8 MiB in fp32


def every_box(box: Box) -> bool:
    """Keep all boxes (the default of the constructors below)."""
    return True


@dataclass(frozen=True, eq=False)
class KeptPart:
    """A part whose fp32 values are kept in another form: they are made when they are read.

    Args:
        values: what they are a range of.
        start: of the range.
        shape: of the part.
        piece: the values that are read and written together with it, its own range among them.
    """

    values: Kept
    start: int
    shape: torch.Size
    piece: range

    def size(self) -> torch.Size:
        """As of a tensor."""
        return self.shape

    def numel(self) -> int:
        """As of a tensor."""
        return self.shape.numel()

    def read(self) -> Tensor:
        """The values."""
        begin = self.start // ALIGNMENT * ALIGNMENT
        values = self.values.read(begin, self.start + self.numel())
        return values[self.start - begin :].view(self.shape)

    def within(self, piece: Tensor) -> Tensor:
        """This part of a tensor of its piece."""
        begin = self.start - self.piece.start
        return piece[begin : begin + self.numel()].view(self.shape)


class BoxedTensor(torch.Tensor):
    """Parts of a global tensor by their global offset. It has a shape and a dtype, but no storage of its own.

    The parts are views: loading into a ``BoxedTensor`` fills the tensors it was made from. Parts of size zero are left out;
    a rank that holds no part at all has ``parts == {}`` and should not offer the tensor to a checkpoint.
    """

    parts: dict[torch.Size, Tensor | KeptPart]

    @staticmethod
    def __new__(
        cls, shape: Iterable[int], parts: Iterable[tuple[Offset, Tensor | KeptPart]], dtype: torch.dtype
    ) -> BoxedTensor:
        """Make one of global ``shape`` from ``(global offset, part)`` pairs."""
        self: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(tuple(shape)), device=torch.device("cpu"), dtype=dtype
        )
        self.parts = {}
        for offset, part in parts:
            if part.numel() == 0:
                continue  # parts are found by offset: an empty one would hide the real one that begins there
            assert torch.Size(offset) not in self.parts, f"two parts begin at {offset}"
            assert isinstance(part, KeptPart) or part.dtype == dtype
            self.parts[torch.Size(offset)] = part.detach() if isinstance(part, Tensor) else part
        return self

    @classmethod
    def from_param(cls, local: Tensor, sharding: ParamSharding, *, keep: Callable[[Box], bool] = every_box) -> BoxedTensor:
        """The boxes of a local parameter ``[*local_shape]``; its padding rows belong to none.

        Args:
            local: the local tensor; the parts are views of it, contiguous or not.
            sharding: how it lies in the global tensor.
            keep: which of its boxes to take.
        """
        local = local.detach()
        parts, row = [], 0
        for box in sharding.boxes:
            rows = box.size[0] if box.size else 0
            if keep(box):
                part = local.narrow(0, row, rows) if box.size else local
                assert tuple(part.shape) == tuple(box.size), f"{box} is not a block of rows of {tuple(local.shape)}"
                parts.append((tuple(box.offset), part))
            row += rows
        return cls(sharding.global_shape, parts, local.dtype)

    @classmethod
    def from_flat_slice(
        cls,
        flat: Tensor,
        start: int,
        stop: int,
        local_shape: Iterable[int],
        sharding: ParamSharding,
        *,
        keep: Callable[[Box], bool] = every_box,
    ) -> BoxedTensor:
        """A ZeRO-1 slice of a local parameter.

        Args:
            flat: ``[stop - start]``, values of the elements ``[start, stop)`` of the flattened local parameter.
            start: first element of the slice.
            stop: one past its last element.
            local_shape: shape of the local parameter.
            sharding: how the local parameter lies in the global tensor. Elements of padding rows belong to no box.
            keep: which of its boxes to take.
        """
        assert flat.shape == (stop - start,), f"a slice [{start}, {stop}) cannot hold {tuple(flat.shape)}"
        assert stop <= prod(local_shape), f"a slice up to {stop} does not lie in {tuple(local_shape)}"
        flat = flat.detach()
        found = _boxes_of(range(start, stop), sharding, keep)
        parts = [(offset, flat[begin : begin + prod(size)].view(size)) for offset, size, begin in found]
        return cls(sharding.global_shape, parts, flat.dtype)

    @classmethod
    def from_kept(
        cls, values: Kept, start: int, stop: int, sharding: ParamSharding, *, keep: Callable[[Box], bool] = every_box
    ) -> BoxedTensor:
        """As ``from_flat_slice``, of values that are kept in another form; no part is larger than ``PIECE_NUMEL``."""
        parts = []
        for first in range(start, stop, PIECE_NUMEL):
            last = min(first + PIECE_NUMEL, stop)
            piece = range(first - start, last - start)
            for offset, size, begin in _boxes_of(range(first, last), sharding, keep):
                parts.append((offset, KeptPart(values, piece.start + begin, torch.Size(size), piece)))
        return cls(sharding.global_shape, parts, torch.float32)

    @property
    def num_local(self) -> int:
        """Elements held here."""
        return sum(part.numel() for part in self.parts.values())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on a BoxedTensor, which has parts for a checkpoint and no storage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BoxedTensor({tuple(self.shape)}, {self.dtype}, parts at {[tuple(offset) for offset in self.parts]})"

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offset, part.size()),
                    properties=_properties(part),
                    size=self.size(),
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        part = self.part_at(index)
        return part.read() if isinstance(part, KeptPart) else part

    def part_at(self, index: MetadataIndex) -> Tensor | KeptPart:
        """The part that begins at the index's offset, as it is kept."""
        assert index.offset is not None
        return self.parts[index.offset]


def _properties(part: Tensor | KeptPart) -> TensorProperties:
    return TensorProperties(torch.float32) if isinstance(part, KeptPart) else TensorProperties.create_from_tensor(part)


def _boxes_of(
    elements: range, sharding: ParamSharding, keep: Callable[[Box], bool]
) -> Iterator[tuple[Offset, tuple[int, ...], int]]:
    """Boxes that a range of the flattened local parameter is made of: global offset, size, and where it begins in the range."""
    for box_start, box_stop, box in sharding.local_ranges():
        position = max(elements.start, box_start)
        if not keep(box):
            continue
        for offset, size in flat_boxes(box.size, position - box_start, min(elements.stop, box_stop) - box_start):
            yield tuple(a + b for a, b in zip(box.offset, offset, strict=True)), tuple(size), position - elements.start
            position += prod(size)
