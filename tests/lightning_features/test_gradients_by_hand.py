"""Steps and gradients that the user's own code takes into its hands mean what they mean on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lightning_features.harness import Regression, Run, Scenarios, on_ranks, regression_data

TRAIN = regression_data(32, 1)
by_hand = Scenarios({"one rank": (1, {}), "dp2": (2, {})})


class ByHand(Regression):
    """Manual optimization that notes how far each step goes."""

    def __init__(self, *, lr: float = 1.0) -> None:
        super().__init__(lr=lr)
        self.automatic_optimization = False
        self.lengths: list[float] = []

    def values(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.parameters()]).clone()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.values()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lengths.append(float((self.values() - self.before).norm()))


def trained(run: Run, module: Any, **options: Any) -> Any:
    """Parameters after training, with what the module has noted."""
    trainer = run.trainer(**({"max_epochs": 1} | options))
    trainer.fit(module, run.loader(TRAIN, 8))
    return run.parameters(trainer, module), getattr(module, "lengths", None), trainer.global_step


@by_hand
def clipping_by_norm(run: Run) -> Any:
    class Clips(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            if batch_idx != 1:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()

    return trained(run, Clips())


@by_hand
def clipping_by_value_in_a_closure(run: Run) -> Any:
    class Clips(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> None:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")

            optimizer.step(closure=closure)

    return trained(run, Clips())


@by_hand
def clipping_without_a_step(run: Run) -> Any:
    class Clips(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            if batch_idx % 2:
                optimizer.step()

    return trained(run, Clips())


@pytest.mark.parametrize("layout", by_hand.layouts)
@pytest.mark.parametrize("name", by_hand.names)
def test_manual_optimization_is_that_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    by_hand.compare(name, layout, tmp_path_factory.getbasetemp() / "by_hand")


def test_a_backward_after_clipping_is_refused(tmp_path: Any) -> None:
    class Adds(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            with pytest.raises(RuntimeError, match="after the last manual_backward of a step"):
                self.manual_backward(self.loss(batch))
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    steps = on_ranks(lambda run: trained(run, Adds(lr=0.01))[2], 2, tmp_path)
    assert steps == [4, 4]
