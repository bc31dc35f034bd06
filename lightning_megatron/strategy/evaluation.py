"""What is done around evaluation, and with Python's garbage, in hooks that Lightning calls behind those of users."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_megatron.layers.te_backend import scales_of
from lightning_megatron.strategy.garbage import GarbageCollection
from lightning_megatron.strategy.steps import SteppingStrategy


class EvaluatingStrategy(SteppingStrategy):
    """Evaluation may be of other weights: callbacks put averages in their place, by ways that leave no trace."""

    _garbage: GarbageCollection

    def _weights_may_have_changed(self) -> None:
        if self.lightning_module is not None:
            for scales in scales_of(self.lightning_module):
                scales.weights_changed()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._weights_may_have_changed()
        self._garbage.start()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._garbage.step(self._module.trainer.global_step)

    @override
    def on_validation_start(self) -> None:
        self._garbage.pause()
        super().on_validation_start()
        self._weights_may_have_changed()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._weights_may_have_changed()
        self._garbage.resume()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._weights_may_have_changed()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._weights_may_have_changed()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._weights_may_have_changed()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._weights_may_have_changed()
