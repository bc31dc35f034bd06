"""A run that is resumed goes on as one that was never interrupted."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.lightning_features.harness import Regression, Run, on_ranks, regression_data

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"dp2": (2, {}), "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 2})}
TRAIN, VAL, EVEN = regression_data(22, 1), regression_data(8, 2), regression_data(24, 1)


class Dropped(Regression):
    """With dropout, AdamW and a schedule of each step: masks, moments, rates and random numbers all have to go on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch if torch.is_tensor(batch[0]) else [torch.cat(both) for both in zip(*batch, strict=True)]
        return super().training_step([x + 0.1 * torch.randn_like(x), y], batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Noisy(Callback):
    """Draws from the default generators between steps, and lets what it draws into the weights."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        shift = torch.rand(()) + random.random() + float(np.random.rand())
        (batch if torch.is_tensor(batch[1]) else batch[0])[1].add_(0.01 * shift)


class Augmented(Dataset[Any]):
    """Draws from every generator that augmentations use."""

    def __len__(self) -> int:
        return len(TRAIN)

    def __getitem__(self, index: int) -> Any:
        x, y = TRAIN[index]
        return x + 0.1 * (torch.rand(()) + random.random() + float(np.random.rand())), y


def masking(samples: list[Any]) -> list[Tensor]:
    """A ``collate_fn`` that draws."""
    x, y = torch.utils.data.default_collate(samples)
    return [x * (torch.rand_like(x) > 0.1), y]


class SaveAt(Callback):
    """Saves when so many batches have been trained on, in the hook of that name."""

    def __init__(self, path: str, batches: int, hook: str = "on_train_batch_end") -> None:
        self.path, self.batches = path, batches
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *_: Any) -> None: ...
    def on_validation_end(self, *_: Any) -> None: ...
    def on_train_epoch_end(self, *_: Any) -> None: ...


Loaders = Callable[[Run], Any]


def fit(run: Run, loaders: Loaders, seed: int = 5, callbacks: Any = (), ckpt_path: Any = None, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    trainer, module = run.trainer(Noisy(), *callbacks, **({"max_epochs": 3} | options)), Dropped()
    trainer.fit(module, loaders(run), DataLoader(VAL, 4), ckpt_path=ckpt_path)
    return run.parameters(trainer, module), trainer


def plain(run: Run) -> Any:
    return run.loader(Augmented(), 4, shuffle=True, collate_fn=masking)


def with_workers(run: Run) -> Any:
    return run.loader(Augmented(), 4, shuffle=True, collate_fn=masking, num_workers=2, persistent_workers=True)


def weighted(run: Run) -> Any:
    own = torch.Generator().manual_seed(3)
    return run.loader(Augmented(), 4, sampler=WeightedRandomSampler([1.0] * 22, 22, generator=own), generator=own)


def batch_sampler(run: Run) -> Any:
    class Uneven(torch.utils.data.BatchSampler):
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                yield batch[: 1 + number % 2]

    return DataLoader(Augmented(), batch_sampler=Uneven(RandomSampler(TRAIN), 4 // run.replicas, drop_last=False))


def combined(run: Run) -> Any:
    """The shorter one begins anew twice in an epoch."""
    return CombinedLoader([plain(run), run.loader(VAL, 4, shuffle=True)], "max_size_cycle")


CASES: dict[str, tuple[Loaders, dict[str, Any], dict[str, Any]]] = {
    "mid-epoch": (plain, {"batches": 9}, {}),
    "first batch": (plain, {"batches": 1}, {}),
    "last batch": (plain, {"batches": 6}, {"limit_val_batches": 0}),
    "workers": (with_workers, {"batches": 8}, {}),
    "own sampler": (weighted, {"batches": 8}, {}),
    "several loaders": (combined, {"batches": 9}, {}),
    "batch sampler": (batch_sampler, {"batches": 8}, {}),
    "after validation": (plain, {"batches": 8, "hook": "on_validation_end"}, {"val_check_interval": 2}),
    "mid-accumulation": (plain, {"batches": 8}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "epoch end": (plain, {"batches": 6, "hook": "on_train_epoch_end"}, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_the_uninterrupted_one_bitwise_and_without_warnings(layout: str, tmp_path: Any) -> None:
    world_size, layout_options = LAYOUTS[layout]

    def run_it(run: Run) -> dict[str, Any]:
        outcomes = {}
        for number, (case, (loaders, where, options)) in enumerate(CASES.items()):
            path = f"{run.folder}/{number}.ckpt"
            whole, _ = fit(run, loaders, callbacks=[SaveAt(path, **where)], **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                resumed, trainer = fit(run, loaders, 6, ckpt_path=path, **options)
            said = [str(w.message) for w in caught if "resum" in str(w.message) or "layout" in str(w.message)]
            assert trainer.global_step == 3 * trainer.num_training_batches // trainer.accumulate_grad_batches
            outcomes[case] = ([name for name, value in whole.items() if not torch.equal(resumed[name], value)], said)
        return outcomes

    for outcomes in on_ranks(run_it, world_size, tmp_path, **layout_options):
        assert outcomes == {case: ([], []) for case in CASES}


class ByMetric(Dropped):
    """The rate falls by the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def test_a_rate_by_metric_falls_at_the_end_of_the_epoch_that_is_resumed(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        def fit(callbacks: Any = (), ckpt_path: Any = None) -> Any:
            L.seed_everything(5, verbose=False)
            trainer, module = run.trainer(*callbacks, max_epochs=4), ByMetric()
            trainer.fit(module, plain(run), DataLoader(VAL, 4), ckpt_path=ckpt_path)
            return run.parameters(trainer, module), trainer.optimizers[0].param_groups[0]["lr"]

        whole, rate = fit([SaveAt(f"{run.folder}/a.ckpt", 9)])
        resumed, again = fit(ckpt_path=f"{run.folder}/a.ckpt")
        return [name for name, value in whole.items() if not torch.equal(resumed[name], value)], rate == again < 0.05

    assert on_ranks(run_it, 2, tmp_path) == [([], True)] * 2


def test_a_run_that_max_steps_has_stopped_in_mid_epoch_goes_on_with_that_epoch(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        whole, _ = fit(run, plain, max_epochs=-1, max_steps=15)
        last = ModelCheckpoint(f"{run.folder}/last", save_last=True)
        _, trainer = fit(run, plain, callbacks=[last], max_epochs=-1, max_steps=9, enable_checkpointing=True)
        trainer.save_checkpoint(f"{run.folder}/after.ckpt")
        wrong = []
        for path in (last.last_model_path, f"{run.folder}/after.ckpt"):
            resumed, _ = fit(run, plain, 6, ckpt_path=path, max_epochs=-1, max_steps=15)
            wrong += [name for name, value in whole.items() if not torch.equal(resumed[name], value)]
        return wrong

    assert on_ranks(run_it, 2, tmp_path) == [[], []]


class Reads(Regression):
    """Keeps which samples each batch held, and the losses."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.read: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.append(batch[0][:, 0].tolist())


def reads(run: Run, batch_size: int, ckpt_path: Any = None, callbacks: Any = (), data: Any = EVEN) -> Any:
    L.seed_everything(5, verbose=False)
    trainer, module = run.trainer(*callbacks, max_epochs=2), Reads()
    trainer.fit(module, DataLoader(data, batch_size, shuffle=True), ckpt_path=ckpt_path)
    return module.read, run.parameters(trainer, module), trainer.global_step


def in_order(ranks: list[Any], replicas: list[int]) -> list[list[float]]:
    """The samples of each batch of all replicas together, in the order of the samples."""
    read = [ranks[rank][0] for rank in replicas]
    return [[x for together in zip(*batches, strict=True) for x in together] for batches in zip(*read, strict=True)]


class PerToken(Reads):
    """A loss by tokens, of which samples have different numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        tokens = (x[:, 0] > 0).float() + 1
        return {"loss": ((self.model(x).squeeze(-1) - y).square() * tokens).sum() / tokens.sum(), "num_tokens": tokens.sum()}


@pytest.mark.parametrize("kind", [Reads, PerToken])
def test_gradients_that_wait_for_their_step_go_on_under_another_layout(kind: type[Reads], tmp_path: Any) -> None:
    path = f"{tmp_path}/a.ckpt"

    def run_it(run: Run, **options: Any) -> Any:
        trainer, module = run.trainer(*options.pop("callbacks", ()), max_epochs=1, accumulate_grad_batches=3), kind()
        module.lr = 0.05
        trainer.fit(module, run.loader(EVEN, 4), **options)
        return run.parameters(trainer, module)

    whole = on_ranks(lambda run: run_it(run, callbacks=[SaveAt(path, 2)]), 2, tmp_path)[0]
    for world_size, layout in ((2, {"pp": 2, "micro_batch_size": 2}), (4, {})):
        for resumed in on_ranks(lambda run: run_it(run, ckpt_path=path), world_size, tmp_path, **layout):
            for name, value in resumed.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


def test_with_other_replicas_a_run_goes_on_at_the_next_sample(tmp_path: Any) -> None:
    path = f"{tmp_path}/a.ckpt"
    on_ranks(lambda run: reads(run, 2, callbacks=[SaveAt(path, 2)])[1], 2, tmp_path)
    whole = on_ranks(lambda run: reads(run, 4), 2, tmp_path, pp=2)
    orders = [x for batch in in_order(whole, [0]) for x in batch]
    for replicas, layout in (([0], {"pp": 2}), ([0, 1, 2, 3], {})):
        world_size, size = max(2, len(replicas)), 4 // len(replicas)
        same = on_ranks(lambda run, size=size: reads(run, size, path), world_size, tmp_path, **layout)
        batches = in_order(same, replicas)
        assert [x for batch in batches for x in batch] == orders[8:]
        assert len(batches) == 10
        for name, value in same[0][1].items():
            torch.testing.assert_close(value, whole[0][1][name], rtol=1e-5, atol=1e-6)


def test_with_batches_of_another_size_the_epoch_still_ends_where_it_ends(tmp_path: Any) -> None:
    path = f"{tmp_path}/a.ckpt"
    on_ranks(lambda run: reads(run, 2, callbacks=[SaveAt(path, 2)], data=TRAIN)[1], 2, tmp_path)
    whole = on_ranks(lambda run: reads(run, 4, data=TRAIN), 2, tmp_path, pp=2)
    orders = [x for batch in in_order(whole, [0]) for x in batch]
    for batch_size in (2, 3, 7):
        ranks = on_ranks(lambda run, b=batch_size: reads(run, b, path, data=TRAIN), 2, tmp_path, pp=2)
        assert [x for batch in ranks[0][0] for x in batch] == orders[8:]


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.position = self.start = 0

    def __iter__(self) -> Any:
        for position in range(self.start, 11):
            self.position = position
            yield TRAIN[2 * self.position + torch.distributed.get_rank()]
        self.start = 0


class Stateful(DataLoader[Any]):
    """A loader of the user's that keeps its position; unlike between ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.dataset.position + 1, "rank": torch.distributed.get_rank()}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == torch.distributed.get_rank()
        self.dataset.start = state["next"]  # type: ignore[attr-defined]


def test_a_stateful_loader_gets_the_state_of_its_replica_and_of_the_batch_in_training(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        def fit(callbacks: Any = (), ckpt_path: Any = None) -> Any:
            trainer, module = run.trainer(*callbacks, max_epochs=2), Reads()
            trainer.fit(module, Stateful(Stream(), batch_size=1), ckpt_path=ckpt_path)
            return module.read

        whole = fit([SaveAt(f"{run.folder}/a.ckpt", 4)])
        return fit(ckpt_path=f"{run.folder}/a.ckpt") == whole[4:]

    assert on_ranks(run_it, 2, tmp_path) == [True, True]


def test_a_stream_without_a_position_is_named_when_a_run_is_resumed(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        def fit(**options: Any) -> Any:
            trainer = run.trainer(*options.pop("callbacks", ()), max_epochs=1)
            trainer.fit(Regression(), DataLoader(Stream(), batch_size=2), **options)

        fit(callbacks=[SaveAt(f"{run.folder}/a.ckpt", 2)])
        with pytest.warns(UserWarning, match=r"after 2 batches of its epoch, but the position of Stream cannot be restored"):
            fit(ckpt_path=f"{run.folder}/a.ckpt")

    on_ranks(run_it, 2, tmp_path)


def test_another_layout_draws_afresh_and_says_so(tmp_path: Any) -> None:
    path = f"{tmp_path}/a.ckpt"
    on_ranks(lambda run: reads(run, 2, callbacks=[SaveAt(path, 2)])[1], 2, tmp_path)

    def run_it(run: Run) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reads(run, 4, path)
        return "".join(str(w.message) for w in caught if "layout has changed" in str(w.message))

    texts = on_ranks(run_it, 2, tmp_path, pp=2)
    assert "pp 1 -> 2" in texts[0]
