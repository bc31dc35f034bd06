"""Checkpoints through the stock Trainer: last, best, links, weights only, exceptions, background saves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import DistributedOptimizerConfig, MegatronPrecision, MegatronStrategy
from lightning_megatron.checkpoint import BackgroundSaver, CheckpointConfig, is_checkpoint, writing
from lightning_megatron.checkpoint.files import read_index
from lightning_megatron.checkpoint.storage import places_of
from lightning_megatron.strategy import checkpointing
from lightning_megatron.testing import run_distributed

DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))


class Tiny(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer(folder: Path, *callbacks: Callback, strategy: dict[str, Any] | None = None, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"max_steps": 4, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=MegatronStrategy(**(strategy or {})),
        callbacks=list(callbacks),
        default_root_dir=folder,
        **(defaults | options),
    )


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2)


def weights(one: L.Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.strategy.full_state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("last", [True, "link"], ids=["copy", "link"])
def test_top_k_last_and_best_are_kept_as_lightning_means_them(last: Any, asynchronous: bool, tmp_path: Path) -> None:
    def run() -> list[Any]:
        saving = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=2, save_last=last, every_n_train_steps=1)
        strategy = {"checkpoint": CheckpointConfig(async_save=asynchronous)}
        first = trainer(tmp_path, saving, strategy=strategy)
        first.fit(Tiny(), loader())
        torch.distributed.barrier()
        names, is_link = sorted(os.listdir(tmp_path)), (tmp_path / "last.ckpt").is_symlink()
        torch.distributed.barrier()
        found = []
        for path in ("last", "best", saving.best_model_path, saving.last_model_path):
            again = trainer(tmp_path, ModelCheckpoint(tmp_path, save_top_k=0, save_last=True), strategy=strategy)
            again.checkpoint_callback.best_model_path = saving.best_model_path
            again.fit(Tiny(), loader(), ckpt_path=path)
            found.append(same(weights(first), weights(again)))
        return [*found, names, is_link]

    for *restored, names, is_link in run_distributed(run, 2):
        assert all(restored)  # the loss falls: the best is the last
        assert names == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
        assert is_link == (last == "link")


class Started(Callback):
    """Keeps the weights that training begins with."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.weights = weights(trainer)


def test_a_checkpoint_of_weights_alone_is_small_and_can_be_evaluated_and_started_from(tmp_path: Path) -> None:
    def run() -> Any:
        saving = ModelCheckpoint(tmp_path, save_weights_only=True, every_n_train_steps=4)
        first = trainer(tmp_path, saving)
        first.fit(Tiny(), loader())
        path = Path(saving.best_model_path)
        index = read_index(path)
        with pytest.raises(KeyError, match="contains only the model"):  # Lightning's own message
            trainer(tmp_path, enable_checkpointing=False).fit(Tiny(), loader(), ckpt_path=path)
        other, started = Tiny(), Started()
        other.layer[0].weight.data.zero_()
        again = trainer(tmp_path, started, enable_checkpointing=False)
        again.validate(other, loader(), ckpt_path=path, verbose=False)
        assert same(weights(first), weights(again))
        again.fit(other, loader())
        assert same(weights(first), started.weights)
        return [key for key in index.state_dict_metadata if not key.startswith("model.")]

    assert run_distributed(run, 2) == [[], []]


def test_metadata_that_needs_trust_is_named_and_read_when_trusted(tmp_path: Path) -> None:
    class Trusting(Tiny):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["where"] = Path("/data")

    def run() -> None:
        first = trainer(tmp_path, enable_checkpointing=False)
        first.fit(Trusting(), loader())
        first.save_checkpoint(tmp_path / "a.ckpt")
        with pytest.raises(ValueError, match=r"type pathlib\.\w+.*weights_only=False"):
            trainer(tmp_path, enable_checkpointing=False).fit(Tiny(), loader(), ckpt_path=tmp_path / "a.ckpt")
        trusted = {"checkpoint": CheckpointConfig(weights_only=False)}
        trainer(tmp_path, enable_checkpointing=False, strategy=trusted).fit(Tiny(), loader(), ckpt_path=tmp_path / "a.ckpt")

    run_distributed(run, 1)


