"""What a local parameter is of the unsharded one: the single source that init, gradient sync, norm and checkpoints read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_lightning_megatron_sharding"


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor.

    Args:
        offset: first index of the part in the global tensor, one number a dim.
        size: extent of the part, one number a dim.
        replicated: names of mesh axes whose ranks all hold this same part (data-parallel axes are not named: every
            parameter is replicated over those). Only the rank with position 0 on each of them counts it in a norm.
        partial: the axes among ``replicated`` over which each rank's gradient is only a share, to be summed
            (parameters fed by sequence-parallel shards; key/value heads shared by several tensor-parallel ranks).
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    replicated: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.size)
        assert set(self.partial) <= set(self.replicated), "a gradient can be partial only where the parameter is replicated"

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.size)


@dataclass(frozen=True)
class ParamSharding:
    """How a local parameter lies in its global, unsharded tensor. Attached once, where the parameter is made.

    The local tensor is its ``boxes`` stacked along dim 0 in order, followed, where the local dim 0 is longer, by padding
    rows that exist in no global tensor (a padded vocabulary): padding is zero and is not saved, counted or exported.

    Args:
        global_shape: shape of the unsharded parameter.
        boxes: the parts held here. Several boxes occur only along dim 0 (fused QKV: q, k and v rows; gated MLP: gate, up).
        tied: held by the first and the last stage at once; gradients of the two copies are summed before use.
        expert: an expert's parameter: its gradient is reduced over ``edp``, not over ``dp`` and ``cp``.
        init: how the full tensor is first drawn.
    """

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tied: bool = False
    expert: bool = False
    init: Init = field(default_factory=lambda: Init())

    def __post_init__(self) -> None:
        for box in self.boxes:
            assert len(box.size) == len(self.global_shape), f"{box} does not lie in {self.global_shape}"
        if len(self.boxes) > 1:
            tails = {box.size[1:] for box in self.boxes}
            assert len(tails) == 1, "several boxes must be stackable along dim 0"

    def local_ranges(self) -> Iterator[tuple[int, int, Box]]:
        """``(start, stop, box)`` of each box in the flattened local tensor (its boxes are contiguous there)."""
        start = 0
        for box in self.boxes:
            yield start, start + box.numel, box
            start += box.numel

    def cut(self, full: Tensor, local_shape: torch.Size | tuple[int, ...]) -> Tensor:
        """This rank's part of a full tensor: ``[*global_shape] -> [*local_shape]``, padding zeroed."""
        if tuple(full.shape) != tuple(self.global_shape):
            raise ValueError(
                f"a tensor of shape {tuple(full.shape)} was given where the unsharded shape is {self.global_shape}."
            )
        parts = [_part(full, box) for box in self.boxes]
        local = torch.cat(parts) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
        if tuple(local.shape) != tuple(local_shape):
            padded = full.new_zeros(local_shape)
            padded[: local.shape[0]] = local
            local = padded
        return local

    def parts(self, local: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Each box with its view of the local tensor, ``[*box.size]``."""
        flat = local.reshape(-1) if local.is_contiguous() else local.contiguous().reshape(-1)
        for start, stop, box in self.local_ranges():
            yield box, flat[start:stop].view(box.size)


@dataclass(frozen=True)
class Init:
    """First values of a parameter: ``normal`` (mean 0, ``std``), ``zeros`` or ``ones``."""

    kind: str = "normal"
    std: float = 0.02

    def draw(self, shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
        """The full fp32 tensor. Drawn contiguous and in fp32, so that the values depend on the generator alone."""
        if self.kind == "normal":
            return torch.empty(shape, device=device, dtype=torch.float32).normal_(0.0, self.std, generator=generator)
        fill = {"zeros": 0.0, "ones": 1.0}[self.kind]
        return torch.full(shape, fill, device=device, dtype=torch.float32)


def set_sharding(param: nn.Parameter, sharding: ParamSharding) -> nn.Parameter:
    """Attach the sharding to a parameter (once, where it is made) and return the parameter."""
    setattr(param, _ATTRIBUTE, sharding)
    return param


def sharding_of(param: Tensor) -> ParamSharding:
    """The sharding of a parameter; one without any is whole here and replicated over ``tp``."""
    sharding: ParamSharding | None = getattr(param, _ATTRIBUTE, None)
    return sharding if sharding is not None else replicated(tuple(param.shape))


def has_sharding(param: Tensor) -> bool:
    """Whether the parameter was made by a layer of ours (and so can be drawn from its ``Init``)."""
    return getattr(param, _ATTRIBUTE, None) is not None


def mark_tied(param: nn.Parameter) -> None:
    """Record that the first and the last stage both hold this parameter."""
    set_sharding(param, replace(sharding_of(param), tied=True))


def copy_sharding(source: Tensor, target: nn.Parameter) -> nn.Parameter:
    """Carry the sharding over to a parameter that replaces ``source`` (materialising does that)."""
    if has_sharding(source):
        set_sharding(target, sharding_of(source))
    return target


def replicated(shape: tuple[int, ...], *, partial: bool = False, init: Init | None = None) -> ParamSharding:
    """A parameter that every tensor-parallel rank holds whole; ``partial`` if each sees only its share of the tokens."""
    box = Box((0,) * len(shape), tuple(shape), replicated=("tp",), partial=("tp",) if partial else ())
    return ParamSharding(tuple(shape), (box,), init=init or Init("ones"))


def _part(full: Tensor, box: Box) -> Tensor:
    for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        full = full.narrow(dim, start, length)
    return full


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover the row-major range ``[start, stop)`` of a tensor by disjoint ``(offset, size)`` boxes, in flat order.

    At most ``2 * ndim - 1`` of them: a ragged head, whole rows, a ragged tail, recursively.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    inner = prod(shape[1:])
    if len(shape) == 1:
        return [((start,), (stop - start,))]

    def within_row(row: int, first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((row, *o), (1, *s)) for o, s in flat_boxes(shape[1:], first - row * inner, last - row * inner)]

    first_full, last_full = -(-start // inner), stop // inner
    if first_full > last_full:
        return within_row(last_full, start, stop)
    boxes = within_row(first_full - 1, start, first_full * inner) if start < first_full * inner else []
    if last_full > first_full:
        boxes.append(((first_full, *[0] * (len(shape) - 1)), (last_full - first_full, *shape[1:])))
    return boxes + (within_row(last_full, last_full * inner, stop) if stop > last_full * inner else [])
