"""The test runner: what a rank returns, raises or hangs in reaches the caller, and no process is left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_megatron.testing
from lightning_megatron.testing import run_distributed


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_distributed(lambda offset: dist.get_rank() + offset, 3, 10) == [10, 11, 12]


def test_an_error_of_one_rank_comes_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_megatron.testing, "_GRACE_SECONDS", 0.5)

    def fail() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("planted")

    with pytest.raises(AssertionError, match=r"rank 1 ---(.|\n)*in fail(.|\n)*RuntimeError: planted"):
        run_distributed(fail, 2, collective_timeout_seconds=5)


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(AssertionError, match="rank 0 died, exit code 7"):
        run_distributed(lambda: os._exit(7), 1)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.line(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_hang_shows_the_stack_of_each_rank_also_after_a_trainer_has_run(tmp_path: Path) -> None:
    def train_then_hang() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        L.Trainer(accelerator="cpu", devices=1, max_steps=1, **quiet).fit(Line(), torch.ones(2, 1))
        stuck_here()

    def stuck_here() -> None:
        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    with pytest.raises(AssertionError) as error:
        run_distributed(train_then_hang, 2, timeout_seconds=3, collective_timeout_seconds=30)
    for rank in range(2):
        assert f"rank {rank} still running" in str(error.value)
        process = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert str(error.value).count("in stuck_here") == 2
