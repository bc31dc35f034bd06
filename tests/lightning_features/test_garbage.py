"""Garbage is collected at the same steps on all ranks, and as Python likes it before and after."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.garbage import GarbageCollection
from tests.lightning_features.harness import Regression, Run, on_ranks, regression_data


@pytest.fixture(autouse=True)
def collection() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


class Watch(Callback):
    """Notes at which steps a full collection runs, and whether automatic collection is on."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.automatic: dict[str, set[bool]] = {}
        self.step = -1

    def on_train_start(self, *_: Any) -> None:
        gc.callbacks.append(self)  # type: ignore[arg-type]

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            self.steps.append(self.step)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step
        self._note("start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._note("train")

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._note("sanity" if trainer.sanity_checking else "validation")

    def on_train_end(self, *_: Any) -> None:
        gc.callbacks.remove(self)  # type: ignore[arg-type]

    def _note(self, when: str) -> None:
        self.automatic.setdefault(when, set()).add(gc.isenabled())


def _fit(run: Run) -> tuple[list[int], dict[str, set[bool]], bool, int]:
    gc.unfreeze()  # the test runner freezes what a rank has from its parent
    watch = Watch()
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "callbacks": [watch]}
    data = regression_data(48)
    run.fit(Regression(), run.loader(data, 4), run.loader(data, 4), **options)
    return watch.steps, watch.automatic, gc.isenabled(), gc.get_freeze_count()


def test_all_ranks_collect_at_the_same_steps(tmp_path: Any) -> None:
    # 12 batches an epoch, two a step: steps 0 to 11. At 0 everything has just been collected, before training starts.
    for steps, automatic, is_on_after, frozen_after in on_ranks(_fit, 2, tmp_path, pp=2, gc_interval_steps=5):
        assert sorted(set(steps) - {-1}) == [5, 10]
        assert all(steps.count(step) == 1 for step in (5, 10))
        assert automatic["train"] == automatic["start"] == {False}
        assert automatic["validation"] == automatic["sanity"] == {True}
        assert is_on_after
        assert frozen_after == 0


class Cyclic(Regression):
    """Leaves tensors in cycles."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append(sum(reference() is not None for reference in self.left))
        cycle: list[Any] = [torch.zeros(3)]
        cycle.append(cycle)
        self.left.append(weakref.ref(cycle[0]))
        return super().training_step(batch, batch_idx)


def test_tensors_in_cycles_do_not_wait_for_the_interval(tmp_path: Any) -> None:
    def fit(run: Run) -> list[int]:
        module = Cyclic()
        run.fit(module, run.loader(regression_data(100), 2), max_epochs=1)
        return module.alive

    (alive,) = on_ranks(fit, 1, tmp_path, gc_interval_steps=1000)
    assert alive == [0] * 50


def test_collection_can_be_left_to_python(tmp_path: Any) -> None:
    ((_, automatic, is_on_after, _),) = on_ranks(_fit, 1, tmp_path, gc_interval_steps=None)
    assert automatic["train"] == {True}
    assert is_on_after


class Failing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not gc.isenabled()
        raise KeyError("wrong")


def test_a_run_that_fails_leaves_collection_as_it_was(tmp_path: Any) -> None:
    def fit(run: Run) -> tuple[bool, int]:
        gc.unfreeze()
        with pytest.raises(KeyError, match="wrong"):
            run.fit(Failing(), run.loader(regression_data(4), 4), max_steps=1)
        return gc.isenabled(), gc.get_freeze_count()

    assert on_ranks(fit, 1, tmp_path) == [(True, 0)]


def test_whoever_has_switched_collection_off_keeps_it_off() -> None:
    garbage = GarbageCollection(1)
    gc.disable()
    garbage.start()
    garbage.pause()
    garbage.stop()
    assert not gc.isenabled()


def test_the_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="gc_interval_steps=0 must be 1 or more, or None"):
        MegatronStrategy(gc_interval_steps=0)
