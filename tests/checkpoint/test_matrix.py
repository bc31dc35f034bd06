"""What each of eight layouts of eight ranks saves, each of the eight loads, and trains on as if it had never stopped.

In another layout as one process would, within rounding; in the same one bit for bit.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import DistributedOptimizerConfig, MegatronPrecision, MegatronStrategy
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.sharding import sharding_of
from lightning_megatron.testing import run_distributed

RANKS, GLOBAL_BATCH, SEQUENCE, STEPS, SEED = 8, 8, 8, 3, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp8": {},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp4": {"tp": 4},  # two ranks share a key/value head
    "tp2 pp2 vpp2": {"tp": 2, "pp": 2, "vpp": 2},
    "pp4": {"pp": 4},
    "cp2 pp2": {"cp": 2, "pp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "tp4 pp2": {"tp": 4, "pp": 2},
}
# Elements of a bucket: four or five buckets a rank, of different sizes, so that the slices of the optimizer lie
# differently, and one bucket for all in the last layouts. More buckets are more collectives of eight processes on few cores.
BUCKET_NUMEL = dict(zip(LAYOUTS, (2500, 600, 700, 500, 550, 1200, 2**20, 2**20), strict=True))
CONFIG = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    vocab_size=19,
    vocab_multiple=8,
    max_seq_len=SEQUENCE,
    activation="swiglu",
    qkv_bias=True,
    tied_embeddings=True,
    init_std=0.2,
)


def samples(step: int) -> Tensor:
    """The global batch of a step, ``[GLOBAL_BATCH, SEQUENCE + 1]``."""
    return torch.randint(19, (GLOBAL_BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


class Steps(Dataset[dict[str, Tensor]]):
    """The global batches of some steps, one after the other."""

    def __init__(self, steps: list[int]) -> None:
        self.rows = torch.cat([samples(step) for step in steps])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


class Module(L.LightningModule):
    def configure_model(self) -> None:
        self.model = GPT(CONFIG)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["tokens"], labels=batch["labels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


class SaveAndGoOn(Callback):
    """Saves in mid-run, and keeps the losses after that and this rank's weights at the end, for ``uncut`` to read."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            trainer.save_checkpoint(self.folder / f"{self.name}.ckpt")
        elif batch_idx >= STEPS:
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        torch.save((self.losses, weights_of(trainer.strategy)), self.folder / f"{self.name} {trainer.global_rank}.pt")


def uncut(folder: Path, name: str, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and a rank's weights of the run that saved, which went on."""
    found: tuple[list[float], dict[str, Tensor]] = torch.load(folder / f"{name} {rank}.pt")
    return found


class LoadEach(Callback):
    """Loads the next checkpoint every few steps, and keeps the losses and which final weights are wrong after each."""

    def __init__(self, folder: Path, name: str, expected: dict[str, Tensor]) -> None:
        self.folder, self.name, self.expected = folder, name, expected
        self.paths = [folder / f"{source}.ckpt" for source in LAYOUTS]
        self.losses: list[list[float]] = [[] for _ in self.paths]
        self.wrong: list[list[str]] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % STEPS == 0:
            trainer.strategy.load_checkpoint(self.paths[batch_idx // STEPS])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[batch_idx // STEPS].append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))
        if batch_idx % STEPS == STEPS - 1:
            self.wrong.append(wrong(trainer.strategy, self.expected))
            if self.paths[batch_idx // STEPS].stem == self.name:  # the same layout
                losses, weights = uncut(self.folder, self.name, trainer.global_rank)
                assert self.losses[batch_idx // STEPS] == losses
                found = weights_of(trainer.strategy)
                assert found.keys() == weights.keys()
                self.wrong[-1] += [name for name, value in weights.items() if not torch.equal(found[name], value)]


def weights_of(strategy: Any) -> dict[str, Tensor]:
    """This rank's parameters."""
    strategy._wait_parameters()
    return {name: param.detach().clone() for name, param in strategy._ready.named_parameters()}


def wrong(strategy: Any, expected: dict[str, Tensor]) -> list[str]:
    """Names of this rank's parameters that are not the cut of the expected ones."""
    strategy._wait_parameters()
    found = []
    for name, param in strategy._ready.named_parameters():
        sharding = sharding_of(param)
        full = expected[name][: sharding.global_shape[0]]  # without padding rows
        if not torch.allclose(param, sharding.cut(full, tuple(param.shape)), rtol=1e-5, atol=1e-9):
            found.append(name)
    return found


def trainer_of(name: str, *callbacks: Callback) -> L.Trainer:
    layout = LAYOUTS[name]
    optimizer = DistributedOptimizerConfig(
        bucket_mb=BUCKET_NUMEL[name] * 4 / 2**20,
        overlap_grad_reduce=False,
        overlap_param_gather=False,  # which cost time here
    )
    return L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=MegatronStrategy(**layout, micro_batch_size=2 if "pp" in layout else None, optimizer=optimizer),
        plugins=MegatronPrecision("64-true"),
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fit(name: str, steps: list[int], *callbacks: Callback) -> L.Trainer:
    L.seed_everything(SEED, verbose=False)
    layout = LAYOUTS[name]
    replicas = RANKS // layout.get("tp", 1) // layout.get("pp", 1) // layout.get("cp", 1)
    trainer = trainer_of(name, *callbacks)
    trainer.fit(Module(), DataLoader(Steps(steps), batch_size=GLOBAL_BATCH // replicas))
    return trainer


def save_all(folder: Path) -> None:
    for name in LAYOUTS:
        fit(name, list(range(2 * STEPS)), SaveAndGoOn(folder, name))


def load_all(folder: Path, name: str, expected: dict[str, Tensor]) -> tuple[list[list[float]], list[list[str]]]:
    loading = LoadEach(folder, name, expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*layout has changed")
        fit(name, list(range(STEPS, 2 * STEPS)) * len(LAYOUTS), loading)
    return loading.losses, loading.wrong


def uninterrupted() -> tuple[list[float], dict[str, Tensor]]:
    """One process, plain torch."""
    model = GPT(CONFIG, seed=SEED, dtype=torch.float64)
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(2 * STEPS):
        rows = samples(step)
        loss = model(rows[:, :-1], labels=rows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[STEPS:], {f"model.{name}": param.detach() for name, param in model.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each layout has saved."""
    folder = tmp_path_factory.mktemp("matrix")
    run_distributed(save_all, RANKS, folder, timeout_seconds=115)
    return folder


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, Tensor]]:
    return run_distributed(uninterrupted, 1, init_process_group=False)[0]


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_layout_goes_on_from_what_any_other_has_saved(target: str, saved: Path, expected: Any) -> None:
    expected_losses, weights = expected
    for losses, wrong_weights in run_distributed(load_all, RANKS, saved, target, weights, timeout_seconds=115):
        assert wrong_weights == [[]] * len(LAYOUTS)
        for source, found in zip(LAYOUTS, losses, strict=True):
            assert found == pytest.approx(expected_losses, rel=1e-5), f"{source} -> {target}"
