"""Hooks fire in Lightning's order with final gradients, and overrides of the user's mean what they mean on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch import Tensor, nn

from tests.lightning_features.harness import FEATURES, Regression, Run, Scenarios, net, on_ranks, regression_data

scenario = Scenarios(
    {
        "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
        "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    }
)
TRAIN, VAL = regression_data(22, 1), regression_data(14, 2)
HOOKS = [
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_model_zero_grad",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
]


def recording(kind: type[Any], calls: list[str]) -> type[Any]:
    """A subclass whose hooks note that they were called."""

    def noted(hook: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(hook)
            return getattr(super(recorder, self), hook)(*args, **kwargs)

        return call

    hooks = [hook for hook in HOOKS if hasattr(kind, hook)]
    recorder: type[Any] = type("Recorder", (kind,), {hook: noted(hook) for hook in hooks})
    return recorder


@scenario
def the_order_of_hooks(run: Run) -> Any:
    calls: list[str] = []
    by_callback: list[str] = []
    callback = recording(Callback, by_callback)()
    module = recording(Regression, calls)()
    loaders = run.loader(TRAIN, 8), run.loader(VAL, 8)
    run.fit(module, *loaders, max_epochs=2, accumulate_grad_batches=2, callbacks=[callback])
    return calls, by_callback


class Zeroes(Regression):
    """Zeroes by hand, where Lightning lets it: after the strategy has made the gradients."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad(set_to_none=batch_idx % 2 == 0)
        optimizer.zero_grad(set_to_none=False)


@scenario
def zero_grad_by_hand(run: Run) -> Any:
    class Hook(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for param in module.parameters():
                param.grad = None

    loaders = run.loader(TRAIN, 8), run.loader(VAL, 8)
    by_module = run.fit(Zeroes(), *loaders, max_epochs=2, accumulate_grad_batches=2)
    return by_module, run.fit(Regression(), *loaders, max_epochs=2, callbacks=[Hook()])


@scenario
def clipping_by_hand(run: Run) -> Any:
    class Clips(Regression):
        def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
            limit = 0.2 if self.global_step % 2 else 0.5
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")

    return run.fit(Clips(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)


@scenario
def a_step_of_the_users_own(run: Run) -> Any:
    class WarmsUp(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 4)
            optimizer.step(closure=optimizer_closure)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    return run.fit(WarmsUp(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)


@scenario
def extras_of_a_step(run: Run) -> Any:
    class Extras(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            prediction = self.model(batch[0]).squeeze(-1)
            loss = nn.functional.mse_loss(prediction, batch[1])
            return {"loss": loss, "prediction": prediction, "mean": prediction.mean()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.is_global_zero:  # which holds the last stage
                self.log("mean", outputs["mean"], rank_zero_only=True)
                assert outputs["prediction"].shape == batch[1].shape
            self.log("output", outputs["loss"], sync_dist=True)

    outcome = run.fit(Extras(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)
    return [seen["output"] for seen in outcome["batches"][1:]], outcome["parameters"]


@scenario
def the_accumulated_loss_is_reported_as_lightning_does(run: Run) -> Any:
    class Reports(Regression):
        def on_before_backward(self, loss: Tensor) -> None:
            self.log("before_backward", loss, sync_dist=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("at_end", outputs["loss"], sync_dist=True)

    callbacks = [GradientAccumulationScheduler({0: 2})]
    return run.fit(Reports(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2, callbacks=callbacks)


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_hooks_are_those_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    scenario.compare(name, layout, tmp_path_factory.getbasetemp() / "hooks")


def test_gradients_are_final_from_on_after_backward_on(tmp_path: Any) -> None:
    class Watches(Regression):
        def on_after_backward(self) -> None:
            self.gradients = {name: param.grad.clone() for name, param in self.named_parameters()}
            self.norm = float(self.trainer.strategy.grad_norm)

    def run_it(run: Run) -> Any:
        module = Watches()
        run.trainer(max_steps=1, gradient_clip_val=1e-3).fit(module, run.loader(TRAIN, 8))
        return module.gradients, module.norm

    model = net(1)
    x, y = TRAIN[:8]
    nn.functional.mse_loss(model(x).squeeze(-1), y).backward()
    expected = {f"model.{name}": param.grad for name, param in model.named_parameters()}
    norm = float(torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in expected.values()])))
    found: dict[str, Tensor] = {}
    for gradients, reported in on_ranks(run_it, 2, tmp_path, pp=2, micro_batch_size=3):
        assert reported == pytest.approx(norm, rel=1e-5)
        found |= gradients
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


class Adversarial(Regression):
    """Two optimizers by hand, one after the other; each backward reaches the parameters of both."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = net(1, layers=1)
        self.style = style

    def configure_optimizers(self) -> Any:
        model = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return [model, critic], [torch.optim.lr_scheduler.StepLR(model, 2, gamma=0.5)]

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        prediction = self.model(x).squeeze(-1)
        judged = self.critic(prediction[:, None].expand(-1, FEATURES)).squeeze(-1)
        return ((prediction - y) ** 2 - judged).mean(), ((judged - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if self.style == "zero_grad first":
                optimizer.zero_grad()
                self.manual_backward(self.losses(batch)[index])
                optimizer.step()
            elif self.style == "toggled":
                with self.toggled_optimizer(optimizer):
                    self.manual_backward(self.losses(batch)[index])
                    optimizer.step()
                    optimizer.zero_grad()
            else:

                def closure(optimizer: Any = optimizer, index: int = index) -> None:
                    optimizer.zero_grad()
                    self.manual_backward(self.losses(batch)[index])

                optimizer.step(closure=closure)
        self.lr_schedulers().step()
        self.log("train_loss", self.losses(batch)[0], on_step=True, on_epoch=True, sync_dist=True)


@pytest.mark.parametrize("style", ["zero_grad first", "toggled", "closure"])
def test_manual_optimization_with_two_optimizers_is_that_of_one_process(style: str, tmp_path: Any) -> None:
    by_hand = Scenarios({"dp2": (2, {})})

    @by_hand
    def run_it(run: Run) -> Any:
        return run.fit(Adversarial(style), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)

    by_hand.compare("run_it", "dp2", tmp_path)
