"""A distributed optimiser's states, main parameters and hyperparameters as parts of the unsharded optimiser's.

In a checkpoint, for the i-th optimiser: ``optimizer_<i>.state.<parameter>.<key>``, ``optimizer_<i>.main.<parameter>`` (fp32
copies of low-precision parameters) and ``optimizer_<i>.param_groups``, whose ``params`` are names in the model's order. Put
together it is a state dict that a plain torch optimiser over the unsharded parameters loads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.boxes import BoxedTensor, every_box
from lightning_megatron.checkpoint.ranks import Ranks
from lightning_megatron.checkpoint.state import placeholder
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, Shard
from lightning_megatron.optim.kept import Kept
from lightning_megatron.sharding import Box

NAMES = ("params", "param_names")  # entries of a param group that list its parameters


def optimizer_state(
    distributed_optimizer: DistributedOptimizer, *, module: nn.Module, mesh: Mesh, ranks: Ranks
) -> dict[str, Any]:
    """What this rank saves of an optimiser: ``{"state": ..., "main": ..., "param_groups": ...}``. All ranks call it.

    Of a part that several ranks hold, the one at position 0 of each axis offers it (the first stage, if it is tied): where
    slices begin and end may differ between stages, so equal parts cannot be told by their offset.
    """
    state, main = ranks.together(lambda: _own_parts(distributed_optimizer, mesh))
    groups = named_groups(distributed_optimizer, module, mesh, ranks)
    return {"state": state, "main": main, **({"param_groups": groups} if ranks.is_first else {})}


def _own_parts(
    distributed_optimizer: DistributedOptimizer, mesh: Mesh
) -> tuple[dict[str, dict[str, Any]], dict[str, BoxedTensor]]:
    """``{parameter: {key: value}}`` of the states and ``{parameter: value}`` of the main parameters that are copies."""
    state: dict[str, dict[str, Any]] = {}
    main: dict[str, BoxedTensor] = {}
    distributed_optimizer.kept.settle()
    for shard in distributed_optimizer.shards:
        if is_copy(shard) and (part := _owned(shard, distributed_optimizer.kept.main(shard), mesh)).parts:
            main[shard.name] = part
        for key, value in distributed_optimizer.kept.states(shard).items():
            if not _is_flat(value, shard):
                state.setdefault(shard.name, {})[key] = value.detach() if isinstance(value, Tensor) else value
            elif (part := _owned(shard, value, mesh)).parts:
                state.setdefault(shard.name, {})[key] = part
    return state, main


def is_copy(shard: Shard) -> bool:
    """Whether the main parameter has memory of its own, rather than being a view of the parameter."""
    return shard.main.untyped_storage().data_ptr() != shard.param.untyped_storage().data_ptr()


def _is_flat(value: Any, shard: Shard) -> bool:
    return _is_kept(value) or (isinstance(value, Tensor) and value.shape == shard.main.shape)


def _is_kept(value: Any) -> bool:
    """Whether it is a ``Kept``."""
    return hasattr(value, "read") and hasattr(value, "write")


def _owned(shard: Shard, values: Tensor | Kept, mesh: Mesh) -> BoxedTensor:
    tied_elsewhere = shard.sharding.tied and not mesh["ends"].is_first

    def keep(box: Box) -> bool:
        return not tied_elsewhere and all(mesh[axis].is_first for axis in box.replicated)

    return _boxed(shard, values, keep)


def _boxed(shard: Shard, values: Tensor | Kept, keep: Any = every_box) -> BoxedTensor:
    if not isinstance(values, Tensor):
        return BoxedTensor.from_kept(values, shard.start, shard.stop, shard.sharding, keep=keep)
    flat = values.detach().reshape(-1)
    return BoxedTensor.from_flat_slice(flat, shard.start, shard.stop, shard.shape, shard.sharding, keep=keep)


def named_groups(
    distributed_optimizer: DistributedOptimizer, module: nn.Module, mesh: Mesh, ranks: Ranks
) -> list[dict[str, Any]]:
    """Hyperparameters of each param group with the names of its parameters on all ranks (on the first rank)."""
    names = {id(shard.main): shard.name for shard in distributed_optimizer.shards}
    groups = distributed_optimizer.optimizer.param_groups
    mine = [[names[id(main)] for main in group["params"] if id(main) in names] for group in groups]
    order = [name for name, _ in module.named_parameters()]
    gathered = sorted(ranks.gather_to_first((mesh.pp.rank, order, mine)), key=lambda entry: entry[0])
    position = model_order([of_rank for _, of_rank, _ in gathered])
    result = []
    for number, group in enumerate(groups):
        members = {name for _, _, by_group in gathered for name in by_group[number]}
        ordered = sorted(members, key=lambda name: (position.get(name, len(position)), name))
        named = {key: ordered for key in NAMES if key in group}
        result.append({**group, **named})
    return result


def model_order(stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """Position of each name in the unsharded model, from what each rank holds of it.

    A rank's names are in the model's order with gaps. Numbered members of one list (layers) count as one unit, so that those
    of several stages on a rank go back into their order; units are merged, in rank order where nothing else tells.
    """
    names = list(dict.fromkeys(name for stage in stages for name in stage))
    rank_of_unit = {unit: place for place, unit in enumerate(dict.fromkeys(_unit(name)[0] for name in names))}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(rank_of_unit, ()))
    for stage in stages:
        units = list(dict.fromkeys(_unit(name)[0] for name in stage))
        for before, after in pairwise(units):
            sorter.add(after, before)
    try:
        position = _in_order(sorter, rank_of_unit)
    except CycleError:
        position = rank_of_unit
    keys = {name: (position[_unit(name)[0]], _unit(name)[1], place) for place, name in enumerate(names)}
    return {name: place for place, name in enumerate(sorted(names, key=lambda name: keys[name]))}


def _unit(name: str) -> tuple[str, int]:
    """``model.layers.3.norm`` is member 3 of ``model.layers.``; a name without a number is a unit of its own."""
    found = re.match(r"((?:.*?\.)?)(\d+)\.", name)
    return (found[1], int(found[2])) if found else (name, 0)


def _in_order(sorter: TopologicalSorter[str], preference: dict[str, int]) -> dict[str, int]:
    sorter.prepare()
    ready = list(sorter.get_ready())
    position: dict[str, int] = {}
    while ready:
        unit = min(ready, key=lambda unit: preference[unit])
        ready.remove(unit)
        position[unit] = len(position)
        sorter.done(unit)
        ready += sorter.get_ready()
    return position


def num_optimizers(index: Metadata) -> int:
    """How many optimisers' states a checkpoint has."""
    heads = (str(key).split(".", 1)[0] for key in index.state_dict_metadata)
    return len({head for head in heads if re.fullmatch(r"optimizer_\d+", head)})


