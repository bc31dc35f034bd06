"""A module's parameters and buffers as parts of the unsharded model's, under its names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.boxes import BoxedTensor
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import has_sharding, sharding_of

EXTRA_STATE = "_extra_state"


def model_state(module: nn.Module, *, mesh: Mesh) -> dict[str, Any]:
    """What this rank saves of a module: ``name -> BoxedTensor | Tensor | Python value``.

    Names are those of ``module.state_dict()``, which are global because a stage keeps its layers' global indices. Every
    holder of a parameter offers it, and one of them writes it. Buffers and extra state may differ between data-parallel
    replicas (running statistics): only the first replica and tensor-parallel rank offer them, so that they fit each other.

    Args:
        module: the root module, holding this rank's stages.
        mesh: the running layout.
    """
    first = mesh.dp_cp.rank == 0 and mesh.tp.rank == 0
    state: dict[str, Any] = {}
    for name, value in _entries(module):
        if (part := _part(value)) is not None:
            state[name] = part
        elif first and not _is_boxed(value):
            state[name] = value.detach() if isinstance(value, Tensor) else value
    return state


class ModelTarget:
    """Where a checkpoint's ``model.*`` entries go.

    Args:
        module: the root module, holding this rank's stages.
        index: the checkpoint's index.

    Raises:
        ValueError: a parameter or buffer is on the meta device.
    """

    def __init__(self, module: nn.Module, index: Metadata) -> None:
        self._module = module
        self._extra: dict[str, dict[tuple[Any, ...], str]] = defaultdict(dict)  # name -> path inside its value -> key
        self.tensors: dict[str, Any] = {}
        saved, paths = index.state_dict_metadata, (index.planner_data or {}).items()
        extra = {(path[1], path[2:]): key for key, path in paths if path[0] == "model" and str(path[1]).endswith(EXTRA_STATE)}
        aliases: dict[int, list[str]] = defaultdict(list)
        for name, value in _entries(module):
            aliases[id(value)].append(name)
        for name, value in _entries(module):
            key = f"model.{name}"
            others = [f"model.{other}" for other in aliases[id(value)]]
            if name.endswith(EXTRA_STATE):
                self._extra[name] = {inside: key for (owner, inside), key in extra.items() if owner == name}
                self.tensors.update({key: placeholder(saved[key]) for key in self._extra[name].values()})
            elif isinstance(value, Tensor) and (key in saved or not any(other in saved for other in others)):
                self._add(key, value)

    def _add(self, key: str, value: Tensor) -> None:
        if value.is_meta:
            raise ValueError(
                f"{key.removeprefix('model.')} is on the meta device; materialise the module before loading into it."
            )
        part = _part(value)
        if part is not None:
            self.tensors[key] = part
        elif not _is_boxed(value):
            self.tensors[key] = value.detach()

    def finish(self, loaded: dict[str, Any]) -> None:
        """Hand loaded extra state to the modules that asked for it; tensors have been filled in place."""
        for name, keys in self._extra.items():
            if keys:
                path = name.removesuffix(EXTRA_STATE).removesuffix(".")
                self._module.get_submodule(path).set_extra_state(nested({inside: loaded[key] for inside, key in keys.items()}))


def placeholder(entry: Any) -> Tensor | None:
    """What a value that is not loaded in place is loaded into: a fresh tensor, or ``None`` for a Python value."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def nested(leaves: dict[tuple[Any, ...], Any]) -> Any:
    """Dicts and lists (of whole-number keys) from ``path -> leaf``; the leaf itself under the empty path."""
    if () in leaves:
        return leaves[()]
    members: dict[Any, dict[tuple[Any, ...], Any]] = defaultdict(dict)
    for (step, *rest), leaf in leaves.items():
        members[step][tuple(rest)] = leaf
    values = {step: nested(rest) for step, rest in members.items()}
    return [values[step] for step in sorted(values)] if all(isinstance(step, int) for step in values) else values


def _entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.state_dict(keep_vars=True).items()


def _is_boxed(value: Any) -> bool:
    """Whether it is a parameter (or sharded buffer) with elements, as against a plain value."""
    return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and has_sharding(value))


def _part(value: Any) -> Tensor | None:
    """A parameter's parts; ``None`` for other values and where this rank holds none."""
    if not _is_boxed(value):
        return None
    sharding = sharding_of(value)
    if prod(sharding.global_shape) == 0:
        return value.detach()  # type: ignore[no-any-return]  # a box needs an element, the name is kept all the same
    boxed = BoxedTensor.from_param(value, sharding)
    return boxed if boxed.parts else None
