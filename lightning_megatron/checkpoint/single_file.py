"""Ordinary Lightning checkpoints, one file of unsharded tensors: of other strategies, or of ``checkpoint consolidate``.

Note [Names of states]
A stock optimizer numbers its parameters group by group, in the order in which they stand in the groups. The sharded one knows
names, and the order of the model: numbers stand for names if each group is in the order of the model, as groups made from
``parameters()`` or ``named_parameters()`` are. Others are refused. A file of ``consolidate`` has names, and main values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatron.checkpoint import files
from lightning_megatron.checkpoint.optimizer_state import NAMES, is_copy, named_groups, placed, set_hyperparameter
from lightning_megatron.checkpoint.ranks import Ranks
from lightning_megatron.checkpoint.state import EXTRA_STATE
from lightning_megatron.initialize import load_unsharded
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, Shard
from lightning_megatron.optim.kept import Kept
from lightning_megatron.sharding import sharding_of

_PIECE_NUMEL = 2**21


def load_state_file(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read an ordinary Lightning checkpoint: one file with a ``state_dict`` of unsharded tensors, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a checkpoint, or holds types that ``weights_only`` refuses.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"there is no checkpoint at {file}.")
    if file.is_dir():
        files.check(file)  # says what kind of directory it is
        raise ValueError(f"{file} is a directory, not a single-file checkpoint.")
    content = files.read_pickled(file, weights_only)
    if not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{file} has no state_dict; its keys are {sorted(map(str, content))[:10]}.")
    return content


def load_single_file(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[DistributedOptimizer],
    mesh: Mesh,
    load_optimizer: bool,
    weights_only: bool | None,
) -> tuple[dict[str, Any], bool]:
    """Cut what this rank holds out of a single-file checkpoint. All ranks call it together; each reads the whole file.

    Everything is checked before anything is changed. Main values that the file does not have are read from the parameters.

    Returns:
        What the file holds, and whether the optimizers' states were restored.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not such a checkpoint, or does not fit; the message names the tensors with both shapes.
    """
    ranks = Ranks()
    content = ranks.together(lambda: load_state_file(path, weights_only=weights_only))
    _check_weights(module, content["state_dict"], ranks)
    saved = content.get("optimizer_states") or []
    restored = load_optimizer and bool(optimizers) and bool(saved)
    states = _States.of(saved, optimizers, module=module, mesh=mesh, ranks=ranks) if restored else []
    load_unsharded(module, content["state_dict"])
    for optimizer in optimizers:
        optimizer.refresh_main()
    for state in states:
        state.install()
    return content, restored


def _check_weights(module: nn.Module, saved: dict[str, Any], ranks: Ranks) -> None:
    local = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    wanted = {name: tuple(sharding_of(value).global_shape) for name, value in local.items() if not name.endswith(EXTRA_STATE)}
    everywhere = ranks.gather_to_first(wanted)

    def check() -> None:
        together = {name: shape for of_rank in everywhere for name, shape in of_rank.items()}
        found = {name: tuple(value.shape) for name, value in saved.items() if isinstance(value, Tensor)}
        problems = [f"{name}: not in the file (wanted with shape {together[name]})" for name in together.keys() - found.keys()]
        left = [name for name in found.keys() - together.keys() if not name.endswith(EXTRA_STATE)]
        problems += [f"{name}: in the file with shape {found[name]}, but not in the model" for name in left]
        problems += [
            f"{name}: saved as {found[name]}, wanted as {shape}"
            for name, shape in together.items()
            if name in found and found[name] != shape
        ]
        if problems:
            raise ValueError("The checkpoint does not fit:\n  " + "\n  ".join(sorted(problems)[:8]))

    ranks.on_first(check)


class _States:
    """The saved states of one optimizer, by name.

    Args:
        distributed: the optimizer.
        saved: as ``torch.optim`` or ``consolidate`` have made them.
        names: the parameters' names in the order of the model, by param group; the same on all ranks.
    """

    def __init__(self, distributed: DistributedOptimizer, saved: dict[str, Any], names: list[list[str]]) -> None:
        self._distributed, self._groups = distributed, saved["param_groups"]
        numbers = [number for group in self._groups for number in group["params"]]
        flat = [name for group in names for name in group]
        if [len(group["params"]) for group in self._groups] != [len(group) for group in names]:
            raise ValueError(
                f"the optimizer's groups have {[len(group) for group in names]} parameters, and "
                f"{[len(group['params']) for group in self._groups]} in the checkpoint."
            )
        named = all(isinstance(number, str) for number in numbers)
        translated = dict(zip(numbers, numbers if named else flat, strict=True))
        self._states = {translated[number]: state for number, state in saved["state"].items()}
        self._main: dict[str, Tensor] = saved.get("main", {})
        shaped = {key for state in self._states.values() for key, value in state.items() if _has_dims(value)}
        self._single = {key for state in self._states.values() for key in state} - (shaped - {"step"})
        if not named:
            self._check_order(flat)

    @classmethod
    def of(
        cls,
        saved: Sequence[dict[str, Any]],
        optimizers: Sequence[DistributedOptimizer],
        *,
        module: nn.Module,
        mesh: Mesh,
        ranks: Ranks,
    ) -> list[_States]:
        """Of all optimizers, checked on all ranks."""
        if len(saved) != len(optimizers):
            raise ValueError(f"the checkpoint has the states of {len(saved)} optimizers, and {len(optimizers)} are configured.")
        found = []
        for distributed, state in zip(optimizers, saved, strict=True):
            groups = named_groups(distributed, module, mesh, ranks)
            names = ranks.on_first(lambda groups=groups: [group["params"] for group in groups])  # type: ignore[misc]
            found.append(ranks.together(lambda *, d=distributed, s=state, n=names: cls(d, s, n)._checked()))  # type: ignore[misc]
        return found

    def _check_order(self, flat: list[str]) -> None:
        """See Note [Names of states]."""
        position = {name: place for place, name in enumerate(flat)}
        names = {id(shard.main): shard.name for shard in self._distributed.shards}
        for number, group in enumerate(self._distributed.optimizer.param_groups):
            held = [position[names[id(main)]] for main in group["params"] if id(main) in names]
            if held != sorted(held):
                raise ValueError(
                    f"the file numbers the optimizer's parameters, and group {number} is not in the order of the model: which "
                    f"state belongs to which parameter cannot be told. Make the group in the order of named_parameters()."
                )

    def _checked(self) -> _States:
        problems = []
        for shard in self._distributed.shards:
            wanted = tuple(shard.sharding.global_shape)
            tensors = {key: value for key, value in self._states.get(shard.name, {}).items() if self._is_shaped(key, value)}
            tensors |= {"main": self._main[shard.name]} if shard.name in self._main else {}
            problems += [
                f"{shard.name}.{key}: saved as {tuple(value.shape)}, wanted as {wanted}"
                for key, value in tensors.items()
                if tuple(value.shape) != wanted
            ]
        if problems:
            raise ValueError("The optimizer's states do not fit:\n  " + "\n  ".join(problems[:8]))
        return self

    def _is_shaped(self, key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and key not in self._single

    @torch.no_grad()
    def install(self) -> None:
        """Cut out this rank's parts."""
        optimizer, kept = self._distributed.optimizer, self._distributed.kept
        groups = {id(main): group for group in optimizer.param_groups for main in group["params"]}
        for shard in self._distributed.shards:
            states: dict[str, Any] = {}
            for key, value in self._states.get(shard.name, {}).items():
                if self._is_shaped(key, value):
                    states[key] = kept.place_for(shard, key, value.dtype)
                    _fill(states[key], shard, value)
                else:
                    states[key] = placed(key, value, shard, groups.get(id(shard.main), {}))
            kept.install(shard, states)
            if shard.name in self._main and is_copy(shard):
                _fill(kept.main(shard), shard, self._main[shard.name])
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            for key, value in saved.items():
                if key not in NAMES:
                    set_hyperparameter(group, [key], value)


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _fill(target: Tensor | Kept, shard: Shard, full: Tensor) -> None:
    """Write a shard's part of an unsharded tensor."""
    own = shard.sharding.cut(full, shard.shape).reshape(-1)[shard.start : shard.stop]
    if isinstance(target, Tensor):
        target.view(-1).copy_(own)
        return
    for start in range(0, prod(own.shape), _PIECE_NUMEL):
        piece = own[start : start + _PIECE_NUMEL]
        target.write(piece.to(shard.main.device, torch.float32), start, start + piece.numel())
