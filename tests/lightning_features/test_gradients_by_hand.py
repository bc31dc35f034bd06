"""Steps and gradients that the user's own code takes into its hands mean what they mean on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.optim import DistributedOptimizerConfig
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


@by_hand
def the_torch_optimizer_itself(run: Run) -> Any:
    class Raw(ByHand):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise AssertionError("Lightning does not know of such a step")

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss.detach()

            if batch_idx % 2:
                assert float(optimizer.step(closure)) > 0.0
            else:
                closure()
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                optimizer.step()
            self.lr_schedulers().step()

    return trained(run, Raw(), max_epochs=2)


@pytest.mark.parametrize("layout", by_hand.layouts)
@pytest.mark.parametrize("name", by_hand.names)
def test_manual_optimization_is_that_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    by_hand.compare(name, layout, tmp_path_factory.getbasetemp() / "by_hand")


automatic = Scenarios(
    {
        "dp2": (2, {}),
        "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
        "dp2 fused": (2, {"optimizer": DistributedOptimizerConfig(fused_adam=True)}),
    }
)


class Decays(Regression):
    """Adam, whose moments and decay move also what has a gradient of zero."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


@automatic
def a_step_of_the_torch_optimizer_itself(run: Run) -> Any:
    class Steps(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer.optimizer.step(optimizer_closure)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return trained(run, Steps(), max_epochs=2)


@automatic
def gradients_taken_away(run: Run) -> Any:
    class Freezes(Decays):
        def on_after_backward(self) -> None:
            if self.global_step in (0, 3, 4):
                for param in self.model.head.parameters():
                    param.grad = None

    return trained(run, Freezes(), max_epochs=2), trained(run, Freezes(), max_epochs=2, gradient_clip_val=0.1)


@automatic
def gradients_in_place_of_others(run: Run) -> Any:
    class Replaces(Decays):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.model.embed.parameters():
                param.grad = param.grad * 0.01
            for param in self.model.head.parameters():  # none on the first stage
                param.grad = None if self.global_step == 2 else param.grad.clone() * 5.0

    return trained(run, Replaces(), max_epochs=2), trained(run, Replaces(), max_epochs=2, gradient_clip_val=0.1)


@automatic
def gradients_changed_before_clipping(run: Run) -> Any:
    class Scales(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.parameters():
                param.grad.mul_(0.001)

    return trained(run, Scales(lr=1.0), gradient_clip_val=1e-3)


@automatic
def clipping_twice(run: Run) -> Any:
    class Clips(Regression):
        def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
            for algorithm, value in (("value", 0.02), ("norm", 0.05), ("norm", 0.03)):
                self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

    return trained(run, Clips(lr=1.0))


@automatic
def closures_without_a_step(run: Run) -> Any:
    class Waits(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 3 == 1:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    return trained(run, Waits(), max_epochs=2)


@automatic
def two_closures_a_step(run: Run) -> Any:
    class Beside(Regression):
        """The gradient is that of a place beside the weights, as in sharpness-aware minimization."""

        @torch.no_grad()
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            before = [param.clone() for param in self.parameters()]
            for param in self.parameters():
                param.mul_(1.05)
            optimizer_closure()
            for param, value in zip(self.parameters(), before, strict=True):
                param.copy_(value)
            optimizer.step()

    return trained(run, Beside(), max_epochs=2, gradient_clip_val=0.5)


class Counted(Regression):
    """Whose loss says how many samples it is the mean of; it ends a run in the middle of an accumulation window."""

    stops = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "num_tokens": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.stops:
            self.trainer.should_stop = True


@automatic
def an_epoch_that_ends_in_a_window(run: Run) -> Any:
    def ends(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    results = []
    for kind in (Regression, Counted):
        cut_off: Any = type("CutOff", (kind,), {"on_train_batch_start": ends})
        results.append(trained(run, cut_off(lr=0.5), max_epochs=2, accumulate_grad_batches=2))
    return results


@automatic
def a_run_that_stops_in_a_window_and_goes_on(run: Run) -> Any:
    module, trainer = Counted(lr=0.5), run.trainer(max_epochs=1, accumulate_grad_batches=2)
    module.stops = True
    trainer.fit(module, run.loader(TRAIN, 8))
    module.stops = trainer.should_stop = False
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.loader(TRAIN, 8))
    return run.parameters(trainer, module), trainer.global_step


@pytest.mark.parametrize("layout", automatic.layouts)
@pytest.mark.parametrize("name", automatic.names)
def test_automatic_optimization_is_that_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    automatic.compare(name, layout, tmp_path_factory.getbasetemp() / "automatic")


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


def test_hooks_change_the_gradients_of_16_bit_parameters_too(tmp_path: Any) -> None:
    class Zeroes(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for param in self.model.head.parameters():
                param.grad.zero_()

    def run_it(run: Run) -> tuple[bool, bool]:
        module = Zeroes()
        before = {name: value.bfloat16() for name, value in module.state_dict().items()}
        trainer = run.trainer(max_steps=2, precision="bf16-true")
        trainer.fit(module, run.loader(TRAIN, 8))
        after = run.parameters(trainer, module)
        return tuple(torch.equal(after[name], before[name]) for name in ("model.head.weight", "model.embed.weight"))

    assert on_ranks(run_it, 2, tmp_path) == [(True, False)] * 2


class ZeroesItself(Regression):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "accumulate"), [(Regression, 2), (ZeroesItself, 1)])
def test_closures_that_would_add_to_reduced_gradients_are_refused(kind: Any, accumulate: int, tmp_path: Any) -> None:
    class Twice(kind):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            optimizer_closure()
            optimizer_closure()

    def run_it(run: Run) -> None:
        with pytest.raises(RuntimeError, match=f"only the first of accumulate_grad_batches={accumulate} drops them"):
            trained(run, Twice(), accumulate_grad_batches=accumulate)

    on_ranks(run_it, 2, tmp_path)
