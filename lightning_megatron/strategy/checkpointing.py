"""Checkpoint hooks of the strategy: directories written by ``lightning_megatron.checkpoint``, filled in place on loading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron import checkpoint as checkpoints
from lightning_megatron.comm import all_gather_object
from lightning_megatron.optim.distributed import DistributedOptimizer
from lightning_megatron.step import TrainingEngine
from lightning_megatron.strategy.failure import say
from lightning_megatron.strategy.prepare import PreparedModule
from lightning_megatron.strategy.processes import ProcessesStrategy
from lightning_megatron.strategy.requeue import RequeueWatch, requeue, save_for_requeue
from lightning_megatron.strategy.resume import (
    correct_progress,
    is_accumulating,
    layout_of,
    packed_generators,
    place_states_of_loaders,
    restore_generators,
    states_of_loaders,
)
from lightning_megatron.strategy.saved_state import HandedOut, ParametersCount, apply_edits, is_seen, names_of_all

_INTERRUPTED_SECONDS = 30.0


class CheckpointingStrategy(ProcessesStrategy):
    """Saves and restores this rank's parameters and optimizer shards; holds what ``setup`` has prepared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seed = 0
        self._prepared: PreparedModule | None = None
        self._engine: TrainingEngine | None = None
        self._at_start: list[Callable[[], None]] = []
        self._checkpoint_config = checkpoints.CheckpointConfig()
        self._saver: checkpoints.BackgroundSaver | None = None
        self._durable: str | None = None
        self._requeue: RequeueWatch | None = None
        self._handed_out: HandedOut | None = None
        self._loaded_file = False

    @property
    def _ready(self) -> PreparedModule:
        if self._prepared is None:
            raise RuntimeError("the model is set up only once trainer.fit, validate, test or predict has started.")
        return self._prepared

    @property
    def _steps(self) -> TrainingEngine:
        assert self._engine is not None
        return self._engine

    @property
    def _distributed(self) -> list[DistributedOptimizer]:
        return self._engine.optimizers if self._engine is not None else []

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Parameters and optimizer shards must exist to be filled."""
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """``load_checkpoint`` fills the optimizer shards itself."""
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's own tensors where a hook looks at them; nothing otherwise: ``save_checkpoint`` writes the shards.

        All ranks call it together, but for one that saves alone.
        """
        module = self._ready.module
        seen = not self.is_alone and is_seen(module.trainer, "on_save_checkpoint")
        if self._has_narrow_parameters and not self.is_alone:  # values are put together by all
            seen = any(all_gather_object(seen, self.mesh.world))
        if not seen:
            return {}
        with self._wide_parameters():
            state: dict[str, Any] = module.state_dict()
        self._handed_out = HandedOut(state)
        return state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing for Lightning's own dict: ``save_checkpoint`` writes the shards."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint directory. All ranks call it together.

        Raises:
            ValueError: ``storage_options`` are given; they belong to Lightning's single-file checkpoints.
        """
        if storage_options is not None:
            raise ValueError("MegatronStrategy writes checkpoint directories itself and takes no storage_options.")
        if self.is_alone:
            say(f"{self.mesh.coordinate} no checkpoint is written to {filepath}: other ranks run on, and it takes all of them.")
            return
        edits = self._edits(checkpoint.pop("state_dict", None))
        with_optimizer = checkpoint.pop("optimizer_states", None) is not None
        trainer = self._ready.module.trainer
        correct_progress(checkpoint["loops"], trainer)
        ours = {"seed": self._seed, "layout": layout_of(self.mesh), "loaders": states_of_loaders(trainer, self.mesh)}
        if edited := names_of_all(edits, self.mesh):
            ours["edited"] = edited
            edits = edits.among(edited)
        accumulated = with_optimizer and is_accumulating(trainer)
        own: dict[str, Tensor] = {}
        if with_optimizer:
            own["generators"] = packed_generators(self.root_device)
        if accumulated:
            own["num_tokens"], ours["per_token"] = self._steps._num_tokens, self._steps._per_token
        path = self.broadcast(str(filepath))
        with self._wide_parameters():
            checkpoints.save(
                path,
                module=self._ready.module,
                optimizers=self._distributed if with_optimizer else [],
                meta={**checkpoint, "lightning_megatron": ours},
                mesh=self.mesh,
                edits=edits,
                own=own,
                accumulated=accumulated,
                background=self._background_saver(),
                older=self._durable if _links_to_last(trainer) is not None else None,
            )
        self._durable = path
        if self.is_global_zero and (link := _links_to_last(trainer)):
            checkpoints.announce_link(Path(link), Path(path))

    def _edits(self, state: dict[str, Any] | None) -> checkpoints.Edits:
        """What hooks have made of the dict that they were given."""
        handed_out, self._handed_out = self._handed_out, None
        return handed_out.edits(state) if handed_out is not None and state is not None else checkpoints.Edits()

    def _background_saver(self) -> checkpoints.BackgroundSaver | None:
        if self._checkpoint_config.async_save and self._saver is None:
            self._saver = checkpoints.BackgroundSaver(self._new_control_group, self.mesh.world)
        return self._saver

    def _new_control_group(self) -> dist.ProcessGroup | None:
        """Of all ranks, for host memory, used by nothing else."""
        return dist.new_group(backend="gloo", timeout=self._timeout) if dist.is_initialized() else None

    def _end_saving(self) -> None:
        """Leave the folders of checkpoints tidy."""
        self._finish_saving()
        self._requeue = None
        if self.is_global_zero and self._prepared is not None and not self._is_interrupted:
            for folder in _folders(self._ready.module.trainer):
                checkpoints.forget_links(folder)

    @override
    def _check_before_launch(self, trainer: Trainer | None) -> None:
        super()._check_before_launch(trainer)
        for folder in _folders(trainer) if trainer is not None else ():  # before Lightning looks for "last"
            checkpoints.recover(folder)
            checkpoints.recover_links(folder)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Raise what a checkpoint in the background has failed of, on all ranks; save if the job is about to be requeued."""
        fit_loop = self._ready.module.trainer.fit_loop
        if fit_loop.restarting:  # or Lightning leaves out this epoch's step of schedulers that follow a metric
            fit_loop._restarting = False
        if self._saver is not None:
            self._saver.check()
        if self._requeue is not None and self._requeue.is_due():
            save_for_requeue(self._ready.module.trainer)
            self._finish_saving()
            if self.is_global_zero:
                requeue()

    def _watch_requeue(self) -> None:
        if self._requeue is None and self.cluster_environment is not None:
            self._requeue = RequeueWatch.of(self.cluster_environment, self.mesh)

    def _finish_saving(self) -> None:
        """Wait for the checkpoint in the background. After an exception only for a while: peers may be gone."""
        if self._saver is None:
            return
        if not self._is_interrupted:
            self._saver.wait()
        elif not self._saver.wait_alone(_INTERRUPTED_SECONDS):
            say(f"{self.mesh.coordinate} the checkpoint that was being written in the background is given up.")
        elif self._saver.failure is not None:
            say(f"{self.mesh.coordinate} {self._saver.failure}")

    def _wait_parameters(self) -> None:
        """Wait for the parameters that the last step has sent."""
        for distributed in self._distributed:
            distributed.wait_parameters()

    @contextmanager
    def _wide_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Inside the ``with`` block parameters have arrived, and hold values also where the model holds 8 bits."""
        with ExitStack() as stack:
            for distributed in self._distributed:
                stack.enter_context(distributed.wide_parameters(changed=changed))
            yield

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill this rank's parameters and optimizer shards from a checkpoint directory, or from a single-file checkpoint."""
        self._finish_saving()
        path = self.broadcast(str(checkpoint_path))
        if weights_only is None:
            weights_only = self._checkpoint_config.weights_only
        trainer = self._ready.module.trainer
        with self._wide_parameters(changed=True):
            loaded = self._load(path, weights_only)
            edited = loaded.meta.get("lightning_megatron", {}).get("edited", ())
            if edited and loaded.optimizers:  # whose main values may have been written over the parameters
                self._load(path, weights_only, weights_alone=True)
            if not loaded.optimizers:
                for distributed in self._distributed:
                    distributed.refresh_main()
            elif changed := self._names_to_follow(loaded, edited):
                parameters = ParametersCount(self._ready.module, self._distributed, changed)
                if self._has_narrow_parameters:  # they would be made from main values
                    parameters()
                else:
                    self._at_start.append(parameters)
        if is_seen(trainer, "on_load_checkpoint"):
            loaded.meta["state_dict"] = state = loaded.state | loaded.meta.get("state_dict", {})
            self._handed_out, self._loaded_file = HandedOut(state), Path(path).is_file()
        if trainer.state.fn == TrainerFn.FITTING and "lightning_megatron" in loaded.meta:
            self._go_on_from(replace(loaded, state={}), Path(path))
            self._durable = path
        return loaded.meta

    @property
    def _has_narrow_parameters(self) -> bool:
        fp8 = getattr(self.precision_plugin, "fp8", None)
        return fp8 is not None and fp8.params

    def _names_to_follow(self, loaded: checkpoints.Loaded, edited: Sequence[str]) -> Sequence[str]:
        """Names of parameters that restored main values may not round to, when callbacks have loaded what they had saved."""
        is_foreign = "lightning_megatron" not in loaded.meta  # no main values in it, but perhaps weights beside the averaged
        if is_foreign and is_seen(self._ready.module.trainer, "on_load_checkpoint"):
            return list(loaded.meta.get("state_dict", ()))
        return edited

    def _go_on_from(self, loaded: checkpoints.Loaded, path: Path) -> None:
        """Draw the same masks and orders of samples as the run that wrote the checkpoint."""
        ours = loaded.meta["lightning_megatron"]
        self._seed = self._steps.seed = ours["seed"]
        place_states_of_loaders(loaded.meta, self.mesh)
        saved = ours.get("layout")
        same = saved == layout_of(self.mesh)
        if "per_token" in ours and path.is_file():
            warnings.warn(
                f"{path} was written between two optimizer steps: a single file does not hold the gradients of the batches "
                f"before, and the next step goes without them.",
                stacklevel=2,
            )
        elif "per_token" in ours and loaded.optimizers:
            self._at_start.append(partial(self._go_on_accumulating, loaded, path, same_layout=same))
        if same and "generators" in loaded.own:
            self._at_start.append(partial(restore_generators, loaded.own["generators"], self.root_device))
        elif saved is not None and self.is_global_zero:
            now = layout_of(self.mesh).items()
            changed = ", ".join(f"{name} {saved.get(name)} -> {size}" for name, size in now if saved.get(name) != size)
            why = f"the layout has changed ({changed})" if changed else f"{path} holds none for this layout"
            warnings.warn(
                f"{why}: the default random generators of ranks start afresh. Dropout and the order of samples go on as "
                f"before, as they depend on the seed and the step alone.",
                stacklevel=2,
            )

    def _go_on_accumulating(self, loaded: checkpoints.Loaded, path: Path, *, same_layout: bool) -> None:
        """Take up the gradients of the batches before; one rank has the token count of all in another layout."""
        checkpoints.load_gradients(path, self._distributed, mesh=self.mesh, same_layout=same_layout)
        tokens = loaded.own["num_tokens"] if same_layout else checkpoints.sum_of_own(path, "num_tokens")
        self._steps._per_token = loaded.meta["lightning_megatron"]["per_token"]
        self._steps._num_tokens.copy_(tokens if same_layout or self.is_global_zero else torch.zeros_like(tokens))

    def _restore_at_start(self) -> None:
        """As late as can be: the Trainer clears gradients, and hooks and loaders that are set up before draw at random."""
        pending, self._at_start = self._at_start, []
        for restore in pending:
            restore()

    def _load(self, path: str, weights_only: bool | None, *, weights_alone: bool = False) -> checkpoints.Loaded:
        """Fill the tensors."""
        module = self._ready.module
        optimizers = [] if weights_alone else self._distributed
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if Path(path).is_file():
            meta, restored = checkpoints.load_single_file(
                path,
                module=module,
                optimizers=optimizers,
                mesh=self.mesh,
                load_optimizer=fitting,
                weights_only=weights_only,
            )
            return checkpoints.Loaded(meta, restored)
        return checkpoints.load(
            path,
            module=module,
            optimizers=optimizers,
            mesh=self.mesh,
            load_optimizer=fitting,
            weights_only=weights_only,
            strict=module.strict_loading,
            verify=self._checkpoint_config.verify,
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """``load_checkpoint`` has loaded it; what ``on_load_checkpoint`` has made of it since goes into the module here."""
        edits = self._edits(checkpoint.get("state_dict"))
        if changed := names_of_all(edits, self.mesh):
            with self._wide_parameters(changed=True):
                apply_edits(self._ready.module, edits, strict=strict, unsharded=self._loaded_file)
                ParametersCount(self._ready.module, self._distributed, changed)()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by ``load_checkpoint``."""

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint, when the one that is being written in the background is durable."""
        if not self.is_global_zero:
            return
        path = str(filepath)
        if self._saver is not None:
            self._saver.after(lambda: checkpoints.remove(path))
        else:
            checkpoints.remove(path)


def _folders(trainer: Trainer) -> list[Path]:
    """Where the callbacks save, as far as it is known before they are set up."""
    beside = os.path.join(trainer.default_root_dir, "checkpoints")
    return [Path(getattr(callback, "dirpath", None) or beside) for callback in trainer.checkpoint_callbacks]


def _links_to_last(trainer: Trainer) -> str | None:
    """The link that a callback will make to what is saved now; empty before the first; ``None`` if none makes any."""
    paths = [
        getattr(callback, "last_model_path", "")
        for callback in trainer.checkpoint_callbacks
        if getattr(callback, "save_last", None) == "link"
    ]
    return max(paths, default=None)
