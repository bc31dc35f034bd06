"""Put the unsharded model together again, on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.comm import broadcast_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import ParamSharding, sharding_of
from lightning_megatron.strategy.prepare import PreparedModule


def full_state_dict(prepared: PreparedModule) -> dict[str, Tensor]:
    """The complete unsharded state: global name -> CPU tensor, on every rank. All ranks call it together.

    Stages are read from the first replica; each rank sends its parts once. Host memory: the whole model on every rank.
    """
    mesh = prepared.mesh
    full: dict[str, Tensor] = {}
    sources = [rank for rank, position in enumerate(_positions(mesh)) if position["dp"] == 0 and position["cp"] == 0]
    for source in sources:
        state = prepared.module.state_dict(keep_vars=True) if mesh.rank == source else None
        mine = None if state is None else {name: _entry(value) for name, value in state.items()}
        received: dict[str, tuple[ParamSharding, Tensor]] = broadcast_object(mine, mesh.world, source)
        for name, (sharding, local) in received.items():
            target = full.setdefault(name, torch.zeros(sharding.global_shape, dtype=local.dtype))
            _place(target, local, sharding)
    return full


def _positions(mesh: Mesh) -> list[dict[str, int]]:
    return [mesh.parallelism.coordinate(rank, mesh.world_size) for rank in range(mesh.world_size)]


def _entry(value: Tensor) -> tuple[ParamSharding, Tensor]:
    return sharding_of(value), value.detach().to("cpu", copy=True)


def _place(target: Tensor, local: Tensor, sharding: ParamSharding) -> None:
    for box, part in sharding.parts(local):
        region = tuple(slice(start, start + length) for start, length in zip(box.offset, box.size, strict=True))
        target[region] = part
