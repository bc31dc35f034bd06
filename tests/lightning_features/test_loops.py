"""Options of the Trainer's loops mean the same under the strategy as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.lightning_features.harness import History, Regression, Run, Scenarios, regression_data

scenario = Scenarios(
    {
        "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    }
)
TRAIN, VAL = regression_data(22, 1), regression_data(14, 2)  # the last batches of 8 are short


class Momentum(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def fit(run: Run, **options: Any) -> dict[str, Any]:
    return run.fit(Momentum(lr=0.02), run.loader(TRAIN, 8), run.loader(VAL, 8), **options)


@scenario
def fast_dev_run(run: Run) -> Any:
    return fit(run, fast_dev_run=2)


@scenario
def overfit_batches_turns_shuffling_off(run: Run) -> Any:
    return run.fit(Momentum(), run.loader(TRAIN, 8, shuffle=True), run.loader(TRAIN, 8), overfit_batches=1, max_epochs=3)


@scenario
def limits_as_numbers_of_batches(run: Run) -> Any:
    return fit(run, limit_train_batches=2, limit_val_batches=1, max_epochs=2)


@scenario
def limits_as_shares(run: Run) -> Any:
    return fit(run, limit_train_batches=0.7, limit_val_batches=0.5, max_epochs=2)


@scenario
def no_validation(run: Run) -> Any:
    return fit(run, limit_val_batches=0, max_epochs=2, num_sanity_val_steps=0)


@scenario
def max_steps_within_an_epoch(run: Run) -> Any:
    return fit(run, max_steps=4)


@scenario
def validation_within_an_epoch(run: Run) -> Any:
    return fit(run, val_check_interval=2, max_epochs=2)


@scenario
def validation_after_a_share_of_an_epoch(run: Run) -> Any:
    return fit(run, val_check_interval=0.34, max_epochs=2)


@scenario
def validation_every_other_epoch(run: Run) -> Any:
    return fit(run, check_val_every_n_epoch=2, max_epochs=4)


@scenario
def validation_by_batches_over_epochs(run: Run) -> Any:
    return fit(run, check_val_every_n_epoch=None, val_check_interval=4, max_epochs=3)


@scenario
def accumulation_with_an_odd_tail_and_clipping(run: Run) -> Any:
    return fit(run, accumulate_grad_batches=2, gradient_clip_val=0.3, max_epochs=2)


@scenario
def accumulation_by_epoch(run: Run) -> Any:
    return fit(run, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 3: 3})], max_epochs=4)


@scenario
def clipping_by_value(run: Run) -> Any:
    return fit(run, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_epochs=2)


@scenario
def fit_again_with_more_epochs(run: Run) -> Any:
    history = History()
    trainer, module = run.trainer(history, max_epochs=1), Momentum()
    trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8))
    return run.summary(trainer, module, history)


@scenario
def two_trainers_after_one_another(run: Run) -> Any:
    module = Momentum()
    first = run.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=1)
    second = run.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)
    history = History()
    trainer = run.trainer(history)
    tested = trainer.test(module, run.loader(VAL, 8), verbose=False)
    return first, second, tested


@scenario
def one_trainer_with_two_modules(run: Run) -> Any:
    history = History()
    trainer = run.trainer(history, max_epochs=1)
    trainer.fit(Momentum(), run.loader(TRAIN, 8))
    trainer.fit_loop.max_epochs = 2
    module = Momentum(lr=0.05)
    trainer.fit(module, run.loader(TRAIN, 8))
    return run.summary(trainer, module, history)


@scenario
def evaluation_without_training(run: Run) -> Any:
    module = Regression()
    validated = run.trainer().validate(module, run.loader(VAL, 8), verbose=False)
    tested = run.trainer(limit_test_batches=1).test(module, run.loader(VAL, 8), verbose=False)
    trainer = run.trainer()
    return validated, tested, trainer.validate(module, run.loader(VAL, 4), verbose=False)


@scenario
def evaluation_before_and_after_training(run: Run) -> Any:
    history = History()
    trainer, module = run.trainer(history, max_epochs=1), Momentum()
    before = trainer.validate(module, run.loader(VAL, 8), verbose=False)
    trainer.fit(module, run.loader(TRAIN, 8))
    after = trainer.validate(module, run.loader(VAL, 8), verbose=False)
    return before, after, run.summary(trainer, module, history)


@scenario
def stopping_by_hand(run: Run) -> Any:
    class Stops(Momentum):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 4:
                self.trainer.should_stop = True

    return run.fit(Stops(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=5)


@scenario
def loaders_anew_each_epoch(run: Run) -> Any:
    class Reloads(Momentum):
        def train_dataloader(self) -> Any:
            return run.loader(regression_data(16, self.current_epoch), 8)

        def val_dataloader(self) -> Any:
            return run.loader(VAL, 8)

    return run.fit(Reloads(), None, max_epochs=3, reload_dataloaders_every_n_epochs=1)


@scenario
def a_datamodule(run: Run) -> Any:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return run.loader(TRAIN, 8)

        def val_dataloader(self) -> Any:
            return run.loader(VAL, 8)

    return run.fit(Momentum(), Data(), max_epochs=2)


@scenario
def an_optimizer_is_not_needed(run: Run) -> Any:
    class Untrained(Regression):
        def configure_optimizers(self) -> Any:
            return None

    return run.fit(Untrained(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=1)


@scenario
def estimated_steps(run: Run) -> Any:
    class Estimates(Momentum):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Estimates()
    outcome = run.fit(module, run.loader(TRAIN, 8), max_epochs=3, accumulate_grad_batches=2)
    return outcome, module.estimate


class Scheduled(Regression):
    def __init__(self, schedule: Any) -> None:
        super().__init__(lr=0.05)
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


@scenario
def a_schedule_by_step(run: Run) -> Any:
    def schedule(optimizer: Any) -> Any:
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        return {"scheduler": cycle, "interval": "step"}

    loaders = run.loader(TRAIN, 8), run.loader(VAL, 8)
    return run.fit(Scheduled(schedule), *loaders, max_epochs=2)


@scenario
def a_schedule_by_epoch_under_accumulation(run: Run) -> Any:
    loaders = run.loader(TRAIN, 8), run.loader(VAL, 8)
    module = Scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    return run.fit(module, *loaders, max_epochs=3, accumulate_grad_batches=2)


@scenario
def a_plateau_schedule_by_step_on_a_training_value(run: Run) -> Any:
    def schedule(optimizer: Any) -> Any:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": plateau, "interval": "step", "frequency": 2, "monitor": "train_loss"}

    return run.fit(Scheduled(schedule), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=3)


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_the_loop_is_that_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    scenario.compare(name, layout, tmp_path_factory.getbasetemp() / "loops")
