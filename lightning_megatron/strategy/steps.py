"""The strategy's part of a step: what Lightning calls for each batch, and around gradients and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.metrics import MetricSync
from lightning_megatron.optim.distributed import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.precision import MegatronPrecision
from lightning_megatron.strategy.checkpointing import CheckpointingStrategy
from lightning_megatron.strategy.optimizers import ManualOptimization, configure_on_every_stage, drop
from lightning_megatron.strategy.prepare import share_buffers
from lightning_megatron.strategy.same_batch import check_same_batch

_ZERO_GRAD_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad")


class SteppingStrategy(CheckpointingStrategy):
    """Turns Lightning's calls for a batch into runs of the schedule."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizer_config = DistributedOptimizerConfig()
        self._metrics: MetricSync | None = None
        self._manual: ManualOptimization | None = None
        self._accumulating = False
        self._batch_checked = False
        self._hides_gradients = False

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _precision(self) -> MegatronPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, MegatronPrecision)
        return plugin

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
        self._precision.clippers = {id(d.optimizer): d for d in self._distributed}
        self._manual = None
        self._batch_checked = False
        self._hides_gradients = _zeroes_by_hand(self._module, trainer)

    def _distributed_optimizer(self, optimizer: Optimizer) -> DistributedOptimizer:
        return DistributedOptimizer(
            optimizer,
            self._ready.named_parameters(),
            mesh=self.mesh,
            config=self._optimizer_config,
            main_params=self._precision.main_params_in_fp32,
        )

    # Batches

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self._batch_checked:
            check_same_batch(args[0], self.mesh)
            self._batch_checked = True
        if self._manual is not None:
            with self._precision.train_step_context():
                return self._module.training_step(*args, **kwargs)
        trainer = self._module.trainer
        loop = trainer.fit_loop.epoch_loop
        output: STEP_OUTPUT = self._steps.train(
            args,
            batch_number=loop.total_batch_idx,
            accumulate=trainer.accumulate_grad_batches,
            backward=not loop.automatic_optimization._skip_backward,
        )
        if self._hides_gradients:
            for distributed in self._distributed:
                distributed.hide_gradients()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._steps.evaluate("validation_step", args)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        output: STEP_OUTPUT = self._steps.evaluate("test_step", args)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._steps.evaluate("predict_step", args)

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
            self._steps.finish_gradients()
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
            if self._manual is not None:
                self._manual.finish(distributed)
            return result

        result = super().optimizer_step(optimizer, finished, model, **kwargs)
        distributed.update_parameters()
        return result

    # Starts of stages

    @override
    def on_train_start(self) -> None:
        self._take_metrics()
        if not self._module.automatic_optimization:  # not in setup, after which Lightning makes its wrappers anew
            wrappers = self._lightning_optimizers
            self._manual = ManualOptimization(self._module, self._distributed, wrappers=wrappers, mesh=self.mesh)

    @override
    def on_validation_start(self) -> None:
        self._before_evaluation()

    @override
    def on_test_start(self) -> None:
        self._before_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._before_evaluation()

    def _before_evaluation(self) -> None:
        self._take_metrics()
        share_buffers(self._module, self.mesh)

    def _take_metrics(self) -> None:
        """Take charge of metrics that a hook has made since ``setup``."""
        assert self._metrics is not None
        self._metrics.apply()


def _zeroes_by_hand(module: LightningModule, trainer: Trainer) -> bool:
    """Whether code of the user's runs where Lightning zeroes gradients, which is after the schedule has made them."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(hook, module) for hook in _ZERO_GRAD_HOOKS) or any(
        is_overridden("on_before_zero_grad", callback) for callback in callbacks
    )
