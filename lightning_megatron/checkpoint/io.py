"""Save and load a checkpoint directory on all ranks together."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from lightning_megatron.checkpoint import files
from lightning_megatron.checkpoint.files import is_checkpoint, remove
from lightning_megatron.checkpoint.gradients import gradient_state
from lightning_megatron.checkpoint.optimizer_state import (
    OptimizerTarget,
    num_optimizers,
    optimizer_state,
)
from lightning_megatron.checkpoint.planner import StrictLoadPlanner
from lightning_megatron.checkpoint.ranks import Ranks, readable
from lightning_megatron.checkpoint.reading import ChunkReader, small_files
from lightning_megatron.checkpoint.saving import BackgroundSaver, plan_save
from lightning_megatron.checkpoint.state import (
    COPIES,
    EXTRA_STATE,
    CopiesTarget,
    Edits,
    ModelTarget,
    copies_of_model,
    held_of,
    model_state,
    of_another_dtype,
    placeholder,
)
from lightning_megatron.checkpoint.storage import Place, places_of
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer

_WRITTEN_APART = ("state_dict", "optimizer_states")


@dataclass(frozen=True)
class Loaded:
    """What ``load`` found besides tensors.

    Args:
        meta: the dict that was given to ``save``, without ``optimizer_states``, and of ``state_dict`` only those edited values
            that were of another dtype than the module's.
        optimizers: whether optimiser states, main parameters and hyperparameters were restored. Where not, the main
            parameters must be refreshed from the parameters.
        own: what this rank had given to ``save`` as its own; empty where no rank of that number had.
        state: what the module now holds of the checkpoint: its own tensors by name, as views.
    """

    meta: dict[str, Any]
    optimizers: bool
    own: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[DistributedOptimizer],
    meta: dict[str, Any],
    mesh: Mesh,
    save_optimizer: bool = True,
    edits: Edits | None = None,
    own: Mapping[str, Tensor] | None = None,
    accumulated: bool = False,
    background: BackgroundSaver | None = None,
    older: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint directory. All ranks call it together; the first rank's ``path`` and ``meta`` count.

    It is written beside ``path`` under a temporary name and takes its place when it is whole, replacing a file, link or
    directory there. An interrupted save leaves the old checkpoint as it was.

    Args:
        path: the directory to make.
        module: the root module, holding this rank's stages. Its ``state_dict`` names what is saved.
        optimizers: the distributed optimisers, in Lightning's order.
        meta: the rest of Lightning's checkpoint dict. Dicts of tensors of the module's names and shapes are saved as it is.
        mesh: the running layout.
        save_optimizer: also write optimiser states and main parameters.
        edits: what is saved in place of the module's own tensors.
        own: tensors of this rank alone (its random numbers), for the rank of that number in a run of the same layout.
        accumulated: also write the gradients of batches that wait for their optimizer step; ``load_gradients`` reads them.
        background: writes on a thread: when ``save`` returns, the state has been copied to host memory. What fails is
            raised by a later call of the saver.
        older: a checkpoint that ``path`` leads to until the one in the background is whole, if nothing is there yet.
        process_group: a group of all ranks that can move CPU objects; by default the world's.

    Raises:
        ValueError: the ranks do not hold the whole of some tensor, or disagree about it, or ``edits`` do not fit.
        RuntimeError: a rank could not write.
    """
    ranks = Ranks(process_group)
    path = ranks.on_first(lambda: Path(os.path.abspath(path)))
    state: dict[str, Any] = {"model": ranks.together(lambda: model_state(module, mesh=mesh, edits=edits))}
    copies = copies_of_model(module, {**meta, "state_dict": of_another_dtype(module, edits)}, mesh=mesh)
    if any(copies.values()):
        state[COPIES] = copies
    for index, optimizer in enumerate(optimizers if save_optimizer else ()):
        state[f"optimizer_{index}"] = optimizer_state(optimizer, module=module, mesh=mesh, ranks=ranks)
    if own:
        state["rank"] = {str(ranks.rank): dict(own)}
    if accumulated:
        state |= gradient_state(optimizers, mesh=mesh)
    rest = {key: value for key, value in meta.items() if key not in _WRITTEN_APART and key not in copies}
    planned = plan_save(path, state, rest, ranks)
    if background is None:
        planned.write(ranks)
        return
    background.wait()  # ``older`` may be what is on its way
    if older is not None and ranks.is_first:
        files.hold_place(path, Path(older))
    background.start(planned)