class OptimizerTarget:
    """Where a checkpoint's ``optimizer_<number>.*`` entries go.

    States that do not exist yet are allocated, in the dtype that this run keeps them in. A parameter without states in the
    checkpoint gets none.

    Args:
        distributed_optimizer: the optimiser to restore.
        number: its place in the checkpoint.
        index: the checkpoint's index.

    Raises:
        ValueError: the checkpoint has another number of param groups.
    """

    def __init__(self, distributed_optimizer: DistributedOptimizer, number: int, index: Metadata) -> None:
        self._distributed, self._optimizer = distributed_optimizer, distributed_optimizer.optimizer
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._states: dict[str, dict[str, str]] = {}
        self.tensors: dict[str, Any] = {}
        self._flat: list[tuple[Shard, str, Tensor | Kept]] = []
        self._plain: list[tuple[Shard, str, str]] = []
        self._uncopied: list[Shard] = []
        head, saved = f"optimizer_{number}", index.state_dict_metadata
        for key, path in (index.planner_data or {}).items():
            if path[:2] == (head, "param_groups"):
                self._paths[key] = path[2:]
                self.tensors[key] = placeholder(saved[key])
            elif path[:2] == (head, "state"):
                self._states.setdefault(path[2], {})[path[3]] = key
        self._single = _single_valued(self._states, saved)
        self._check_groups(number)
        for shard in self._distributed.shards:
            self._add(shard, head, saved)

    def _check_groups(self, number: int) -> None:
        wanted, found = len(self._optimizer.param_groups), len({path[0] for path in self._paths.values() if path})
        if wanted != found:
            raise ValueError(f"optimizer {number} has {wanted} param groups, and {found} in the checkpoint.")

    def _add(self, shard: Shard, head: str, saved: dict[str, Any]) -> None:
        if is_copy(shard):
            key = f"{head}.main.{shard.name}"
            if key in saved:
                self._put(key, _boxed(shard, self._distributed.kept.main(shard)))
            else:
                self._uncopied.append(shard)
        for name, key in self._states.get(shard.name, {}).items():
            entry = saved[key]
            if name not in self._single and _has_shape(entry, shard):
                values = self._distributed.kept.place_for(shard, name, entry.properties.dtype)
                self._flat.append((shard, name, values))
                self._put(key, _boxed(shard, values))
            else:
                self._plain.append((shard, name, key))
                self.tensors[key] = placeholder(entry)

    def _put(self, key: str, boxed: BoxedTensor) -> None:
        if boxed.parts:  # a slice may hold padding rows alone
            self.tensors[key] = boxed

    @torch.no_grad()
    def finish(self, loaded: dict[str, Any]) -> None:
        """Install the states and the hyperparameters; fill main parameters that the checkpoint has none of."""
        groups = {id(main): group for group in self._optimizer.param_groups for main in group["params"]}
        states: dict[Shard, dict[str, Any]] = {shard: {} for shard in self._distributed.shards}
        for shard, name, values in self._flat:
            states[shard][name] = values
        for shard, name, key in self._plain:
            states[shard][name] = placed(name, loaded[key], shard, groups.get(id(shard.main), {}))
        for shard, state in states.items():
            self._distributed.kept.install(shard, state)
        for shard in self._uncopied:
            self._distributed.refresh_shard(shard)
        for key, (number, *path) in self._paths.items():
            if path[-1] not in NAMES:
                set_hyperparameter(self._optimizer.param_groups[number], path, loaded[key])


