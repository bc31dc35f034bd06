"""Where parameters lie in flat buckets and which part of a bucket a rank owns: plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WHOLE_IN_SHARD = 8


@dataclass(frozen=True)
class ParamSlot:
    """What the layout needs to know of one parameter.

    Args:
        name: its global name.
        numel: elements of the local tensor.
        dtype_key: parameters with different keys never share a bucket.
        expert: an expert's parameter: it is sharded over another axis, so it gets other buckets.
        tied: held by the first and the last stage: it gets a bucket of its own, so that both cut it alike.
        stages: the pipeline stages of this rank that use it; stages share no bucket, as they end at different times.
    """

    name: str
    numel: int
    dtype_key: str
    expert: bool = False
    tied: bool = False
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """A parameter's range ``[start, stop)`` in its bucket, in elements."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlan:
    """One flat buffer: ``numel`` elements, cut into ``num_shards`` equal shards that ignore parameter borders."""

    dtype_key: str
    expert: bool
    tied: bool
    placements: tuple[Placement, ...]
    numel: int
    num_shards: int


@dataclass(frozen=True)
class Overlap:
    """What a shard and a parameter share: a range of the flattened parameter, and where that lies in the shard."""

    start: int
    stop: int
    shard_start: int
    shard_stop: int


def plan_buckets(
    params: Sequence[ParamSlot], *, bucket_numel: int, num_shards: int, alignment: int = 64, whole: bool = False
) -> list[BucketPlan]:
    """Lay parameters out in reverse order, the order in which a backward pass finishes their gradients.

    A bucket is closed as soon as it holds ``bucket_numel`` elements; a parameter is never split over buckets. Buckets come
    in the order in which their last parameter comes.

    Args:
        params: in the order of the model's definition.
        bucket_numel: elements after which a bucket is closed.
        num_shards: a bucket is padded to a multiple of ``num_shards * alignment``, so that shards are equal and aligned.
        alignment: each parameter starts at a multiple of it (elements).
        whole: keep each parameter inside one shard. Parameters are given to the shards by size, the largest first, and the
            shards are as long as the longest has to be; a bucket holds enough parameters to balance that.

    Raises:
        ValueError: a bucket size, shard count or alignment below 1.
    """
    for name, value in (("bucket_numel", bucket_numel), ("num_shards", num_shards), ("alignment", alignment)):
        if value < 1:
            raise ValueError(f"{name}={value} must be 1 or more.")
    close = _close_whole if whole else _close
    open_buckets: dict[_Key, list[Placement]] = {}
    plans = []
    for slot in reversed(params):
        key = (slot.dtype_key, slot.expert, slot.tied, slot.stages)
        placements = open_buckets.pop(key, [])  # popped and put back, so that the dict is ordered by the last addition
        start = _round_up(placements[-1].stop, alignment) if placements else 0
        placements.append(Placement(slot.name, start, start + slot.numel))
        enough = not whole or len(placements) >= _WHOLE_IN_SHARD * num_shards
        if slot.tied or (placements[-1].stop >= bucket_numel and enough):
            plans.append(close(key, placements, num_shards=num_shards, alignment=alignment))
        else:
            open_buckets[key] = placements
    return plans + [
        close(key, placements, num_shards=num_shards, alignment=alignment) for key, placements in open_buckets.items()
    ]


def shard_range(bucket: BucketPlan, index: int) -> tuple[int, int]:
    """``[start, stop)`` of shard ``index`` in its bucket, in elements."""
    size = bucket.numel // bucket.num_shards
    return index * size, (index + 1) * size


def overlap(placement: Placement, shard: tuple[int, int]) -> Overlap | None:
    """The part of a parameter that lies in a shard (a range of the bucket); ``None`` if there is none."""
    start, stop = max(placement.start, shard[0]), min(placement.stop, shard[1])
    if start >= stop:
        return None
    return Overlap(start - placement.start, stop - placement.start, start - shard[0], stop - shard[0])


_Key = tuple[str, bool, bool, tuple[int, ...]]


def _close(key: _Key, placements: list[Placement], *, num_shards: int, alignment: int) -> BucketPlan:
    dtype_key, expert, tied, _ = key
    # At least one aligned block for each shard: some backends reject collectives on empty tensors.
    numel = _round_up(max(placements[-1].stop, 1), num_shards * alignment)
    return BucketPlan(dtype_key, expert, tied, tuple(placements), numel, num_shards)


def _close_whole(key: _Key, placements: list[Placement], *, num_shards: int, alignment: int) -> BucketPlan:
    dtype_key, expert, tied, _ = key
    ends = [0] * num_shards
    placed: dict[str, tuple[int, int, int]] = {}  # shard, start in it, numel
    for placement in sorted(placements, key=lambda placement: (placement.start - placement.stop, placement.start)):
        shard, numel = ends.index(min(ends)), placement.stop - placement.start
        placed[placement.name] = (shard, ends[shard], numel)
        ends[shard] += _round_up(numel, alignment)
    size = max(*ends, alignment) if num_shards > 1 else max(ends[0], alignment)
    moved = []
    for placement in placements:
        shard, start, numel = placed[placement.name]
        moved.append(Placement(placement.name, shard * size + start, shard * size + start + numel))
    return BucketPlan(dtype_key, expert, tied, tuple(moved), size * num_shards, num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
