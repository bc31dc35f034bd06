"""A training script in which one rank fails. Run by test_failures.py, as a user would run it."""

import argparse
import os
import signal
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, PipelineModel

MESSAGE = "the answer is not 42"


class Model(PipelineModel):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def first(self, x: Tensor) -> Tensor:
        return self.embedding(x)

    def last(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Module(L.LightningModule):
    def __init__(self, rank: int, how: str, where: str) -> None:
        super().__init__()
        self.model = Model()
        self.rank, self.how, self.where = rank, how, where

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.where == "training" and batch_idx == 1:
            self.fail()
        return self.model(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.where == "validation":
            self.fail()
        self.log("loss", self.model(batch[0]).square().mean(), sync_dist=True)

    def fail(self) -> None:
        if self.global_rank != self.rank:
            return
        print("about to fail", flush=True)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(3)
        raise ArithmeticError(MESSAGE)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    layout: dict[str, Any], *, devices: int, rank: int, how: str, where: str, callbacks: Any = None, **options: Any
) -> None:
    loader = DataLoader(TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="cpu",
        devices=devices,
        max_steps=50,
        logger=False,
        enable_checkpointing=callbacks is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_train_batches=4,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Module(rank, how, where), loader, loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--how", default="raise")
    parser.add_argument("--where", default="training")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    layout = {"pp": options.pp, "tp": options.tp}
    how, nodes = {"rank": options.rank, "how": options.how, "where": options.where}, {"num_nodes": options.num_nodes}
    run(layout, devices=options.devices, **how, **nodes)
