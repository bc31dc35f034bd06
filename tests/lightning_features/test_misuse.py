"""What cannot work under a pipeline is refused by a message that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import run_distributed
from tests.lightning_features.harness import Net, Regression, Run, regression_data

TRAIN = regression_data(8, 1)


class CalledTwice(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.loss(batch)


class NotCalled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.zeros((), requires_grad=True)


class BareExcept(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self.loss(batch)
        except:  # noqa: E722
            return torch.zeros((), requires_grad=True)


class CatchesExceptions(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        try:
            return self.loss(batch)
        except Exception:
            raise AssertionError("the unwinding is not an Exception") from None


class ReturnsNone(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)


class ReturnsVector(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).squeeze(-1)


class NoLossInDict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"los": self.loss(batch)}


class CalledOutsideWithGradients(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])


class TrainsOutsideOfTheModel(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class PlainModel(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 1))


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Unowned(Net):
    def __init__(self) -> None:
        super().__init__(1)
        self.extra = nn.Linear(2, 2)


class HoldsUnowned(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = Unowned()


# What is said, and on how many of the two ranks it is raised for sure (the others may see a peer fail).
CASES: dict[type[Regression], str] = {
    CalledTwice: "training_step called the pipelined model 2 times",
    NotCalled: "training_step returned without calling the pipelined model",
    BareExcept: "A bare `except:`",
    ReturnsNone: "training_step must return a scalar loss",
    ReturnsVector: "it returned a tensor of shape",
    NoLossInDict: "a dict without 'loss'",
    CalledOutsideWithGradients: "Wrap the call in torch.no_grad(), on every rank",
    TrainsOutsideOfTheModel: "TrainsOutsideOfTheModel.scale is trained outside the PipelineModel",
    PlainModel: "to be a lightning_megatron.PipelineModel",
    ByHand: "uses manual optimization, which cannot be cut into pipeline stages (pp=2)",
    HoldsUnowned: "is used by neither first() nor last()",
}


def train(kind: Callable[[], Regression], folder: str) -> None:
    run = Run({"pp": 2, "micro_batch_size": 2}, folder, 2)
    run.trainer(max_epochs=1).fit(kind(), run.loader(TRAIN, 8))


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_misuse_is_named(kind: type[Regression], tmp_path: Any) -> None:
    with pytest.raises(AssertionError) as error:
        run_distributed(train, 2, kind, str(tmp_path))
    assert CASES[kind] in str(error.value)


def test_except_exception_does_not_see_the_unwinding(tmp_path: Any) -> None:
    run_distributed(train, 2, CatchesExceptions, str(tmp_path))


def test_a_second_trainer_of_another_layout_is_refused(tmp_path: Any) -> None:
    def run_it() -> str:
        run = Run({"pp": 2}, str(tmp_path), 2)
        module = Regression()
        run.trainer(max_epochs=1).fit(module, run.loader(TRAIN, 8))
        with pytest.raises(ValueError, match="has been cut by an earlier Trainer") as error:
            run.trainer(strategy=MegatronStrategy(), max_epochs=1).fit(module, run.loader(TRAIN, 8))
        return str(error.value)

    for message in run_distributed(run_it, 2):
        assert "for pp=2 on cpu" in message
        assert "under dp=2 on cpu" in message
