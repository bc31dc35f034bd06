"""What a resumed run needs besides tensors: where it stands in its epoch, random numbers, states of loaders, gradients.

Note [Where a run stands]
Lightning's progress counters are saved as they are, but for two cases in which they do not say where to go on. A run that
was stopped in the middle of an epoch (``max_steps``, ``should_stop``) counts the epoch as done, though samples of it are
left: the saved counters say that it is still running. And a run that is saved before a batch is done (an exception, SLURM's
signal) has counted that batch in the total, which seeds its random numbers: the saved counters go back to the batch before,
and between two optimizer steps, as the gradients since the last one are lost, to that step.
"""

from __future__ import annotations

import io
import random
import warnings
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.strategy.loaders import is_counted, name_of, progress_of

_BATCHES = "epoch_loop.batch_progress"
_COUNTERS = ("ready", "started", "processed", "completed")


def layout_of(mesh: Mesh) -> dict[str, Any]:
    """What two runs must share for one to go on with what belongs to single ranks of the other."""
    parallelism = mesh.parallelism
    sizes = {name: getattr(parallelism, name) for name in ("tp", "pp", "cp", "vpp", "ep", "etp")}
    return {**sizes, "order": parallelism.order, "placement": parallelism.placement, "world_size": mesh.world_size}


def is_accumulating(trainer: Trainer) -> bool:
    """Whether gradients of whole batches wait for the optimizer's step."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return trainer.accumulate_grad_batches > 1 and batches.ready == batches.processed and trainer.fit_loop._should_accumulate()


def correct_progress(loops: dict[str, Any], trainer: Trainer) -> None:
    """Make the saved counters say where to go on, in place; see Note [Where a run stands]."""
    progress = progress_of(trainer)
    epochs, batches = loops["fit_loop"]["epoch_progress"], loops["fit_loop"][_BATCHES]
    for of in ("current", "total"):
        if epochs["current"]["ready"] == epochs["current"]["processed"] and progress.epoch < epochs["current"]["processed"]:
            epochs[of].update(processed=epochs[of]["ready"] - 1, completed=epochs[of]["ready"] - 1)
    back = batches["current"]["processed"] - progress.batches
    if batches["current"]["ready"] > batches["current"]["processed"]:
        for of in ("current", "total"):
            done = batches[of]["processed"] - back
            batches[of].update(dict.fromkeys(_COUNTERS, done))


def states_of_loaders(trainer: Trainer, mesh: Mesh) -> dict[str, Any]:
    """States of the loaders that keep one of their own, by data-parallel rank: ``index -> {"name", "states"}``.

    Collective over the data-parallel ranks.
    """
    combined = trainer.fit_loop._combined_loader
    own = [loader for loader in combined.flattened if hasattr(loader, "state_dict")] if combined is not None else []
    found = {}
    for index, loader in enumerate(own):
        if not is_counted(loader):
            found[str(index)] = {"name": name_of(loader), "states": all_gather_object(loader.state_dict(), mesh.dp)}
    return found


def place_states_of_loaders(meta: dict[str, Any], mesh: Mesh) -> None:
    """Give this replica its own states in Lightning's part of the checkpoint, which holds those of the first."""
    loops = meta.get("loops") or {}
    combined = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader", [])
    for index, saved in meta["lightning_megatron"].get("loaders", {}).items():
        states, name = saved["states"], saved["name"]
        if len(states) != mesh.dp.size:
            warnings.warn(
                f"{mesh.coordinate} {name} has one state for each of {len(states)} data-parallel ranks in the checkpoint, and "
                f"now there are {mesh.dp.size}: rank {mesh.dp.rank} goes on from state {mesh.dp.rank % len(states)}. If the "
                f"states say which part of the data a rank reads, samples are read twice or left out.",
                stacklevel=2,
            )
        combined[int(index)] = states[mesh.dp.rank % len(states)]


def packed_generators(device: torch.device) -> Tensor:
    """This rank's default generators (torch's, Python's, numpy's) as bytes, ``[n]`` uint8, that need no trust to be read."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "cpu": torch.default_generator.get_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def restore_generators(packed: Tensor, device: torch.device) -> None:
    """Go on from ``packed_generators``."""
    state = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    torch.default_generator.set_state(state["cpu"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
