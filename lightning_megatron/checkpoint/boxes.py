"""``BoxedTensor``: what this rank holds of a global tensor, in the form that torch.distributed.checkpoint reads and writes.

Note [Why a tensor subclass]
The checkpoint planners dispatch on ``torch.Tensor`` and replace any other object by ``None`` when they load. A subclass
without storage, which answers the three methods of their ``_Checkpointable`` protocol, goes through them unchanged, and is
read by the stock tools as an ordinary tensor of the global shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_megatron.sharding import Box, ParamSharding, flat_boxes

Offset = tuple[int, ...]


def every_box(box: Box) -> bool:
    """Keep all boxes (the default of the constructors below)."""
    return True


class BoxedTensor(torch.Tensor):
    """Parts of a global tensor by their global offset. It has a shape and a dtype, but no storage of its own.

    The parts are views: loading into a ``BoxedTensor`` fills the tensors it was made from. Parts of size zero are left out;
    a rank that holds no part at all has ``parts == {}`` and should not offer the tensor to a checkpoint.
    """

    parts: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: Iterable[int], parts: Iterable[tuple[Offset, Tensor]], dtype: torch.dtype) -> BoxedTensor:
        """Make one of global ``shape`` from ``(global offset, part)`` pairs."""
        self: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(tuple(shape)), device=torch.device("cpu"), dtype=dtype
        )
        self.parts = {}
        for offset, part in parts:
            if part.numel() == 0:
                continue  # parts are found by offset: an empty one would hide the real one that begins there
            assert torch.Size(offset) not in self.parts, f"two parts begin at {offset}"
            assert part.dtype == dtype
            self.parts[torch.Size(offset)] = part.detach()
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
        parts = []
        for box_start, box_stop, box in sharding.local_ranges():
            position = max(start, box_start)
            if not keep(box):
                continue
            for offset, size in flat_boxes(box.size, position - box_start, min(stop, box_stop) - box_start):
                begin = position - start
                part = flat[begin : begin + prod(size)].view(size)
                parts.append((tuple(a + b for a, b in zip(box.offset, offset, strict=True)), part))
                position += prod(size)
        return cls(sharding.global_shape, parts, flat.dtype)

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
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for offset, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, part.size()) for offset, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset]
