"""Every replica reads its share of the user's data, in the user's order; the ranks of one replica read the same."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightning_megatron import MegatronStrategy
from tests.lightning_features.harness import (
    FEATURES,
    History,
    Regression,
    Run,
    Scenarios,
    on_ranks,
    regression_data,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
}
scenario = Scenarios(LAYOUTS)
TRAIN, VAL = regression_data(22, 1), regression_data(14, 2)


class Backwards(Sampler[int]):
    """A sampler of the user's own that follows the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(i + self.epoch) % self.size for i in reversed(range(self.size))])

    def __len__(self) -> int:
        return self.size


class Shifted(BatchSampler):
    """A batch sampler of the user's own: batches of Lightning's order of samples, the first sample of each twice."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [*batch, batch[0]]


@scenario
def a_custom_sampler(run: Run) -> Any:
    return run.fit(Regression(), run.loader(TRAIN, 8, sampler=Backwards(22)), run.loader(VAL, 8), max_epochs=3)


@scenario
def drop_last(run: Run) -> Any:
    return run.fit(Regression(), run.loader(TRAIN, 8, drop_last=True), run.loader(VAL, 8), max_epochs=2)


@scenario
def several_validation_loaders(run: Run) -> Any:
    class Several(Regression):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))
            self.log(f"own_{dataloader_idx}", 1.0, add_dataloader_idx=False)

    loaders = [run.loader(VAL, 8), run.loader(regression_data(10, 5), 4)]
    return run.fit(Several(), run.loader(TRAIN, 8), loaders, max_epochs=2)


class Nested(Dataset[Any]):
    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        x, y = TRAIN[index]
        if self.form == "dict":
            return {"x": x, "deep": {"y": y, "name": f"sample {index}"}, "index": index}
        return (x, (y, index))


@scenario
def batches_of_any_form(run: Run) -> Any:
    class Dicts(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            names = batch["deep"]["name"]
            assert names == [f"sample {index}" for index in batch["index"].tolist()]
            return super().training_step([batch["x"], batch["deep"]["y"]], batch_idx)

    class Tuples(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, (y, _) = batch
            return super().training_step([x, y], batch_idx)

    return [run.fit(kind(), run.loader(Nested(form), 8), max_epochs=1) for kind, form in ((Dicts, "dict"), (Tuples, "tuple"))]


@scenario
def several_training_loaders(run: Run) -> Any:
    class Two(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = torch.cat([batch["a"][0], batch["b"][0]])
            return super().training_step([x, torch.cat([batch["a"][1], batch["b"][1]])], batch_idx)

    loaders = {"a": run.loader(TRAIN, 8), "b": run.loader(regression_data(16, 9), 8)}
    return run.fit(Two(), CombinedLoader(loaders, "min_size"), max_epochs=2)


class Stream(IterableDataset[Any]):
    """Its user splits it, by the strategy's replica."""

    def __init__(self, run: Run) -> None:
        self.run, self.trainer = run, None

    def __iter__(self) -> Any:
        rank = self.trainer.strategy.dp_rank if self.run.layout is not None else 0
        yield from (TRAIN[i] for i in range(rank, 22, self.run.replicas))


@scenario
def an_iterable_dataset(run: Run) -> Any:
    history, stream = History(), Stream(run)
    trainer, module = run.trainer(history, max_epochs=2), Regression()
    stream.trainer = trainer
    trainer.fit(module, run.loader(stream, 8), run.loader(VAL, 8))
    return run.summary(trainer, module, history)


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_the_data_is_that_of_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    scenario.compare(name, layout, tmp_path_factory.getbasetemp() / "data")