@pytest.mark.parametrize("width", [8, 9])
def test_a_module_without_strict_loading_takes_the_parameters_that_fit(width: int, tmp_path: Path) -> None:
    class Another(Tiny):
        def __init__(self) -> None:
            super().__init__(width)
            self.strict_loading = False
            self.more = nn.Linear(2, 2)

    def run() -> bool:
        first = trainer(tmp_path, enable_checkpointing=False)
        first.fit(Tiny(), loader())
        first.save_checkpoint(tmp_path / "a.ckpt")
        again = trainer(tmp_path, enable_checkpointing=False)
        if width != 8:
            with pytest.raises(ValueError, match=r"saved as \(8, 4\) float32, wanted as \(9, 4\)"):
                again.validate(Another(), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
            return True
        again.validate(Another(), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
        return same(weights(again), weights(first))

    assert run_distributed(run, 2) == [True, True]


class SaveFirst(Callback):
    """Saves after the first batch of two that make a step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "a.ckpt")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("key", ["gradients.1.layer.0.weight.0,0", "rank.1.num_tokens"])
def test_damage_to_gradients_that_wait_for_their_step_is_found_before_anything_is_loaded(
    key: str, ranks: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"enable_checkpointing": False, "accumulate_grad_batches": 2}
    run_distributed(lambda: trainer(tmp_path, SaveFirst(), **options).fit(Tiny(), loader()), 2)
    (place,) = places_of(read_index(tmp_path / "a.ckpt"), {key})
    data = tmp_path / "a.ckpt" / place.file
    content = bytearray(data.read_bytes())
    content[place.offset + place.length // 2] ^= 1
    data.write_bytes(content)

    def go_on() -> tuple[str, bool, int]:
        module, one = Tiny(), trainer(tmp_path, **options)
        with pytest.raises(ValueError, match="not those that were written") as error:
            one.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
        return str(error.value), same(module.state_dict(), Tiny().state_dict()), len(one.optimizers[0].state)

    for text, unchanged, num_states in run_distributed(go_on, ranks):
        assert key in text
        assert unchanged
        assert num_states == 0


class RaiseAt(Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            raise KeyError("told to")


@pytest.mark.parametrize("batches", [1, 2], ids=lambda batches: f"{batches} a step")
def test_what_an_exception_interrupts_on_all_ranks_is_saved_and_goes_on_after_the_last_step(
    batches: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": batches}

    class Noisy(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0] + torch.randn_like(batch[0])], batch_idx)

    def run() -> bool:
        whole = trainer(tmp_path, enable_checkpointing=False, **options)
        whole.fit(Noisy(), loader())
        with pytest.raises(KeyError, match="told to"):
            trainer(tmp_path, RaiseAt(), OnExceptionCheckpoint(tmp_path), **options).fit(Noisy(), loader())
        again = trainer(tmp_path, enable_checkpointing=False, **options)
        again.fit(Noisy(), loader(), ckpt_path=tmp_path / "on_exception.ckpt")
        return same(weights(whole), weights(again))

    assert run_distributed(run, 2) == [True, True]


def test_what_fails_in_the_background_is_raised_at_a_step_and_nothing_older_is_removed(tmp_path: Path) -> None:
    def run() -> list[str]:
        write = writing.write_data

        def failing(folder: Path, name: str, *others: Any, **options: Any) -> Any:
            if "step=3" in folder.name and name.startswith("__1_"):
                raise OSError(28, "No space left on device")
            return write(folder, name, *others, **options)

        writing.write_data = failing  # type: ignore[assignment]
        saving = ModelCheckpoint(tmp_path, save_top_k=1, every_n_train_steps=1)
        first = trainer(tmp_path, saving, strategy={"checkpoint": CheckpointConfig(async_save=True)}, max_steps=8)
        with pytest.raises(RuntimeError, match=r"could not be saved in the background: rank 1: OSError.*No space left"):
            first.fit(Tiny(), loader())
        torch.distributed.barrier()
        return sorted(entry.name for entry in tmp_path.glob("*.ckpt"))

    for names in run_distributed(run, 2):
        assert names == ["epoch=0-step=2.ckpt"]
        assert is_checkpoint(tmp_path / names[0])


class SaveOnce(Callback):
    """Saves after the first step, and removes what is older; no save comes later."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "new.ckpt")
            trainer.strategy.remove_checkpoint(Path(trainer.default_root_dir) / "old.ckpt")


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("what", ["write", "remove"])
def test_what_fails_in_the_background_of_one_rank_is_raised_at_the_same_step_on_all(
    what: str, late: int, tmp_path: Path
) -> None:
    def run() -> tuple[str, int]:
        rank, write = torch.distributed.get_rank(), writing.write_data
        run_next = BackgroundSaver._run_next

        def slow(*args: Any) -> Any:
            time.sleep(0.3 * (rank == late))  # the other rank knows of it some steps earlier
            return run_next(*args)

        def failing(*args: Any, **options: Any) -> Any:
            if what == "write" and rank == 1:
                raise OSError(28, "No space left on device")
            return write(*args, **options)

        def failing_removal(path: str) -> None:
            raise OSError(13, "Permission denied")

        BackgroundSaver._run_next, writing.write_data = slow, failing  # type: ignore[method-assign, assignment]
        if what == "remove":
            checkpointing.checkpoints.remove = failing_removal
        strategy = {"checkpoint": CheckpointConfig(async_save=True)}
        one = trainer(tmp_path, SaveOnce(), strategy=strategy, max_steps=2000, enable_checkpointing=False)
        with pytest.raises(RuntimeError, match="could not be saved in the background") as error:
            one.fit(Tiny(), DataLoader(DATA, batch_size=2, sampler=list(range(16)) * 500))
        return str(error.value), one.global_step

    (text, step), other = run_distributed(run, 2)
    assert (text, step) == other
    assert ("No space left" if what == "write" else "Permission denied") in text
    assert step < 2000  # neither at the next save nor at the end


def test_what_fails_in_the_background_of_the_last_save_is_raised_at_the_end(tmp_path: Path) -> None:
    def run() -> str:
        def failing(*_: Any, **__: Any) -> Any:
            raise OSError(28, "No space left on device")

        writing.write_data = failing  # type: ignore[assignment]
        saving = ModelCheckpoint(tmp_path, save_top_k=1, every_n_train_steps=4)
        one = trainer(tmp_path, saving, strategy={"checkpoint": CheckpointConfig(async_save=True)})
        with pytest.raises(RuntimeError, match="could not be saved in the background") as error:
            one.fit(Tiny(), loader())
        return str(error.value)

    texts = run_distributed(run, 2)
    assert len(set(texts)) == 1
    assert not list(tmp_path.glob("*.ckpt"))


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    def run() -> Any:
        def fit(steps: int, **options: Any) -> L.Trainer:
            plugin = MegatronPrecision("16-mixed", loss_scale=checkpointing_scale())
            one = trainer(tmp_path, plugins=[plugin], max_steps=steps, enable_checkpointing=False)
            one.fit(Tiny(), loader(), **options)
            return one

        whole, first = fit(6), fit(3)
        first.save_checkpoint(tmp_path / "a.ckpt")
        again = fit(6, ckpt_path=tmp_path / "a.ckpt")
        scales = [one.precision_plugin.loss_scale for one in (whole, first, again)]
        return same(weights(whole), weights(again)), scales

    for equal, (whole, first, again) in run_distributed(run, 2):
        assert equal
        assert whole == again != first


def checkpointing_scale() -> Any:
    from lightning_megatron.optim.loss_scale import DynamicLossScale

    return DynamicLossScale(8.0, growth_interval=2)


def near(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], value, rtol=0.05, atol=0.02) for name, value in other.items())


