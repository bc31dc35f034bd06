"""An ordinary LightningModule, trained by a stock Trainer on one process and by the strategy under any layout."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.testing import run_distributed

FEATURES, CLASSES = 6, 3


class Block(nn.Module):
    def __init__(self, size: int, *, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.norm(self.linear(hidden))))


class Net(PipelineModel):
    """``[B, FEATURES] -> [B, outputs]``."""

    def __init__(self, outputs: int = CLASSES, *, layers: int = 4, size: int = 8, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, size)
        self.layers = nn.ModuleList(Block(size, **block) for _ in range(layers))
        self.head = nn.Linear(size, outputs)

    def first(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def last(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def net(outputs: int = CLASSES, **options: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net(outputs, **options)


class Regression(L.LightningModule):
    """Plain mean squared error with SGD; tests override what they are about."""

    def __init__(self, *, lr: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.lr = lr
        self.model = net(1, **options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).squeeze(-1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def regression_data(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(-1)) + 0.1 * torch.randn(samples, generator=generator))


class History(Callback):
    """What callbacks and loggers see, batch by batch and epoch by epoch."""

    def __init__(self) -> None:
        self.lrs: list[float] = []
        self.batches: list[dict[str, float]] = []
        self.steps: list[int] = []
        self.train: list[dict[str, float]] = []
        self.evaluated: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(_floats(trainer.callback_metrics))
        self.steps.append(trainer.global_step)
        self.lrs += [group["lr"] for group in trainer.optimizers[0].param_groups[:1]]

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.train.append(_floats(trainer.callback_metrics))

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluated.append(_floats(trainer.callback_metrics))

    on_test_end = on_validation_end


def _floats(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class Run:
    """One side of a comparison, handed to the function that a test runs on every rank."""

    def __init__(self, layout: dict[str, Any] | None, folder: str, world_size: int) -> None:
        self.layout, self.folder, self.world_size = layout, folder, world_size

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return 1 if self.layout is None else self.world_size // self.layout.get("pp", 1) // self.layout.get("tp", 1)

    def trainer(self, *callbacks: Callback, **options: Any) -> L.Trainer:
        defaults: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        defaults |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": self.folder}
        if self.layout is not None:
            defaults |= {"strategy": MegatronStrategy(**self.layout), "devices": self.world_size}
        return L.Trainer(callbacks=list(callbacks), **(defaults | options))

    def loader(self, data: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
        """A loader whose batches, put together over the replicas, hold ``batch_size`` samples."""
        assert batch_size % self.replicas == 0
        return DataLoader(data, batch_size=batch_size // self.replicas, **options)

    def summary(self, trainer: L.Trainer, module: L.LightningModule, history: History) -> dict[str, Any]:
        """What there is to compare after a run."""
        seen = {key: getattr(history, key) for key in ("lrs", "batches", "steps", "train", "evaluated")}
        progress = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        return {**seen, **progress, "logged": _floats(trainer.logged_metrics), "parameters": self.parameters(trainer, module)}

    def fit(self, module: L.LightningModule, train: Any, val: Any = None, **options: Any) -> dict[str, Any]:
        """Train by a new Trainer and summarize."""
        history = History()
        trainer = self.trainer(history, *options.pop("callbacks", ()), **options)
        trainer.fit(module, train, val)
        return self.summary(trainer, module, history)

    def parameters(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
        """The whole model's parameters; all ranks call it."""
        if isinstance(trainer.strategy, MegatronStrategy):
            return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}
        return {name: value.detach().clone() for name, value in module.state_dict().items()}


def one_process(fn: Callable[[Run], Any], folder: Any) -> Any:
    """What the function returns under a stock Trainer on one process."""
    run = Run(None, f"{folder}/one", 1)
    Path(run.folder).mkdir(parents=True, exist_ok=True)
    return run_distributed(fn, 1, run, init_process_group=False)[0]


def on_ranks(fn: Callable[[Run], Any], world_size: int, folder: Any, **layout: Any) -> list[Any]:
    """What the function returns on each rank under ``MegatronStrategy(**layout)``."""
    run = Run(layout, f"{folder}/ranks", world_size)
    Path(run.folder).mkdir(parents=True, exist_ok=True)
    return run_distributed(fn, world_size, run)


def assert_same(actual: Any, expected: Any, *, tolerance: float = 2e-5, where: str = "") -> None:
    """Compare nests of numbers, strings and tensors."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{where}: {sorted(actual)} instead of {sorted(expected)}"
        for key, value in expected.items():
            assert_same(actual[key], value, tolerance=tolerance, where=f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {actual} instead of {expected}"
        for index, value in enumerate(expected):
            assert_same(actual[index], value, tolerance=tolerance, where=f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert abs(actual - expected) <= tolerance * max(1.0, abs(expected)), f"{where}: {actual} instead of {expected}"
    else:
        assert actual == expected, f"{where}: {actual} instead of {expected}"


Scenario = Callable[[Run], Any]


@dataclass
class Failure:
    """A scenario that raised."""

    trace: str


class Scenarios:
    """Named functions that are run on one process and under layouts; all of them in one start of ranks, which is quick."""

    def __init__(self, layouts: dict[str, tuple[int, dict[str, Any]]]) -> None:
        self.layouts = layouts
        self._functions: dict[str, Scenario] = {}
        self._results: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, function: Scenario) -> Scenario:
        """Decorator: adds a scenario."""
        self._functions[function.__name__] = function
        return function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def compare(self, name: str, layout: str, folder: Any, **options: Any) -> None:
        """Compare one scenario on every rank of a layout with one process."""
        for key in ("one", layout):
            if key not in self._results:
                self._results[key] = self._run(key, f"{folder}/{key}")
        expected = self._results["one"][0][name]
        assert not isinstance(expected, Failure), expected.trace
        for outcome in self._results[layout]:
            assert not isinstance(outcome[name], Failure), outcome[name].trace
            assert_same(outcome[name], expected, **options)

    def _run(self, key: str, folder: str) -> list[dict[str, Any]]:
        if key == "one":
            return [one_process(self._all, folder)]
        world_size, options = self.layouts[key]
        return on_ranks(self._all, world_size, folder, **options)

    def _all(self, run: Run) -> dict[str, Any]:
        outcomes = {}
        for name, function in self._functions.items():
            try:
                outcomes[name] = function(run)
            except Exception:
                outcomes[name] = Failure(traceback.format_exc())
        return outcomes
