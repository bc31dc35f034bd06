"""What hooks make of ``checkpoint["state_dict"]``: averaged weights, edits on saving and on loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import CheckpointConfig, DistributedOptimizerConfig
from lightning_megatron.checkpoint.files import read_index
from lightning_megatron.checkpoint.inspection import consolidate
from lightning_megatron.models import GPT, GPTConfig
from tests.lightning_features.harness import (
    Regression,
    Run,
    assert_same,
    on_ranks,
    one_process,
    regression_data,
)

TRAIN, VAL = regression_data(24, 1), regression_data(16, 2)
HEAD, BIAS = "model.head.weight", "model.embed.bias"
LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {}, id="dp2"),
    pytest.param(2, {"checkpoint": CheckpointConfig(async_save=True)}, id="dp2-async"),
]
BITS = {
    "copies": DistributedOptimizerConfig(),
    "remainders": DistributedOptimizerConfig(main_param="remainder"),
}


class Adam(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def ema() -> WeightAveraging:
    return EMAWeightAveraging(decay=0.8)


def trusting(run: Run) -> dict[str, Any]:
    return {} if run.layout is not None else {"weights_only": False}


def averaged(run: Run, *, epochs: int, module: L.LightningModule, callback: Any = ema, **options: Any) -> tuple[Any, Any]:
    """Train with averaging; the trainer and where its last checkpoint is."""
    saving = ModelCheckpoint(dirpath=f"{run.folder}/saved", save_last=True)
    kept = {key: options.pop(key) for key in ("ckpt_path", "weights_only") if key in options}
    trainer = run.trainer(saving, callback(), max_epochs=epochs, enable_checkpointing=True, **options)
    trainer.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8), **kept)
    return trainer, saving.last_model_path


def of_checkpoint(run: Run, path: str, module: L.LightningModule | None = None, **options: Any) -> dict[str, Tensor]:
    module = module or Adam()
    trainer = run.trainer(**options)
    trainer.validate(module, run.loader(VAL, 8), ckpt_path=path, verbose=False, **trusting(run))
    return run.parameters(trainer, module)


def saved_and_resumed(run: Run) -> dict[str, Any]:
    _, path = averaged(run, epochs=1, module=Adam())
    saved = of_checkpoint(run, path)
    module = Adam()
    resumed, _ = averaged(run, epochs=2, module=module, ckpt_path=path, **trusting(run))
    return {"saved": saved, "resumed": run.parameters(resumed, module), "steps": resumed.global_step}


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_averaged_weights_are_saved_and_training_goes_on_from_its_own(
    ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    expected = one_process(saved_and_resumed, tmp_path)
    for found in on_ranks(saved_and_resumed, ranks, tmp_path, **layout):
        assert_same(found, expected)


@pytest.mark.parametrize("main", BITS)
def test_a_resumed_run_of_bf16_parameters_with_averaging_is_the_uninterrupted_one(main: str, tmp_path: Path) -> None:
    def weights(run: Run) -> list[dict[str, Tensor]]:
        module = Adam()
        whole, _ = averaged(run, epochs=2, module=module, precision="bf16-mixed", limit_val_batches=0)
        _, path = averaged(run, epochs=1, module=Adam(), precision="bf16-mixed", limit_val_batches=0)
        again = Adam()
        resumed, _ = averaged(run, epochs=2, module=again, ckpt_path=path, precision="bf16-mixed", limit_val_batches=0)
        return [run.parameters(whole, module), run.parameters(resumed, again)]

    for whole, resumed in on_ranks(weights, 2, tmp_path, optimizer=BITS[main]):
        assert_same(resumed, whole, tolerance=0.0)


def test_a_file_of_a_stock_trainer_with_averaging_goes_on_from_the_weights_of_training(tmp_path: Path) -> None:
    def resumed(run: Run) -> dict[str, Tensor]:
        module = Adam()
        trainer, _ = averaged(run, epochs=2, module=module, ckpt_path=path, weights_only=False)
        return run.parameters(trainer, module)

    path = one_process(lambda run: averaged(run, epochs=1, module=Adam())[1], tmp_path / "first")
    expected = one_process(resumed, tmp_path)
    for found in on_ranks(resumed, 2, tmp_path, checkpoint=CheckpointConfig(weights_only=False)):
        assert_same(found, expected)


class Zeroes(Adam):
    """Saves zeros in place of the head."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state |= {HEAD: torch.zeros_like(state[HEAD])} if HEAD in state else {}  # or it is another stage's