KEPT = {
    "fp32": {},
    "remainder": {"main_param": "remainder"},
    "bf16 states": {"state_dtype": "bf16"},
    "fp8 states": {"state_dtype": "fp8"},
    "offload": {"offload_fraction": 0.5},
    "remainder, bf16 states, offload": {"main_param": "remainder", "state_dtype": "bf16", "offload_fraction": 1.0},
}


def test_main_values_and_states_of_any_kind_go_on_exactly_and_are_converted(tmp_path: Path) -> None:
    def run() -> dict[str, Any]:
        def fit(kind: str, steps: int, **options: Any) -> L.Trainer:
            strategy = {"optimizer": DistributedOptimizerConfig(**KEPT[kind])}
            one = trainer(tmp_path, precision="bf16-mixed", max_steps=steps, strategy=strategy, enable_checkpointing=False)
            one.fit(Tiny(), loader(), **options)
            return one

        outcomes: dict[str, Any] = {}
        whole = {kind: weights(fit(kind, 6)) for kind in KEPT}
        for number, kind in enumerate(KEPT):
            path = tmp_path / f"{number}.ckpt"
            fit(kind, 3).save_checkpoint(path)
            outcomes[kind] = same(whole[kind], weights(fit(kind, 6, ckpt_path=path)))
            other = weights(fit("fp32", 6, ckpt_path=path))
            outcomes[f"{kind} -> fp32"] = all(
                torch.allclose(v, other[n], rtol=0.05, atol=0.02) for n, v in whole["fp32"].items()
            )
            back = weights(fit(kind, 6, ckpt_path=tmp_path / "0.ckpt"))
            outcomes[f"fp32 -> {kind}"] = all(
                torch.allclose(v, back[n], rtol=0.05, atol=0.02) for n, v in whole["fp32"].items()
            )
        return outcomes

    for outcomes in run_distributed(run, 2):
        assert [name for name, fine in outcomes.items() if not fine] == []
