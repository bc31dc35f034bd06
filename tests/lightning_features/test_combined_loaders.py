"""Batches of several data loaders at once, whole and in micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.lightning_features.harness import Regression, Run, assert_same, on_ranks, one_process, regression_data


class Both(Regression):
    """Trains and validates on the batches of two loaders together."""

    def both(self, batch: Any) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*(batch[name] for name in batch if batch[name] is not None), strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.both(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(self.both(batch), batch_idx)


def two_loaders(run: Run, mode: Any, sizes: tuple[int, int] = (8, 4), samples: tuple[int, int] = (24, 12)) -> CombinedLoader:
    data = regression_data(samples[0], 1), regression_data(samples[1], 9)
    return CombinedLoader({name: run.loader(data[i], sizes[i]) for i, name in enumerate("ab")}, mode)


def loaders_of_which_one_ends_earlier(run: Run) -> Any:
    return run.fit(Both(), two_loaders(run, "max_size", (8, 8), (24, 8)), max_epochs=1)


def test_a_loader_that_ends_earlier_is_left_out_of_later_batches(tmp_path: Any) -> None:
    expected = one_process(loaders_of_which_one_ends_earlier, tmp_path)
    for outcome in on_ranks(loaders_of_which_one_ends_earlier, 2, tmp_path, pp=2, micro_batch_size=3):
        assert_same(outcome["parameters"], expected["parameters"])


@pytest.mark.parametrize("fn", ["fit", "validate"])
def test_batches_of_unequal_loaders_are_refused_where_they_would_be_cut(fn: str, tmp_path: Any) -> None:
    def run_it(run: Run) -> str:
        trainer = run.trainer(max_epochs=1)
        with pytest.raises(ValueError, match="would be repeated in each") as error:
            getattr(trainer, fn)(Both(), two_loaders(run, "min_size"))
        return str(error.value)

    for message in on_ranks(run_it, 2, tmp_path, pp=2, micro_batch_size=3):
        assert "batches of 8, 4 samples" in message
        assert "the same 3 micro-batches" in message
        assert "num_microbatches=1" in message
        assert "split_batch(batch, micro_batch_size)" in message


@pytest.mark.parametrize("layout", [{"num_microbatches": 1, "pp": 2}, {"pp": 2, "micro_batch_size": 3}, {}], ids=str)
def test_batches_of_unequal_loaders_are_whole_or_cut_by_the_module(layout: dict[str, Any], tmp_path: Any) -> None:
    class Own(Both):
        def split_batch(self, batch: Any, micro_batch_size: int | None) -> list[Any]:
            number = 1 if micro_batch_size is None else 4
            parts = {name: [tensor.chunk(number) for tensor in batch[name]] for name in batch}
            return [{name: [chunks[i] for chunks in parts[name]] for name in parts} for i in range(number)]

    def run_it(run: Run) -> Any:
        module = Own() if layout.get("micro_batch_size") else Both()
        return run.fit(module, two_loaders(run, "min_size"), two_loaders(run, "min_size"), max_epochs=2)

    expected = one_process(run_it, tmp_path)
    for outcome in on_ranks(run_it, 2, tmp_path, **layout):
        assert_same(outcome["parameters"], expected["parameters"])
