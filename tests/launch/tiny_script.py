"""A training script of two steps. Run by test_multi_node.py and test_start_methods.py, as a user would run it."""

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPTConfig
from lightning_megatron.models.gpt_module import GPTModule

CONFIG = GPTConfig(num_layers=2, hidden_size=32, num_heads=4, ffn_hidden_size=48, vocab_size=67, max_seq_len=16, init_std=0.2)


class Losses(Callback):
    """The loss of each step, over all replicas, and a number that all trained weights go into."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        self.values.append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        state = trainer.strategy.full_state_dict()
        self.values.append(float(sum(value.double().abs().sum() for value in state.values())))


def train(layout: dict[str, Any], *, batch_size: int, devices: int, num_nodes: int = 1) -> tuple[L.Trainer, list[float]]:
    """Two steps over the same eight sequences, however they are cut."""
    L.seed_everything(5, verbose=False)
    tokens = torch.randint(CONFIG.vocab_size, (8, 12), generator=torch.Generator().manual_seed(3))
    losses = Losses()
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(GPTModule(CONFIG, lr=0.01), DataLoader(tokens, batch_size=batch_size))
    return trainer, losses.values


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "devices", "num_nodes", "batch_size"):
        parser.add_argument(f"--{name}", type=int, default=1)
    options = parser.parse_args()
    layout = {"tp": options.tp, "pp": options.pp}
    ran, values = train(layout, batch_size=options.batch_size, devices=options.devices, num_nodes=options.num_nodes)
    position = ran.strategy.parallelism.coordinate(ran.global_rank, ran.world_size)
    print(f"rank={ran.global_rank} node={ran.node_rank} tp={position['tp']} dp={position['dp']} values={values}", flush=True)