class Fills(Adam):
    """Loads other values than were saved: one tensor replaced, one written to."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if HEAD in state:
            state[HEAD] = torch.full_like(state[HEAD], 0.25)
        if BIAS in state:
            state[BIAS].fill_(0.5)


def one_step(run: Run, module: L.LightningModule, path: str, **options: Any) -> dict[str, Tensor]:
    """Parameters after one more epoch of a learning rate of zero, which leaves them as main values have them."""
    trainer = run.trainer(max_epochs=2, **options)

    class Stands(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.0

    trainer.callbacks.append(Stands())
    trainer.fit(module, run.loader(TRAIN, 8), ckpt_path=path, **trusting(run))
    return run.parameters(trainer, module)


@pytest.mark.parametrize("main", [None, *BITS])
@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_values_that_hooks_give_are_saved_and_loaded_and_trained_on(
    layout: dict[str, Any], main: str | None, tmp_path: Path
) -> None:
    precision = {} if main is None else {"precision": "bf16-mixed"}
    layout = layout | ({} if main is None else {"optimizer": BITS[main]})

    def weights(run: Run) -> list[Any]:
        module = Zeroes()
        trainer = run.trainer(max_epochs=1, **precision)
        trainer.fit(module, run.loader(TRAIN, 8))
        own = run.parameters(trainer, module)
        trainer.save_checkpoint(f"{run.folder}/a.ckpt")
        if trainer.is_global_zero:
            consolidate(Path(run.folder, "a.ckpt"), Path(run.folder, "one.ckpt"), with_optimizer=True)
        trainer.strategy.barrier()
        found = [own]
        for name in ("a.ckpt", "one.ckpt"):
            path = f"{run.folder}/{name}"
            found += [of_checkpoint(run, path, **precision), one_step(run, Adam(), path, **precision)]
            found += [of_checkpoint(run, path, Fills(), **precision), one_step(run, Fills(), path, **precision)]
        return found

    for own, *loaded in on_ranks(weights, 2, tmp_path, **layout):
        assert own[HEAD].abs().max() > 0.01
        zeroed = own | {HEAD: torch.zeros_like(own[HEAD])}
        filled = own | {HEAD: torch.full_like(own[HEAD], 0.25), BIAS: torch.full_like(own[BIAS], 0.5)}
        for found, expected in zip(loaded, [zeroed, zeroed, filled, filled] * 2, strict=True):
            assert_same(found, expected, tolerance=0.0)


CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, ffn_hidden_size=24, vocab_size=19, max_seq_len=8, init_std=0.2)


class Tokens(L.LightningModule):
    """Saves one more than its weights, and its own weights beside them."""

    def configure_model(self) -> None:
        self.model = GPT(CONFIG)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0][:, :-1], labels=batch[0][:, 1:]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["before"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value + 1 for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.changed = {name: value - checkpoint["before"][name] for name, value in checkpoint["state_dict"].items()}


@pytest.mark.parametrize(("saved_by", "read_by"), [("tp", "pp"), ("pp", "tp"), ("tp", "tp")])
def test_shards_and_stages_that_hooks_change_go_into_any_layout(saved_by: str, read_by: str, tmp_path: Path) -> None:
    tokens = TensorDataset(torch.randint(19, (8, 9), generator=torch.Generator().manual_seed(0)))

    def save(run: Run) -> dict[str, Tensor]:
        module, trainer = Tokens(), run.trainer(max_epochs=1)
        trainer.fit(module, DataLoader(tokens, batch_size=4))
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return run.parameters(trainer, module)

    def read(run: Run) -> tuple[dict[str, Tensor], list[float]]:
        module, trainer = Tokens(), run.trainer()
        trainer.validate(module, DataLoader(tokens, batch_size=4), ckpt_path=tmp_path / "a.ckpt", verbose=False)
        seen = [float((value - 1).abs().max()) for name, value in module.changed.items() if "layers" in name]
        return run.parameters(trainer, module), seen

    own = on_ranks(save, 2, tmp_path, **{saved_by: 2})[0]
    for found, seen in on_ranks(read, 2, tmp_path, **{read_by: 2}):
        assert_same(found, {name: value + 1 for name, value in own.items()})
        assert len(seen) > 4
        assert max(seen) < 1e-5


class Adds(Adam):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["other.weight"] = torch.ones(3)


class Reshapes(Adam):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name: value.reshape(-1) for name, value in checkpoint["state_dict"].items()}


class Removes(Adam):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop(HEAD, None)


@pytest.mark.parametrize(
    ("saves", "loads", "message"),
    [
        (Adds, Adam, r"has put other\.weight into .*pp=2.*key of its own"),
        (Reshapes, Adam, r"has made model\..*\(48,\).*where this rank has \(8, 6\)|has made model\..*\(64,\)"),
        (Adam, Removes, r"has removed model\.head\.weight"),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused(saves: Any, loads: Any, message: str, tmp_path: Path) -> None:
    def run_both(run: Run) -> None:
        trainer = run.trainer(max_epochs=1)
        trainer.fit(saves(), run.loader(TRAIN, 8))
        trainer.save_checkpoint(f"{run.folder}/a.ckpt")
        of_checkpoint(run, f"{run.folder}/a.ckpt", loads())

    with pytest.raises(AssertionError, match=message):
        on_ranks(run_both, 2, tmp_path, pp=2)


def test_what_hooks_of_the_first_replica_alone_have_changed_is_saved(tmp_path: Path) -> None:
    class OnFirst(Zeroes):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.is_global_zero:
                checkpoint["state_dict"] = {name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()}

    def largest(run: Run) -> list[float]:
        trainer = run.trainer(max_epochs=1)
        trainer.fit(OnFirst(), run.loader(TRAIN, 8))
        trainer.save_checkpoint(f"{run.folder}/a.ckpt")
        return [float(value.abs().max()) for value in of_checkpoint(run, f"{run.folder}/a.ckpt").values()]

    for found in on_ranks(largest, 2, tmp_path):
        assert max(found) == 0.0


def test_names_that_are_left_out_or_new_are_saved_so_on_replicas(tmp_path: Path) -> None:
    class Renames(Adam):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}

    def names(run: Run) -> list[str]:
        trainer = run.trainer(max_epochs=1)
        trainer.fit(Renames(), run.loader(TRAIN, 8))
        trainer.save_checkpoint(f"{run.folder}/a.ckpt")
        return sorted(read_index(Path(run.folder, "a.ckpt")).state_dict_metadata)

    for found in on_ranks(names, 2, tmp_path):
        of_model = [name for name in found if name.startswith("model.")]
        assert of_model
        assert all(name.startswith("model.net.model.") for name in of_model)
