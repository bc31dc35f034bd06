"""A run under context parallelism goes on from its checkpoint under any layout as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import run_distributed
from tests.parity import harness
from tests.parity.harness import LLAMA_GQA

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Module(harness.ParityModule):
    def on_fit_start(self) -> None:
        """Keep what the checkpoint brought."""


def trained(
    options: dict[str, Any], steps: int, *, resumed: Path | None = None, saved: Path | None = None
) -> dict[str, Tensor]:
    L.seed_everything(harness.SEED, verbose=False)
    strategy, devices = MegatronStrategy(**options), torch.distributed.get_world_size()
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_steps=steps, **QUIET)  # type: ignore[arg-type]
    loader = DataLoader(harness.Samples(LLAMA_GQA.vocab_size), batch_size=4 // strategy.dp_size)
    trainer.fit(Module(LLAMA_GQA, optimizer="adamw", dtype=torch.float64), loader, ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return strategy.full_state_dict()


def test_a_checkpoint_of_cp2_goes_on_under_other_layouts(tmp_path: Path) -> None:
    (expected,) = run_distributed(lambda: trained({}, 4), 1)
    path = tmp_path / "half.ckpt"
    run_distributed(lambda: trained({"cp": 2}, 2, saved=path), 2)
    for world_size, options in ((1, {}), (2, {"cp": 2}), (4, {"cp": 2, "tp": 2})):
        for state in run_distributed(lambda: trained(options, 4, resumed=path), world_size):  # noqa: B023
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
