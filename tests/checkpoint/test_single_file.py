"""Single-file checkpoints, of stock Lightning or consolidated: weights and optimizer states go on, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import DistributedOptimizerConfig, MegatronStrategy
from lightning_megatron.checkpoint.inspection import consolidate
from lightning_megatron.testing import run_distributed

DATA = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("32-true", {}),
    "remainder, fp8 moments": ("bf16-mixed", {"main_param": "remainder", "state_dtype": "fp8", "fused_adam": True}),
}


class Tiny(L.LightningModule):
    def __init__(self, width: int = 9, *, groups: str = "in order") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups = groups
        self.layer = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) * self.gain - 1).square().mean()

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        if self.groups == "reversed":
            params.reverse()
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        groups = groups if self.groups != "one" else [{"params": params}]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def fit(folder: Path, epochs: int, *, stock: bool = False, kept: str = "fp32", **options: Any) -> L.Trainer:
    module, ckpt_path = options.pop("module", None) or Tiny(), options.pop("ckpt_path", None)
    precision, config = KEPT[kept]
    ranks = 1 if stock else torch.distributed.get_world_size()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="auto" if stock else MegatronStrategy(optimizer=DistributedOptimizerConfig(bucket_mb=1e-4, **config)),
        precision=precision,  # type: ignore[arg-type]
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(DATA, batch_size=4 // ranks), ckpt_path=ckpt_path)
    return trainer


def stock_run(folder: Path) -> dict[str, Tensor]:
    fit(folder, 2, stock=True).save_checkpoint(folder / "stock.ckpt")
    state = fit(folder, 4, stock=True).lightning_module.state_dict()
    return {name: value.clone() for name, value in state.items()}


def test_a_run_of_stock_lightning_goes_on_with_its_moments(tmp_path: Path) -> None:
    whole = run_distributed(stock_run, 1, tmp_path, init_process_group=False)[0]

    def run() -> dict[str, Tensor]:
        return fit(tmp_path, 4, ckpt_path=tmp_path / "stock.ckpt").strategy.full_state_dict()  # type: ignore[no-any-return]

    for state in run_distributed(run, 2):
        for name, value in whole.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kept", KEPT)
def test_a_consolidated_checkpoint_goes_on_bitwise(kept: str, tmp_path: Path) -> None:
    def run() -> list[str]:
        whole = fit(tmp_path, 4, kept=kept).strategy.full_state_dict()
        fit(tmp_path, 2, kept=kept).save_checkpoint(tmp_path / "a.ckpt")
        if torch.distributed.get_rank() == 0:
            consolidate(tmp_path / "a.ckpt", tmp_path / "one.ckpt", with_optimizer=True)
        torch.distributed.barrier()
        again = fit(tmp_path, 4, kept=kept, ckpt_path=tmp_path / "one.ckpt").strategy.full_state_dict()
        return [name for name, value in whole.items() if not torch.equal(value, again[name])]

    assert run_distributed(run, 2) == [[], []]


@pytest.mark.parametrize("tool", ["ours", "Lightning's"])
def test_a_stock_trainer_goes_on_from_a_consolidated_checkpoint(tool: str, tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        fit(tmp_path, 2).save_checkpoint(tmp_path / "a.ckpt")
        return fit(tmp_path, 4).strategy.full_state_dict()  # type: ignore[no-any-return]

    whole, _ = run_distributed(run, 2)
    if tool == "ours":
        consolidate(tmp_path / "a.ckpt", tmp_path / "one.ckpt", with_optimizer=True)
    else:
        torch.save(_format_checkpoint(_load_distributed_checkpoint(tmp_path / "a.ckpt")), tmp_path / "one.ckpt")

    def stock() -> dict[str, Tensor]:
        module = fit(tmp_path, 4, stock=True, ckpt_path=tmp_path / "one.ckpt").lightning_module
        again = Tiny.load_from_checkpoint(tmp_path / "one.ckpt")
        assert again.layer[0].weight.shape == (9, 4)
        return {name: value.clone() for name, value in module.state_dict().items()}

    for name, value in run_distributed(stock, 1, init_process_group=False)[0].items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-7)


def test_what_does_not_fit_is_refused_with_both_shapes_and_nothing_is_loaded(tmp_path: Path) -> None:
    run_distributed(stock_run, 1, tmp_path, init_process_group=False)

    def run() -> list[str]:
        texts = []
        cases = {"does not fit": Tiny(7), "groups have": Tiny(groups="one"), "not in the order": Tiny(groups="reversed")}
        for match, module in cases.items():
            before = {name: value.clone() for name, value in module.state_dict().items()}
            with pytest.raises(ValueError, match=match) as error:
                fit(tmp_path, 4, module=module, ckpt_path=tmp_path / "stock.ckpt")
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
            texts.append(str(error.value))
        return texts

    for reshaped, grouped, reverse in run_distributed(run, 2):
        assert "layer.0.weight: saved as (9, 4), wanted as (7, 4)" in reshaped
        assert "groups have [5] parameters, and [2, 3] in the checkpoint" in grouped
        assert "not in the order of the model" in reverse
