"""The strategy's part of a step: what Lightning calls for each batch, and around gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.layers.te_backend import make_weights, narrow_weights
from lightning_megatron.metrics import MetricSync
from lightning_megatron.optim.distributed import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy.checkpointing import CheckpointingStrategy
from lightning_megatron.strategy.combined import check_combined_batch
from lightning_megatron.strategy.epoch_names import EpochNames
from lightning_megatron.strategy.finishing import HandledOptimizer
from lightning_megatron.strategy.optimizers import ManualOptimization, configure_on_every_stage, drop, stage_parameters
from lightning_megatron.strategy.prepare import share_buffers
from lightning_megatron.strategy.same_batch import check_same_batch

_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")
# Hooks that run between the gradient norm and the clipping, or do the clipping.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


class SteppingStrategy(CheckpointingStrategy):
    """Turns Lightning's calls for a batch into runs of the schedule."""

    _micro_batch_size: int | None
    _num_microbatches: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizer_config = DistributedOptimizerConfig()
        self._metrics: MetricSync | None = None
        self._epoch_names: EpochNames | None = None
        self._manual: ManualOptimization | None = None
        self._accumulating = False
        # What the buffers hold: nothing, this rank's shares of gradients, or gradients that only wait for the step.
        self._gradients: Literal["none", "shares", "final"] = "none"
        self._batch_checked = False
        self._hides_gradients = False
        self._defers_scaling = False

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _precision(self) -> MegatronPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        return plugin

    @property
    def _names(self) -> EpochNames:
        trainer, names = self._module.trainer, self._epoch_names
        if names is None or names.trainer is not trainer or names.mesh is not self.mesh:
            self._epoch_names = names = EpochNames(trainer, self.mesh)
        return names

    # Optimizers

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        for distributed in self._distributed:
            distributed.close()
        self._reset_optimizers_and_schedulers()
        configure = super().setup_optimizers
        placeholder = configure_on_every_stage(lambda: configure(trainer), self._module, self.mesh)
        drop(placeholder, self.optimizers)
        self._steps.optimizers = [self._distributed_optimizer(optimizer) for optimizer in self.optimizers]
        self._steps.forget_tokens()
        self._gradients = "none"
        self._steps.scale_loss = self._precision.scale_loss
        self._precision.finishers = {
            id(d.optimizer): HandledOptimizer(d, self._finish_by_hand, whole_step=self._raw_step) for d in self._distributed
        }
        self._manual = None
        self._batch_checked = False
        self._hides_gradients = _overrides(_ZERO_GRAD_HOOKS, self._module, trainer)
        # On all ranks alike: a norm that is taken again takes all of them, and a callback may be on one rank alone.
        self._defers_scaling = self.reduce_boolean_decision(not _overrides(_GRADIENT_HOOKS, self._module, trainer))

    def _distributed_optimizer(self, optimizer: Optimizer) -> DistributedOptimizer:
        distributed = DistributedOptimizer(
            optimizer,
            self._ready.named_parameters(),
            mesh=self.mesh,
            config=self._optimizer_config,
            main_params=self._precision.main_params_in_fp32,
            stages=stage_parameters(self._module, self._ready.parts, self._ready._model),
            narrow=narrow_weights(self._module) if self._precision.fp8 is not None and self._precision.fp8.params else None,
        )
        distributed.wait_in_forwards(self._module)
        return distributed

    # Batches

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self._batch_checked:
            check_same_batch(args[0], self.mesh)
            self._batch_checked = True
        if self._manual is not None:
            self._wait_parameters()
            with self._precision.train_step_context():
                return self._module.training_step(*args, **kwargs)
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop
        backward = not loop.automatic_optimization._skip_backward
        if backward:
            self._begin_gradients(loop.batch_idx, accumulate=trainer.accumulate_grad_batches)
        self._check_combined(args[0], trainer.fit_loop._combined_loader)
        output: STEP_OUTPUT = self._steps.train(
            args,
            batch_number=loop.total_batch_idx,
            accumulate=trainer.accumulate_grad_batches,
            backward=backward,
            is_last=not self._accumulating,
        )
        if self._hides_gradients:
            for distributed in self._distributed:
                distributed.hide_gradients()
        return output

    def _begin_gradients(self, batch_idx: int, *, accumulate: int) -> None:
        """Drop what batches without a step have left, where Lightning zeroes gradients: here it does so after the backward.

        Raises:
            RuntimeError: gradients that are reduced and divided already would be added to.
        """
        before, self._gradients = self._gradients, "shares"
        is_first = batch_idx % accumulate == 0
        if before == "final" and (not is_first or is_overridden("optimizer_zero_grad", self._module)):
            raise RuntimeError(
                f"{self.mesh.coordinate} the closure of batch {batch_idx} is run although the gradients of one before are "
                f"reduced and have not been stepped with: only the first of accumulate_grad_batches={accumulate} drops them, "
                f"and only without an optimizer_zero_grad of the module's own. Step after each closure, or set "
                f"accumulate_grad_batches=1 and remove optimizer_zero_grad."
            )
        if before != "none" and is_first:
            self._steps.drop_gradients()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._check_combined(args[0], self._module.trainer._evaluation_loop._combined_loader)
        output: STEP_OUTPUT = self._steps.evaluate("validation_step", args)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._check_combined(args[0], self._module.trainer._evaluation_loop._combined_loader)
        output: STEP_OUTPUT = self._steps.evaluate("test_step", args)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate("predict_step", args, run=self._ready.predict_run)

    def _check_combined(self, batch: Any, loader: CombinedLoader | None) -> None:
        numbers = {"micro_batch_size": self._micro_batch_size, "num_microbatches": self._num_microbatches}
        check_combined_batch(batch, loader, self._module, mesh=self.mesh, **numbers)

    # Gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Fire the hooks; the schedule has run the backward. Gradients are final when ``on_after_backward`` is called."""
        if self._manual is not None:
            with self._manual.toggled():
                return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._hides_gradients:
            for distributed in self._distributed:
                distributed.show_gradients()
        closure_loss = self._precision.pre_backward(closure_loss, self._module)
        if not self._accumulating:
            self._steps.finish_gradients(loss_scale=self._precision.loss_scale, defer=self._defers_scaling)
            self._gradients = "final"
        return self._precision.post_backward(closure_loss, self._module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters this for batches whose optimizer step comes later: their gradients stay on this rank."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any) -> Any:
        distributed = next(d for d in self._distributed if d.optimizer is getattr(optimizer, "_optimizer", optimizer))

        def finished() -> Any:
            result = closure()
            self._finish_by_hand(distributed)
            return result

        result = super().optimizer_step(optimizer, finished, model, **kwargs)
        self._update_parameters(distributed)
        return result

    def _raw_step(self, distributed: DistributedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """``step`` of the torch optimizer that Lightning wraps: as there, without hooks and clipping."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._precision.take_step(self._precision.finishers[id(distributed.optimizer)], **kwargs)
        self._update_parameters(distributed)
        return result

    def _finish_by_hand(self, distributed: DistributedOptimizer) -> None:
        """Make gradients final in manual optimization, if they are not: nothing else says which backward was the last."""
        if self._manual is not None:
            self._manual.finish(distributed, loss_scale=self._precision.loss_scale)

    def _update_parameters(self, distributed: DistributedOptimizer) -> None:
        distributed.update_parameters()
        self._gradients = "none"
        if self._manual is not None:
            self._manual.cleared(distributed)
        if self.mesh.dp_cp.size == 1 and self._precision.fp8 is not None:  # else parameters are on their way beside the forward
            make_weights(self._module, distributed.parameters)

    # What can be logged

    def module_norms(self, depth: int = 1) -> dict[str, Tensor]:
        """Gradient norms of the last step before clipping, by the first ``depth`` parts of module names, the same on all ranks.

        All ranks call it together (0-dim tensors). It gathers names over the host: log it every few steps.
        """
        return {name: norm for distributed in self._distributed for name, norm in distributed.module_norms(depth).items()}

    def num_zero_gradients(self) -> int:
        """Elements of the gradient that are exactly zero. All ranks call it together, before the optimizer's step."""
        return sum(int(distributed.num_zero_gradients()) for distributed in self._distributed)

    @property
    def num_skipped_steps(self) -> int:
        """Steps that were not taken because a gradient was not finite, since the start of this ``fit``."""
        return sum(distributed.num_skipped for distributed in self._distributed)

    # Starts and ends of stages

    @override
    def on_train_start(self) -> None:
        self._take_metrics()
        wrappers = self._lightning_optimizers  # not in setup, after which Lightning makes them anew
        for distributed, wrapper in zip(self._distributed, wrappers, strict=True):
            wrapper.__dict__["add_param_group"] = distributed.add_param_group  # a wrapper does not ask what it wraps
        if not self._module.automatic_optimization:
            self._manual = ManualOptimization(self._module, self._distributed, wrappers=wrappers, mesh=self.mesh)
        self._gradients = "shares" if self._at_start else "none"  # those of a run that goes on between two steps
        self._names.begin_training()
        self._restore_at_start()
        self._watch_requeue()

    @override
    def on_train_end(self) -> None:
        self._names.end_training()
        for distributed in self._distributed:
            distributed.widen_parameters()

    @override
    def on_validation_start(self) -> None:
        self._before_evaluation()
        self._names.begin_evaluation()

    @override
    def on_test_start(self) -> None:
        self._before_evaluation()
        self._names.begin_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._names.end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._names.end_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._before_evaluation()
        self._ready.predict_run += 1

    def _before_evaluation(self) -> None:
        self._wait_parameters()
        self._take_metrics()
        share_buffers(self._module, self.mesh)

    def _take_metrics(self) -> None:
        """Take charge of metrics that a hook has made since ``setup``."""
        assert self._metrics is not None
        self._metrics.apply()


def _overrides(hooks: Sequence[str], module: LightningModule, trainer: Trainer) -> bool:
    """Whether the module or a callback has code of its own in one of these hooks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden(hook, callback) for callback in callbacks for hook in hooks if hasattr(Callback, hook)
    )
