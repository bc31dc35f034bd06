"""A module's parameters and buffers as parts of the unsharded model's, under its names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.boxes import BoxedTensor
from lightning_megatron.mesh import Mesh
from lightning_megatron.sharding import has_sharding, sharding_of

EXTRA_STATE = "_extra_state"
COPIES = "saved_beside"


@dataclass(frozen=True)
class Edits:
    """What hooks have made of a module's ``state_dict``.

    Args:
        values: ``name -> value`` in place of the module's own, or beside them.
        removed: names that are left out.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()

    def among(self, names: Collection[str]) -> Edits:
        """The same, where hooks of some rank have changed or removed these names: ranks without a value leave it to others."""
        return Edits(self.values, self.removed | (frozenset(names) - self.values.keys()))


def model_state(module: nn.Module, *, mesh: Mesh, edits: Edits | None = None) -> dict[str, Any]:
    """What this rank saves of a module: ``name -> BoxedTensor | Tensor | Python value``.

    Names are those of ``module.state_dict()``, which are global because a stage keeps its layers' global indices. Every
    holder of a parameter offers it, and one of them writes it. Buffers and extra state may differ between data-parallel
    replicas (running statistics): only the first replica and tensor-parallel rank offer them, so that they fit each other.

    Args:
        module: the root module, holding this rank's stages.
        mesh: the running layout.
        edits: what is saved otherwise; values have the local shape ``[*local_shape]`` of the module's own, and are cast to
            its dtype.

    Raises:
        ValueError: an edited value has another shape than the module's own, or a name that the module does not have while
            ranks hold parts of tensors.
    """
    edits = edits or Edits()
    local = dict(_entries(module))
    values = {name: value for name, value in local.items() if name not in edits.removed}
    for name, value in edits.values.items():
        _check_edit(name, value, local, mesh)
        values[name] = value.to(local[name].dtype) if isinstance(local.get(name), Tensor) else value
    return _offered(values, local, mesh)


def of_another_dtype(module: nn.Module, edits: Edits | None) -> dict[str, Tensor]:
    """Those edited values that ``model_state`` casts (averages in fp32 of a model in bf16), to be saved beside it."""
    local = dict(_entries(module))
    values = {} if edits is None else edits.values
    found = {name: value for name, value in values.items() if isinstance(value, Tensor) and isinstance(local.get(name), Tensor)}
    return {name: value for name, value in found.items() if value.dtype != local[name].dtype}


def copies_of_model(module: nn.Module, meta: Mapping[str, Any], *, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """What this rank saves of further dicts of tensors with the module's names and local shapes (weights before averaging).

    Returns:
        By the key in ``meta``: as ``model_state``. Other entries of ``meta`` are left out.
    """
    local = dict(_entries(module))
    found = {key: value for key, value in meta.items() if isinstance(value, Mapping) and _is_copy(value, local)}
    return {key: _offered(value, local, mesh) for key, value in found.items()}


def _is_copy(values: Mapping[Any, Any], local: Mapping[str, Any]) -> bool:
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors or not values.keys() <= local.keys():
        return False
    return all(isinstance(own := local[name], Tensor) and own.shape == value.shape for name, value in tensors.items())


def _check_edit(name: str, value: Any, local: Mapping[str, Any], mesh: Mesh) -> None:
    sizes = mesh.parallelism
    if name not in local and max(sizes.tp, sizes.pp, sizes.ep, sizes.etp) > 1:
        raise ValueError(
            f"on_save_checkpoint has put {name} into checkpoint['state_dict'], which is no name of the module: which "
            f"part of the model it is cannot be told (tp={sizes.tp}, pp={sizes.pp}, ep={sizes.ep}). Give it a key of its own."
        )
    own = local.get(name)
    if isinstance(own, Tensor) and (not isinstance(value, Tensor) or value.shape != own.shape):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"on_save_checkpoint has made {name} of checkpoint['state_dict'] {given}, where this rank has {tuple(own.shape)}: "
            f"give values of that shape, or put them under a key of their own."
        )


def _offered(values: Mapping[str, Any], local: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Values of the module's names in the form in which ranks offer them to a checkpoint."""
    first = mesh.dp_cp.rank == 0 and mesh.tp.rank == 0
    state: dict[str, Any] = {}
    for name, value in values.items():
        owner = local.get(name)
        if (part := _part(value, owner)) is not None:
            state[name] = part
        elif first and not _is_boxed(owner):
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
        part = _part(value, value)
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


class CopiesTarget:
    """Where what ``copies_of_model`` has saved goes: new tensors of the local shapes, on the host.

    Args:
        module: the root module, holding this rank's stages.
        index: the checkpoint's index.

    Attributes:
        found: after ``finish``, ``key in meta -> name -> value``.
    """

    def __init__(self, module: nn.Module, index: Metadata) -> None:
        self.tensors: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = defaultdict(dict)
        self._extra: dict[tuple[str, str], dict[tuple[Any, ...], str]] = defaultdict(dict)
        local = dict(_entries(module))
        for key, (head, *path) in (index.planner_data or {}).items():
            if head != COPIES or path[1] not in local:  # another stage's
                continue
            of, name, *inside = path
            own, saved = local[name], index.state_dict_metadata[key]
            if isinstance(own, Tensor) and isinstance(saved, TensorStorageMetadata):
                self.found[of][name] = torch.zeros(own.shape, dtype=saved.properties.dtype)
                part = _part(self.found[of][name], own)
                if part is not None or not _is_boxed(own):
                    self.tensors[key] = self.found[of][name] if part is None else part
            else:
                self._extra[of, name][tuple(inside)] = key
                self.tensors[key] = placeholder(saved)

    def finish(self, loaded: dict[str, Any]) -> None:
        """Take up Python values; tensors have been filled in place."""
        for (of, name), keys in self._extra.items():
            self.found[of][name] = nested({inside: loaded[key] for inside, key in keys.items()})


def held_of(module: nn.Module, index: Metadata) -> dict[str, Any]:
    """The module's own tensors and extra state of which a checkpoint has values, by name, as views."""
    local = dict(_entries(module))
    saved = {path[1] for path in (index.planner_data or {}).values() if path[0] == "model"}
    aliases = {id(value) for name, value in local.items() if name in saved}
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in local.items()
        if name in saved or id(value) in aliases
    }


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


def _part(value: Any, owner: Any) -> Tensor | None:
    """The parts of a value of a parameter ``owner``; ``None`` for others and where this rank holds none."""
    if not _is_boxed(owner):
        return None
    sharding = sharding_of(owner)
    if prod(sharding.global_shape) == 0:
        return value.detach()  # type: ignore[no-any-return]  # a box needs an element, the name is kept all the same
    boxed = BoxedTensor.from_param(value, sharding)
    return boxed if boxed.parts else None