def _has_shape(entry: Any, shard: Shard) -> bool:
    """Whether a saved state is a tensor of the parameter's global shape."""
    return isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == tuple(shard.sharding.global_shape)


def _single_valued(states: dict[str, dict[str, str]], saved: dict[str, Any]) -> set[str]:
    """Names of states with one value a parameter (a step count).

    Of a 0-dim parameter every state is 0-dim, so its own shape does not tell; the other parameters' states do.
    """
    single = {"step"}
    for keys in states.values():
        sizes = {name: tuple(saved[key].size) for name, key in keys.items() if isinstance(saved[key], TensorStorageMetadata)}
        if any(sizes.values()):
            single |= {name for name, size in sizes.items() if not size}
    return single


def placed(name: str, value: Any, shard: Shard, group: dict[str, Any]) -> Any:
    """A plain state where torch's optimisers keep it: step counts stay on the CPU unless a kernel reads them."""
    if not isinstance(value, Tensor):
        return value
    on_host = name == "step" and not (group.get("capturable") or group.get("fused"))
    return value.clone() if on_host else value.to(shard.main.device, copy=True)


def set_hyperparameter(group: dict[str, Any], path: list[Any], value: Any) -> None:
    """Set one entry of a param group, or of what is nested in it; a tensor is filled in place."""
    for step in path[:-1]:
        group = group[step]
    current = group.get(path[-1]) if isinstance(group, dict) else group[path[-1]]
    if isinstance(current, Tensor):
        current.copy_(torch.as_tensor(value))  # a learning rate that compiled code reads by reference
    else:
        group[path[-1]] = value