class Reads(Regression):
    """Keeps which samples each batch held."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.read.append([])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read[-1] += batch[0].tolist()


def reads(run: Run, seeded: bool, epochs: int = 2, **loader: Any) -> Any:
    if seeded:
        L.seed_everything(5, verbose=False)
    else:  # as scripts that were started without a seed
        torch.manual_seed(1000 + torch.distributed.get_rank())
        random.seed(torch.distributed.get_rank())
        np.random.seed(torch.distributed.get_rank())
    module = Reads()
    run.trainer(max_epochs=epochs).fit(module, run.loader(TRAIN, 8, **loader))
    return module.read


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
def test_a_shuffling_loader_gives_each_sample_once_in_a_new_order_each_epoch(seeded: bool, tmp_path: Any) -> None:
    ranks = on_ranks(lambda run: reads(run, seeded, shuffle=True), 4, tmp_path, pp=2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    for first, second in zip(ranks[0], ranks[2], strict=True):
        assert sorted(first + second) == sorted(x.tolist() for x, _ in TRAIN)
    assert ranks[0][0] != ranks[0][1]
    assert ranks[0][0] != [x.tolist() for x, _ in TRAIN][::2]


def test_the_shuffled_order_does_not_depend_on_the_number_of_replicas(tmp_path: Any) -> None:
    one = on_ranks(lambda run: reads(run, True, shuffle=True), 2, tmp_path, pp=2)[0]
    two = on_ranks(lambda run: reads(run, True, shuffle=True), 2, tmp_path)
    for epoch, order in enumerate(one):
        assert order[0::2] == two[0][epoch]
        assert order[1::2] == two[1][epoch]


@pytest.mark.parametrize("kind", ["weighted", "replacement"])
def test_random_samplers_of_the_user_agree_between_the_ranks_of_a_replica(kind: str, tmp_path: Any) -> None:
    def sampler() -> Sampler[int]:
        if kind == "weighted":
            return WeightedRandomSampler([1.0 + i for i in range(22)], 16)
        return RandomSampler(TRAIN, replacement=True, num_samples=16)

    for world_size, ranks_of_a_replica in ((2, [(0, 1)]), (4, [(0, 1), (2, 3)])):
        ranks = on_ranks(lambda run: reads(run, False, sampler=sampler()), world_size, tmp_path, pp=2)
        assert all(ranks[a] == ranks[b] for a, b in ranks_of_a_replica)
        assert all(len(epoch) == 16 * 2 // world_size for epoch in ranks[0])
        assert ranks[0][0] != ranks[0][1]


class Augmented(Dataset[Any]):
    """Draws from every generator that augmentations use."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return torch.full((FEATURES,), float(index)) + noise, torch.zeros(())


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentations_agree_within_a_replica_and_differ_between_replicas(workers: int, tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        torch.manual_seed(torch.distributed.get_rank())
        module = Reads()
        module.lr = 0.0
        run.trainer(max_epochs=1).fit(module, run.loader(Augmented(), 8, num_workers=workers))
        return [sample[0] for sample in module.read[0]]

    ranks = on_ranks(run_it, 4, tmp_path, pp=2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert not {value % 1 for value in ranks[0]} & {value % 1 for value in ranks[2]}


def test_unlike_batches_within_a_replica_are_refused_before_the_first_step(tmp_path: Any) -> None:
    def run_it(run: Run) -> str:
        data = regression_data(16, seed=torch.distributed.get_rank())
        with pytest.raises(ValueError, match="read different first batches") as error:
            run.trainer(max_epochs=1).fit(Regression(), DataLoader(data, batch_size=8))
        return str(error.value)

    messages = on_ranks(run_it, 2, tmp_path, pp=2)
    assert all("ranks 1 and 0 belong to one model replica" in message for message in messages)
    assert all("tp(1) * cp(1) * pp(2) = 2" in message and "strategy.dp_rank" in message for message in messages)


def predictions(run: Run, size: int, batch_size: int, **options: Any) -> list[Tensor]:
    class Numbers(Regression):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.model(batch[0]).shape == (len(batch[0]), 1)
            return batch[0][:, 0]

    data = torch.utils.data.TensorDataset(torch.arange(float(size))[:, None].expand(size, FEATURES).contiguous())
    return run.trainer(**options).predict(Numbers(), DataLoader(data, batch_size=batch_size))


def test_predictions_of_one_replica_are_complete_and_in_order_on_every_rank(tmp_path: Any) -> None:
    for batches in on_ranks(lambda run: predictions(run, 11, 4), 2, tmp_path, pp=2, micro_batch_size=3):
        assert [len(batch) for batch in batches] == [4, 4, 3]
        assert torch.equal(torch.cat(batches), torch.arange(11.0))
    for batches in on_ranks(lambda run: predictions(run, 11, 4, limit_predict_batches=2), 2, tmp_path, pp=2):
        assert torch.equal(torch.cat(batches), torch.arange(8.0))


def test_replicas_predict_their_own_share_without_repeats(tmp_path: Any) -> None:
    ranks = on_ranks(lambda run: torch.cat(predictions(run, 11, 2)), 4, tmp_path, pp=2)
    assert torch.equal(ranks[0], torch.arange(0.0, 11, 2))
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[2], torch.arange(1.0, 11, 2))


def test_the_users_loader_is_left_whole_when_the_sampler_is_not_to_be_replaced(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        module = Reads()
        run.trainer(max_epochs=1, use_distributed_sampler=False).fit(module, DataLoader(TRAIN, batch_size=8))
        return module.read[0]

    for read in on_ranks(run_it, 2, tmp_path):
        assert read == [x.tolist() for x, _ in TRAIN]


def test_a_batch_sampler_of_the_users_is_kept_for_one_replica(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        module = Reads()
        sampler = Shifted(torch.utils.data.SequentialSampler(TRAIN), batch_size=8, drop_last=False)
        run.trainer(max_epochs=1).fit(module, DataLoader(TRAIN, batch_sampler=sampler))
        assert isinstance(module.trainer.strategy, MegatronStrategy)
        return len(module.read[0])

    assert on_ranks(run_it, 2, tmp_path, pp=2, micro_batch_size=4) == [25, 25]


class Sampled(Regression):
    """Keeps dropout on in predictions, and draws in the step too."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.train()
        return self.model(batch[0]).squeeze(-1) + torch.rand(())


@pytest.mark.parametrize("layout", [{}, {"pp": 2, "micro_batch_size": 3}], ids=str)
def test_each_run_of_predict_samples_dropout_anew_and_a_new_process_the_same(layout: dict[str, Any], tmp_path: Any) -> None:
    def run_it(run: Run) -> list[Tensor]:
        L.seed_everything(5, verbose=False)
        first, module = run.trainer(), Sampled(dropout=0.5)
        trainers = [first, first, run.trainer()]
        return [torch.cat(trainer.predict(module, run.loader(VAL, 8))) for trainer in trainers]

    ranks, again = (on_ranks(run_it, 2, tmp_path, **layout) for _ in range(2))
    for predicted, repeated in zip(ranks, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(predicted, repeated, strict=True))
        for other in predicted[1:]:
            assert not torch.isclose(predicted[0], other).any()
        assert not torch.isclose(predicted[1], predicted[2]).any()
    if "pp" in layout:
        assert all(torch.equal(one, other) for one, other in zip(*ranks, strict=True))


def test_predictions_without_dropout_do_not_depend_on_the_run(tmp_path: Any) -> None:
    def run_it(run: Run) -> list[Tensor]:
        trainer, module = run.trainer(), Regression(dropout=0.5)
        return [torch.cat(trainer.predict(module, run.loader(VAL, 8))) for _ in range(2)]

    for first, second in on_ranks(run_it, 2, tmp_path, pp=2):
        assert torch.equal(first, second)
