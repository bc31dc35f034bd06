"""What is logged, wherever and however, is what one process would have logged, on every rank."""

from __future__ import annotations

import csv
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.lightning_features.harness import History, Regression, Run, Scenarios, on_ranks, regression_data

scenario = Scenarios(
    {
        "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
        "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    }
)
TRAIN, VAL = regression_data(24, 1), regression_data(16, 2)


@scenario
def every_reduction_by_step_and_epoch(run: Run) -> Any:
    class Logs(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            both = {"on_step": True, "on_epoch": True, "sync_dist": True}
            self.log("before", x.mean(), **both)
            error = (self.model(x).squeeze(-1) - y).abs()
            self.log("mean", error.mean(), **both)
            self.log("sum", error.sum(), reduce_fx="sum", **both)
            self.log("largest", error.max(), reduce_fx=max, prog_bar=True, **both)
            self.log("least", error.min(), reduce_fx=torch.min, logger=False, **both)
            self.log("number", 3, sync_dist=True)
            self.log_dict({"a": error.mean(), "b": 2.0 * error.mean()}, on_step=False, on_epoch=True)
            return error.mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            error = (self.model(x).squeeze(-1) - y).abs()
            self.log("val_sum", error.sum(), reduce_fx="sum")
            self.log("val_largest", error.max(), reduce_fx="max")
            self.log("val_steps", error.mean(), on_step=True, on_epoch=True, sync_dist=True)
            self.log("val_loss", error.mean())

    return run.fit(Logs(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2)


@scenario
def a_weight_of_the_users(run: Run) -> Any:
    class Weighted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            kept = x[:, 0] > -0.5
            error = (self.model(x).squeeze(-1) - y).square()
            mean = error[kept].mean() if kept.any() else error.new_zeros(())
            self.log("kept", mean, batch_size=int(kept.sum()), on_step=False, on_epoch=True)
            return error.mean()

    outcome = run.fit(Weighted(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=1)
    return outcome["train"], outcome["parameters"]


@scenario
def metrics_of_every_kind(run: Run) -> Any:
    class Measured(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mae = MeanAbsoluteError()
            self.several = MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}, prefix="val_")
            self.samples = SumMetric()
            self.by_epoch = MeanSquaredError()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.samples.update(float(len(x)))  # before the model call, which some stages come to twice
            prediction = self.model(x).squeeze(-1)
            self.mae.update(prediction, y)
            self.by_epoch.update(prediction, y)
            self.log("mae", self.mae, on_step=False, on_epoch=True)
            self.log("samples", self.samples, on_step=False, on_epoch=True)
            return torch.nn.functional.mse_loss(prediction, y)

        def on_train_epoch_end(self) -> None:
            self.log("by_epoch", self.by_epoch.compute())
            self.by_epoch.reset()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.several.update(self.model(batch[0]).squeeze(-1), batch[1])
            self.log_dict(self.several)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict(self.several(self.model(batch[0]).squeeze(-1), batch[1]), on_step=False, on_epoch=True)

    module, history = Measured(), History()
    trainer = run.trainer(history, max_epochs=2)
    trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8))
    again = run.trainer().validate(module, run.loader(VAL, 8), verbose=False)
    return run.summary(trainer, module, history), again


@scenario
def logging_from_hooks(run: Run) -> Any:
    class Hooks(Regression):
        def on_train_start(self) -> None:
            self.log("start", 1.0)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("lr", optimizer.param_groups[0]["lr"])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("output", outputs["loss"], on_epoch=True, sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("epoch_seen", float(self.current_epoch))

        def on_validation_epoch_end(self) -> None:
            self.log("val_done", float(self.global_step))

    class Logs(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.log("from_callback", float(trainer.global_step))

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("callback_epoch", float(trainer.current_epoch))

    return run.fit(Hooks(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2, callbacks=[Logs()])


def table(folder: str) -> list[dict[str, float]]:
    path = Path(folder, "logs", "version_0", "metrics.csv")
    rows = list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else []
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


@scenario
def what_loggers_write(run: Run) -> Any:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            groups = [
                {"params": [p for p in self.parameters() if p.dim() > 1], "lr": 0.1, "name": "matrices"},
                {"params": [p for p in self.parameters() if p.dim() <= 1], "lr": 0.05, "name": "vectors"},
            ]
            optimizer = torch.optim.SGD(groups, momentum=0.9)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    monitor = LearningRateMonitor("step", log_momentum=True)
    options = {"logger": CSVLogger(run.folder, "logs"), "log_every_n_steps": 2, "callbacks": [monitor]}
    run.fit(Scheduled(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=3, **options)
    return table(run.folder)


@scenario
def the_rate_of_an_optimizer_without_a_schedule(run: Run) -> Any:
    Path(run.folder, "plain").mkdir(exist_ok=True)
    options = {"logger": CSVLogger(f"{run.folder}/plain", "logs"), "log_every_n_steps": 1}
    options |= {"callbacks": [LearningRateMonitor("epoch")]}
    run.fit(Regression(), run.loader(TRAIN, 8), max_epochs=2, **options)
    return table(f"{run.folder}/plain")


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_logs_are_those_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    scenario.compare(name, layout, tmp_path_factory.mktemp("logging"))


def test_a_value_kept_for_the_epoch_is_that_of_all_replicas_without_being_asked(tmp_path: Any) -> None:
    class Plain(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

    ranks = on_ranks(lambda run: run.fit(Plain(), run.loader(TRAIN, 8), run.loader(VAL, 8), max_epochs=2), 4, tmp_path, pp=2)
    for outcome in ranks[1:]:
        assert outcome["train"] == ranks[0]["train"]
        assert outcome["evaluated"] == ranks[0]["evaluated"]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_and_summaries_show_the_values_of_the_last_stage(bar: type[Callback], tmp_path: Any) -> None:
    class Shown(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("shown", loss, prog_bar=True)
            return loss

    def run_it(run: Run) -> dict[str, float]:
        summary = ModelSummary(2) if bar is TQDMProgressBar else RichModelSummary(2)
        module = Shown()
        with redirect_stdout(io.StringIO()):
            callbacks = [bar(), summary, Timer(), ModelCheckpoint(run.folder)]
            options = {"enable_progress_bar": True, "enable_model_summary": True, "enable_checkpointing": True}
            trainer = run.trainer(*callbacks, max_epochs=1, logger=CSVLogger(run.folder), log_every_n_steps=1, **options)
            trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8))
            trainer.test(module, run.loader(VAL, 8))
            trainer.predict(module, run.loader(VAL, 8))
        return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}

    ranks = on_ranks(run_it, 2, tmp_path, pp=2)
    assert ranks[0] == ranks[1]
