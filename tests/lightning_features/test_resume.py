"""A run that is resumed goes on as one that was never interrupted."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lightning_features.harness import Regression, Run, on_ranks, regression_data

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"dp2": (2, {}), "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 2})}


class Dropped(Regression):
    """With dropout and AdamW: masks, moments and the order of samples all have to go on."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resuming_at_an_epochs_end_under_another_seed_equals_the_uninterrupted_run_bitwise(layout: str, tmp_path: Any) -> None:
    world_size, options = LAYOUTS[layout]

    def run_it(run: Run) -> bool:
        def fit(seed: int, epochs: int, **fit_options: Any) -> Any:
            L.seed_everything(seed, verbose=False)
            checkpoint = ModelCheckpoint(f"{run.folder}/{epochs}", save_last=True, save_on_train_epoch_end=True)
            trainer = run.trainer(checkpoint, max_epochs=epochs, enable_checkpointing=True)
            module = Dropped()
            trainer.fit(module, run.loader(regression_data(16), 8, shuffle=True), **fit_options)
            return run.parameters(trainer, module), checkpoint.last_model_path

        whole, _ = fit(5, 3)
        _, saved = fit(5, 2)
        resumed, _ = fit(6, 3, ckpt_path=saved)
        apart, _ = fit(6, 3)
        assert not all(torch.equal(apart[name], value) for name, value in whole.items())
        return all(torch.equal(resumed[name], value) for name, value in whole.items())

    assert all(on_ranks(run_it, world_size, tmp_path, **options))
