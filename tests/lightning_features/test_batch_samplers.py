"""A batch sampler of the user's keeps its batches; replicas share the order of its samples."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from tests.lightning_features.harness import Run, on_ranks
from tests.lightning_features.test_data import TRAIN, Reads, Shifted, reads


def batched_reads(run: Run, in_hook: bool, make: Any) -> Any:
    """Sizes of the batches and the samples read, by epoch, with ``batch_sampler=make()``."""
    L.seed_everything(5, verbose=False)

    class Module(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.sizes.append(len(batch[0]))

    class OwnLoader(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(TRAIN, batch_sampler=make())

    module = OwnLoader() if in_hook else Module()
    run.trainer(max_epochs=2).fit(module, None if in_hook else DataLoader(TRAIN, batch_sampler=make()))
    return module.sizes, module.read


@pytest.mark.parametrize("in_hook", [True, False], ids=["hook", "argument"])
@pytest.mark.parametrize("kind", ["shuffled", "sequential", "weighted"])
def test_a_batch_sampler_keeps_its_batch_size_and_its_order_of_samples(kind: str, in_hook: bool, tmp_path: Any) -> None:
    samples = [x.tolist() for x, _ in TRAIN]

    def make() -> Any:
        weighted = WeightedRandomSampler([float(i == 3) for i in range(22)], 20)
        orders = {"shuffled": RandomSampler(TRAIN), "sequential": SequentialSampler(TRAIN), "weighted": weighted}
        return BatchSampler(orders[kind], 4, drop_last=kind == "sequential")

    def read(world_size: int, **layout: Any) -> Any:
        return on_ranks(lambda run: batched_reads(run, in_hook, make), world_size, tmp_path, **layout)

    (sizes, one), *_ = read(2, pp=2, micro_batch_size=2)
    assert sizes == {"shuffled": [4, 4, 4, 4, 4, 2], "sequential": [4] * 5, "weighted": [4] * 5}[kind] * 2
    two = read(2)
    assert two[0][0] == {"shuffled": [4, 4, 3], "sequential": [4, 4], "weighted": [4, 4, 2]}[kind] * 2
    for epoch, order in enumerate(one):
        if kind == "weighted":
            assert all(sample == samples[3] for sample in order + two[0][1][epoch] + two[1][1][epoch])
            continue
        assert (sorted(order) == sorted(samples)) if kind == "shuffled" else order == samples[:20]
        assert two[0][1][epoch] == order[0::2][: len(two[0][1][epoch])]
        assert two[1][1][epoch] == order[1::2][: len(two[1][1][epoch])]
    assert kind != "shuffled" or one[0] != one[1]


def test_the_sampler_within_a_batch_sampler_of_the_users_gives_the_order_to_all_replicas(tmp_path: Any) -> None:
    weighted = WeightedRandomSampler([float(i == 3) for i in range(22)], 20)

    def run_it(run: Run) -> Any:
        return batched_reads(run, False, lambda: Shifted(weighted, batch_size=4, drop_last=False))

    for sizes, read in on_ranks(run_it, 2, tmp_path):
        assert sizes == [5, 5, 3] * 2
        assert all(sample == TRAIN[3][0].tolist() for epoch in read for sample in epoch)


def test_a_distributed_sampler_within_a_batch_sampler_is_left_as_it_is(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        def make() -> Any:
            rank = torch.distributed.get_rank()
            return BatchSampler(DistributedSampler(TRAIN, 2, 1 - rank, shuffle=False), 4, drop_last=False)

        return batched_reads(run, False, make)

    ranks = on_ranks(run_it, 2, tmp_path)
    for rank, (sizes, read) in enumerate(ranks):
        assert sizes == [4, 4, 3] * 2
        assert read == [[x.tolist() for x, _ in TRAIN][1 - rank :: 2]] * 2


def test_a_sampler_over_a_part_of_the_data_gives_that_part_alone(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        return reads(run, True, epochs=1, sampler=SequentialSampler(range(10)))[0]

    first, second = on_ranks(run_it, 2, tmp_path)
    assert [first, second] == [[x.tolist() for x, _ in TRAIN][start:10:2] for start in (0, 1)]
