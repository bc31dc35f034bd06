"""Sums over axes other than the data-parallel ones, on the reduced shards, and the check that peers are laid out alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import all_gather_object, all_reduce
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim.buffers import Bucket
from lightning_megatron.optim.shards import Shard, by_dtype


@dataclass
class AxisSum:
    """Ranges of reduced gradients that are summed over one axis, in one collective for each dtype.

    Args:
        axis: where to sum.
        pieces: views of the gradient buffers, in an order that all ranks of the axis share.
        keys: what each piece is, for the check that ranks agree.
    """

    axis: Axis
    pieces: list[Tensor] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Sum in place."""
        for same in by_dtype(self.pieces):
            flat = torch.cat(same) if len(same) > 1 else same[0]
            total = all_reduce(flat, self.axis)
            torch._foreach_copy_(same, list(torch.split(total, [piece.numel() for piece in same])))


def plan_sums(shards: Sequence[Shard], gradients: Sequence[Tensor], *, mesh: Mesh) -> list[AxisSum]:
    """What is to be summed after the data-parallel reduction: partial boxes by axis, then tied parameters over the ends.

    Args:
        shards: this rank's shards.
        gradients: the gradient of each.
        mesh: the running layout; axes of one rank need no sum.
    """
    partial: dict[str, AxisSum] = {}
    ends = AxisSum(mesh["ends"])
    for shard, gradient in sorted(zip(shards, gradients, strict=True), key=lambda pair: pair[0].name):
        for start, stop, box in shard.box_ranges():
            for name in box.partial:
                _add(partial.setdefault(name, AxisSum(mesh[name])), shard, gradient=gradient, part=(start, stop))
        if shard.sharding.tied:
            _add(ends, shard, gradient=gradient, part=(0, gradient.numel()))
    sums = [*(partial[name] for name in sorted(partial)), ends]
    return [one for one in sums if one.axis.size > 1 and one.pieces]


def _add(target: AxisSum, shard: Shard, *, gradient: Tensor, part: tuple[int, int]) -> None:
    start, stop = part
    target.pieces.append(gradient[start:stop])
    target.keys.append(f"{shard.name}[{shard.start + start}:{shard.start + stop}] {gradient.dtype}")


def check_agreement(buckets: Sequence[Bucket], sums: Sequence[AxisSum], *, mesh: Mesh) -> None:
    """Compare the layouts of all ranks that will reduce together, so that a mismatch is a message instead of a hang.

    Collective over the world.

    Raises:
        ValueError: on every rank, if the ranks of an axis differ; it names the axis, two ranks and the first difference.
    """
    layouts = _layouts(buckets, sums, mesh=mesh)
    digests = {key: hashlib.sha256(repr(lines).encode()).hexdigest() for key, lines in layouts.items()}
    gathered = all_gather_object(digests, mesh.world)
    if not _differing(gathered):
        return
    (name, ranks), rank = _differing(gathered)[0]
    everything = all_gather_object(layouts, mesh.world)
    first, second = everything[ranks[0]][name, ranks], everything[rank][name, ranks]
    index = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    shown = [lines[index] if index < len(lines) else "nothing" for lines in (first, second)]
    raise ValueError(
        f"ranks {ranks[0]} and {rank} sum gradients over axis {name!r} but lay them out differently: rank {ranks[0]} has "
        f"{shown[0]} where rank {rank} has {shown[1]}. All ranks of an axis must hold the same parameters, with the same "
        f"local sizes and requires_grad, and give the same ones to the optimizer."
    )


def check_peers(buckets: Sequence[Bucket], *, mesh: Mesh) -> None:
    """Compare further buckets with those of the ranks that reduce them together. Collective over those ranks alone.

    Raises:
        ValueError: on every one of them, if they differ.
    """
    for axis in (mesh.dp_cp, mesh["edp"]):
        lines = [str(p) for bucket in buckets if bucket.axis.name == axis.name for p in bucket.plan.placements]
        if axis.size > 1 and any(other != lines for other in all_gather_object(lines, axis)):
            raise ValueError(
                f"other parameters were thawed, or given to add_param_group, on rank {mesh.rank} than on another rank of axis "
                f"{axis.name!r} {axis.ranks}; do it alike on all ranks."
            )


_Layouts = dict[tuple[str, tuple[int, ...]], list[str]]


def _layouts(buckets: Sequence[Bucket], sums: Sequence[AxisSum], *, mesh: Mesh) -> _Layouts:
    """One line for each thing that is reduced, by ``(axis name, ranks)``, for every axis that could reduce something."""
    layouts: _Layouts = {(axis.name, axis.ranks): [] for axis in mesh.axes.values() if axis.size > 1 and axis.name != "world"}
    for bucket in buckets:
        if bucket.axis.size > 1:
            layouts[bucket.axis.name, bucket.axis.ranks] += [f"{p} in {bucket.plan.dtype_key}" for p in bucket.plan.placements]
    for one in sums:
        layouts[one.axis.name, one.axis.ranks] += one.keys
    return layouts


def _differing(gathered: Iterable[dict[Any, str]]) -> list[tuple[tuple[str, tuple[int, ...]], int]]:
    """Axes whose ranks do not all have the digest of the first one, each with a rank that differs."""
    by_rank = list(gathered)
    keys = sorted({key for digests in by_rank for key in digests})
    return [(key, rank) for key in keys for rank in key[1] if by_rank[rank].get(key) != by_rank[key[1][0]].get(key)]