def load(
    path: str | os.PathLike[str],
    *,
    module: nn.Module,
    optimizers: Sequence[DistributedOptimizer] = (),
    mesh: Mesh,
    load_optimizer: bool = True,
    weights_only: bool | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Read a checkpoint, written at any layout, into this rank's parameters and optimiser shards, in place.

    All ranks call it together. Everything is checked before anything is read: after a ``ValueError`` or
    ``FileNotFoundError`` nothing has changed.

    Args:
        path: the checkpoint's directory.
        module: the root module, holding this rank's stages, in real memory.
        optimizers: the distributed optimisers, in the order in which they were saved.
        mesh: the running layout.
        load_optimizer: also restore the optimisers, if the checkpoint has them.
        weights_only: how ``meta.pt`` is unpickled; ``None`` means ``True``, as in torch. Python values in the optimiser's
            param groups are always unpickled: load trusted checkpoints only.
        strict: refuse parameters that only the checkpoint or only the model has.
        cast: let parameters be cast from the saved dtype.
        verify: compare the checksums of what this rank reads before anything is loaded.
        process_group: a group of all ranks that can move CPU objects; by default the world's.

    Raises:
        FileNotFoundError: no checkpoint, or an incomplete one.
        ValueError: something else is there, or its tensors do not fit; the message names them with both shapes.
        RuntimeError: a rank could not read.
    """
    ranks = Ranks(process_group)
    index, meta, sums = ranks.together(lambda: small_files(Path(path), weights_only, verify=verify))
    if verify and sums is None and ranks.is_first:
        warnings.warn(f"{path} has no {files.SUMS_FILE}: it is loaded without knowing whether it is damaged.", stacklevel=2)
    restored = load_optimizer and len(optimizers) > 0 and num_optimizers(index) > 0
    copies = CopiesTarget(module, index)
    targets = [copies, *ranks.together(lambda: _targets(module, optimizers if restored else (), index))]
    tensors = {key: tensor for target in targets for key, tensor in target.tensors.items()}
    own = _own_targets(index, ranks.rank)
    tensors.update(own)
    device, later = mesh.device if mesh.device.type == "cuda" else None, _read_later(index, mesh) if restored else []
    reader = ChunkReader(Path(path), index, sums, verify=verify, device=device, read_later=later)
    _read(tensors, reader, strict=strict, cast=cast, ranks=ranks)
    for target in targets:
        target.finish(tensors)
    mine = {key.split(".", 2)[2]: tensor for key, tensor in own.items()}
    return Loaded(meta | copies.found, restored, mine, held_of(module, index))


def _read(tensors: dict[str, Any], reader: ChunkReader, *, strict: bool, cast: bool, ranks: Ranks) -> None:
    """Check that what the checkpoint has fits the tensors, on all ranks, and then read it into them."""
    planner = StrictLoadPlanner(
        complete="model." if strict else None,
        optional=(EXTRA_STATE,),
        allow_missing=not strict,
        cast=cast,
        castable=".state.",
    )
    with _dcp_errors():
        load_tensors(
            tensors,
            storage_reader=reader,
            planner=planner,
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )


def _own_targets(index: Metadata, rank: int) -> dict[str, Tensor]:
    head = f"rank.{rank}."
    found = {key: placeholder(entry) for key, entry in index.state_dict_metadata.items() if str(key).startswith(head)}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _read_later(index: Metadata, mesh: Mesh) -> list[Place]:
    """A share of what belongs to single ranks, which is read when the training starts: gradients and their token counts.

    All ranks together have all of it, however many had saved it.
    """
    found = [(place, re.match(r"(?:gradients|copies|rank)\.(\d+)\.", place.key)) for place in places_of(index)]
    return [place for place, rank in found if rank is not None and int(rank[1]) % mesh.world_size == mesh.rank]


def _targets(
    module: nn.Module, optimizers: Sequence[DistributedOptimizer], index: Metadata
) -> list[ModelTarget | OptimizerTarget]:
    saved = num_optimizers(index)
    if optimizers and saved != len(optimizers):
        raise ValueError(f"the checkpoint has the states of {saved} optimizers, and {len(optimizers)} are configured.")
    return [ModelTarget(module, index), *(OptimizerTarget(one, number, index) for number, one in enumerate(optimizers))]


@contextmanager
def _dcp_errors() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise readable(error) from None


__all__ = ["Loaded", "is_checkpoint", "load", "remove", "save"]
