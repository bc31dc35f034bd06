"""In the layout that saved it, a tensor- or context-parallel run with dropout goes on bit for bit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import DistributedOptimizerConfig, MegatronStrategy
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.testing import run_distributed

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=24,
    vocab_size=19,
    vocab_multiple=8,
    max_seq_len=8,
    hidden_dropout=0.3,
    attention_dropout=0.3,
    qkv_bias=True,
    init_std=0.2,
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2 with sequence parallelism": (2, {"tp": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 dp2": (4, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
}
BATCHES = 4
TOKENS = torch.randint(19, (BATCHES * 4, 9), generator=torch.Generator().manual_seed(3))


class Sequences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": TOKENS[index, :-1], "labels": TOKENS[index, 1:]}


class Module(L.LightningModule):
    def configure_model(self) -> None:
        self.model = GPT(CONFIG)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        # A draw from the default generator, which all ranks of a replica must go on alike.
        weights = torch.rand(batch["tokens"].shape[1], device=batch["tokens"].device)
        return (self.model(batch["tokens"], labels=batch["labels"]) * weights).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch["tokens"], labels=batch["labels"]).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SaveAfter(Callback):
    """Saves in the hook of that name, when so many batches have been trained on."""

    def __init__(self, path: Path, hook: str, batches: int) -> None:
        self.path, self.batches = path, batches
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.batches and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *_: Any) -> None: ...
    def on_validation_end(self, *_: Any) -> None: ...


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mid-epoch": ("on_train_batch_end", 3, {}),
    "mid-accumulation": ("on_train_batch_end", 5, {"accumulate_grad_batches": 3}),
    "after validation": ("on_validation_end", 2, {"val_check_interval": 2}),
}
FEWER = {"tp2 pp2": {"mid-accumulation"}, "tp2 dp2": {"mid-epoch"}, "cp2": {"mid-accumulation"}}
OPTIMIZERS = {
    "fp32": ({}, "32-true"),
    "bf16 with remainders": ({"main_param": "remainder"}, "bf16-mixed"),
}


def fit(layout: dict[str, Any], seed: int, kept: str, *callbacks: Callback, ckpt_path: Any = None, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    config, precision = OPTIMIZERS[kept]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=MegatronStrategy(**layout, optimizer=DistributedOptimizerConfig(bucket_mb=300 * 4 / 2**20, **config)),
        precision=precision,  # type: ignore[arg-type]
        callbacks=list(callbacks),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    replicas = torch.distributed.get_world_size() // prod(layout.get(axis, 1) for axis in ("tp", "pp", "cp"))
    training = DataLoader(Sequences(), batch_size=4 // replicas, shuffle=True)
    trainer.fit(Module(), training, DataLoader(Sequences(), batch_size=4), ckpt_path=ckpt_path)
    return trainer.strategy.full_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_parallel_run_with_dropout_equals_the_uninterrupted_one_bitwise(layout: str, tmp_path: Path) -> None:
    world_size, parallelism = LAYOUTS[layout]

    def run() -> dict[str, list[str]]:
        wrong = {}
        for number, (case, (hook, batches, options)) in enumerate(CASES.items()):
            if case not in FEWER.get(layout, CASES):
                continue
            kept = list(OPTIMIZERS)[number % 2]
            path = tmp_path / f"{number}.ckpt"
            whole = fit(parallelism, 5, kept, SaveAfter(path, hook, batches), **options)
            resumed = fit(parallelism, 6, kept, ckpt_path=path, **options)
            wrong[case] = [name for name, value in whole.items() if not torch.equal(resumed[name], value)]
        return wrong

    for wrong in run_distributed(run, world_size):
        assert wrong == {case: [] for case in FEWER.get(layout, CASES)}
