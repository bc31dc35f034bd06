"""Values of an epoch are right whatever names the replicas log, and in whatever order."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from tests.lightning_features.harness import (
    History,
    Regression,
    Run,
    Scenarios,
    assert_same,
    on_ranks,
    one_process,
    regression_data,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"dp2": (2, {}), "pp2 dp2": (4, {"pp": 2})}
scenario = Scenarios(LAYOUTS)
TRAIN, VAL = regression_data(24, 1), regression_data(16, 2)


class Kinds(Dataset[Any]):
    """Samples of several kinds. Two replicas of batch size 1 meet them in another order."""

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> Any:
        return *TRAIN[index], ord(self.kinds[index])


def kinds_loader(run: Run, kinds: str) -> DataLoader[Any]:
    return DataLoader(Kinds(kinds), 1)  # also in one process: a step logs by its only sample


class ByKind(Regression):
    """Logs under the kind of the sample. Learns nothing, so that one process may take steps of one sample."""

    def __init__(self) -> None:
        super().__init__(lr=0.0)
        self.counts = torch.nn.ModuleDict({kind: SumMetric() for kind in "abcd"})

    def by_kind(self, batch: Any, prefix: str, **options: Any) -> Tensor:
        loss, kind = self.loss(batch), chr(int(batch[2][0]))
        self.log(f"{prefix}_mean_{kind}", loss, **options)
        self.log(f"{prefix}_weighted_{kind}", loss, batch_size=1 + ord(kind) % 3, **options)
        self.log(f"{prefix}_sum_{kind}", loss.double(), reduce_fx="sum", **options)
        self.log(f"{prefix}_max_{kind}", loss, reduce_fx=max, **options)
        self.log(f"{prefix}_min_{kind}", loss, reduce_fx="min", **options)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.by_kind(batch, "train", on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.by_kind(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.by_kind(batch, "test", on_step=True, on_epoch=True)


@scenario
def names_in_another_order_and_on_one_replica_only(run: Run) -> Any:
    history, module = History(), ByKind()
    trainer = run.trainer(history, max_epochs=2)
    callbacks = list(trainer.callbacks)
    trainer.fit(module, kinds_loader(run, "abbaccdcdddd"), kinds_loader(run, "baabcdcd"))
    tested = [trainer.test(module, kinds_loader(run, kinds), verbose=False) for kinds in ("abab", "abcc", "abba")]
    assert trainer.callbacks == callbacks
    epochs = [{name: value for name, value in seen.items() if "step" not in name} for seen in history.train + history.evaluated]
    return epochs, tested


@scenario
def several_loaders_that_hold_other_kinds(run: Run) -> Any:
    loaders = [kinds_loader(run, kinds) for kinds in ("abba", "cdcc", "bbbb")]
    return run.trainer().validate(ByKind(), loaders, verbose=False)


@scenario
def a_name_that_comes_and_goes_with_the_epoch(run: Run) -> Any:
    class Sometimes(ByKind):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, is_a = self.loss(batch), chr(int(batch[2][0])) == "a"
            if is_a != (self.current_epoch == 2) and self.current_epoch != 1:
                self.log("now_and_then", loss, on_step=False, on_epoch=True)
            return loss

    history = History()
    run.trainer(history, max_epochs=4).fit(Sometimes(), kinds_loader(run, "abababab"))
    return history.train


@scenario
def metric_objects_in_another_order(run: Run) -> Any:
    class Measured(ByKind):
        def __init__(self) -> None:
            super().__init__()
            self.means = torch.nn.ModuleDict({kind: MeanMetric() for kind in "ab"})

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss, kind = self.loss(batch), chr(int(batch[2][0]))
            self.means[kind].update(loss)
            self.log(f"metric_{kind}", self.means[kind])
            self.log(f"value_{kind}", loss)

    return run.trainer().validate(Measured(), kinds_loader(run, "abba"), verbose=False)


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_names_of_an_epoch_are_those_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    scenario.compare(name, layout, tmp_path_factory.mktemp("names"))


class Stream(IterableDataset[Any]):
    """Of which replica r has ``numbers[r]`` samples."""

    def __init__(self, run: Run, numbers: tuple[int, int]) -> None:
        self.run, self.numbers, self.trainer = run, numbers, None

    def __iter__(self) -> Any:
        first, second = self.numbers
        if self.run.layout is None:
            yield from (VAL[i] for i in range(first + second))
        else:
            yield from (VAL[i] for i in (range(first) if self.trainer.strategy.dp_rank == 0 else range(first, first + second)))


@pytest.mark.parametrize(("numbers", "on_step"), [((12, 4), True), ((8, 0), False), ((0, 8), True)])
def test_replicas_may_evaluate_unequal_numbers_of_batches(numbers: tuple[int, int], on_step: bool, tmp_path: Any) -> None:
    class Logs(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), on_step=on_step, on_epoch=True)

    def run_it(run: Run) -> Any:
        stream, history = Stream(run, numbers), History()
        stream.trainer = trainer = run.trainer(history, max_epochs=2)
        trainer.fit(Logs(), run.loader(TRAIN, 8), DataLoader(stream, 4))
        name = "val_loss_epoch" if on_step else "val_loss"
        return [epoch[name] for epoch in history.evaluated]

    expected = one_process(run_it, tmp_path)
    for layout in (world_and_layout for world_and_layout in LAYOUTS.values()):
        for values in on_ranks(run_it, layout[0], tmp_path, **layout[1]):
            assert_same(values, expected)


def test_a_replica_without_a_batch_of_one_of_several_loaders_is_told(tmp_path: Any) -> None:
    class Logs(Regression):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    def run_it(run: Run) -> str:
        streams = [Stream(run, (8, 0)), Stream(run, (4, 4))]
        trainer = run.trainer()
        for stream in streams:
            stream.trainer = trainer
        with pytest.raises(RuntimeError, match="different data loaders") as error:
            trainer.validate(Logs(), [DataLoader(stream, 4) for stream in streams], verbose=False)
        return str(error.value)

    for message in on_ranks(run_it, 2, tmp_path):
        assert "Each replica needs at least one batch" in message


def test_ranks_that_look_at_values_alone_wait_for_nobody(tmp_path: Any) -> None:
    class Looks(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                assert "val_loss" in trainer.callback_metrics

        def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.is_global_zero:
                dict(trainer.callback_metrics)

    class Gathers(Regression):
        def on_train_epoch_end(self) -> None:
            assert self.all_gather(torch.ones(())).sum().item() == 2.0

        def on_validation_epoch_start(self) -> None:
            assert self.all_gather(torch.ones(())).sum().item() == 2.0

    def run_it(run: Run) -> Any:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            trainer = run.trainer(Looks(), TQDMProgressBar(), max_epochs=2, enable_progress_bar=True)
            module = Gathers()
            trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8))
            return [trainer.validate(module, run.loader(VAL, 8), verbose=False) for _ in range(2)]

    for first, second in on_ranks(run_it, 2, tmp_path):
        assert first == second
