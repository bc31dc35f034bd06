"""All ranks of a model replica must read the same batch: each takes what its stages need from its own copy."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.micro_batch import leaves


def check_same_batch(batch: Any, mesh: Mesh) -> None:
    """Compare a batch between the ranks of this replica. Waits for the device: call it once, not each step.

    Collective over the replica.

    Raises:
        ValueError: on every rank of the replica, if two of them differ; it names both and what to do.
    """
    axis = mesh["replica"]
    if axis.size == 1:
        return
    gathered = all_gather_object([_fingerprint(leaf) for leaf in leaves(batch)], axis)
    other = next((position for position, found in enumerate(gathered) if found != gathered[0]), None)
    if other is None:
        return
    one, two = gathered[0], gathered[other]
    index = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    shown = [found[index] if index < len(found) else "nothing" for found in (one, two)]
    sizes = f"tp({mesh.tp.size}) * cp({mesh.cp.size}) * pp({mesh.pp.size}) = {axis.size}"
    raise ValueError(
        f"{mesh.coordinate} ranks {axis.ranks[0]} and {axis.ranks[other]} belong to one model replica but read different first "
        f"batches: {shown[0]} and {shown[1]} (entry {index}). The {sizes} ranks of a replica must read the same samples with "
        f"the same augmentations. Usual causes: a sampler or IterableDataset that is split by the global rank (split it by "
        f"strategy.dp_rank of strategy.dp_size), or a dataset that draws from a generator seeded by the rank or the time."
    )


def _fingerprint(leaf: Any) -> str:
    """A line that is the same for equal leaves; for things that cannot be compared it tells the type only."""
    if isinstance(leaf, Tensor):
        flat = leaf.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        return f"a tensor {list(leaf.shape)} of {leaf.dtype} with checksum {zlib.crc32(flat.numpy().tobytes()):08x}"
    if leaf is None or isinstance(leaf, (str, bytes, bool, int, float)):
        return repr(leaf)
    return type(leaf).__name__
