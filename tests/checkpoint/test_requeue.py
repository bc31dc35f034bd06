"""A SLURM job whose time is up is saved between two batches, on all ranks, and goes on by itself when it runs again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, is_checkpoint
from lightning_megatron.testing import run_distributed

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
JOB = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0] + 0.1 * torch.randn_like(batch[0])) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Signalled(Callback):
    """SLURM's signal after some batches, which only one rank has got so far."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.batches and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class Steps(Callback):
    """Notes the steps at which training starts and is validated."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.validated: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.started.append(trainer.global_step)

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self.validated.append(trainer.global_step)


def fit(folder: Path, asynchronous: bool, *callbacks: Callback) -> dict[str, Tensor]:
    """Train as a SLURM job of two ranks."""
    rank = torch.distributed.get_rank()
    os.environ.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(checkpoint=CheckpointConfig(async_save=asynchronous)),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        callbacks=list(callbacks),
        max_epochs=1,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Tiny(), DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=2))
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a job, with a command of SLURM's that writes down what it is asked."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/asked\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_slurm_job_is_saved_between_batches_requeued_and_goes_on_by_itself(asynchronous: bool, job: Path) -> None:
    def run() -> tuple[list[str], list[int], list[int]]:
        whole = fit(job, asynchronous, Signalled(2))
        steps = Steps()
        again = fit(job, asynchronous, steps)
        wrong = [name for name, value in whole.items() if not torch.equal(again[name], value)]
        return wrong, steps.started, steps.validated

    assert run_distributed(run, 2) == [([], [2], [3, 6])] * 2
    assert [path.name for path in job.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    assert is_checkpoint(job / "hpc_ckpt_1.ckpt")
    assert (job / "asked").read_text() == "requeue 7\n"


def test_a_job_that_cannot_be_requeued_is_saved_and_goes_on(job: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (job / "bin" / "scontrol").chmod(0o644)
    run_distributed(lambda: fit(job, False, Signalled(2)), 2)
    assert is_checkpoint(job / "hpc_ckpt_1.ckpt")
    assert "SLURM job 7: scontrol requeue failed" in capfd.readouterr().err
