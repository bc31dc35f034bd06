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
        self._extra: list[str] = []
        self.tensors: dict[str, Any] = {}
        saved = index.state_dict_metadata
        aliases: dict[int, list[str]] = defaultdict(list)
        for name, value in _entries(module):
            aliases[id(value)].append(name)
        for name, value in _entries(module):
            key = f"model.{name}"
            others = [f"model.{other}" for other in aliases[id(value)]]
            if name.endswith(EXTRA_STATE):
                self._add_extra(name, saved.get(key))
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

    def _add_extra(self, name: str, saved: Any) -> None:
        if saved is None:
            return
        self._extra.append(name)
        is_tensor = isinstance(saved, TensorStorageMetadata)
        self.tensors[f"model.{name}"] = torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None

    def finish(self, loaded: dict[str, Any]) -> None:
        """Hand loaded extra state to the modules that asked for it; tensors have been filled in place."""
        for name in self._extra:
            path = name.removesuffix(EXTRA_STATE).removesuffix(".")
            self._module.get_submodule(path).set_extra_state(loaded[f"model.{name}"])


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
