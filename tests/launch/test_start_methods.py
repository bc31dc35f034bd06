"""Ranks that are copies of the calling process (notebooks), and what comes back into it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import run_distributed

from .failing_script import Model


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = Model()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int, layout: dict[str, Any], folder: str) -> tuple[L.Trainer, Module, DataLoader[Any]]:
    loader = DataLoader(TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(2))), batch_size=4)
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Module()
    trainer.fit(module, loader, loader)
    return trainer, module, loader


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and weights of a fit on one rank."""

    def run() -> Any:
        trainer, module, _ = fit(1, {}, str(tmp_path_factory.mktemp("one")))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return metrics, {name: value.detach().numpy() for name, value in module.state_dict().items()}

    (outcome,) = run_distributed(run, 1, init_process_group=False)
    return outcome[0], {name: torch.from_numpy(value) for name, value in outcome[1].items()}


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_state_metrics_and_whole_weights_come_back(
    start_method: str, expected: tuple[dict[str, float], dict[str, Tensor]], tmp_path: Any
) -> None:
    trainer, module, loader = fit(2, {"pp": 2, "start_method": start_method}, str(tmp_path))
    metrics, weights = expected
    assert trainer.state.finished
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(metrics, rel=1e-5)
    assert set(module.state_dict()) == set(weights)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-7)
    assert str(tmp_path) in trainer.checkpoint_callback.best_model_path
    if start_method == "fork":
        (result,) = trainer.validate(module, loader, verbose=False)
        assert result["val_loss"] < metrics["val_loss"] * 1.5
        with pytest.raises(NotImplementedError, match="twice"):
            trainer.fit(module, loader)


def test_a_process_that_is_in_another_job_is_told_so(tmp_path: Any) -> None:
    def run() -> str:
        fit(1, {}, str(tmp_path))
        with pytest.raises(RuntimeError) as caught:
            fit(2, {"pp": 2, "start_method": "fork"}, str(tmp_path))
        return str(caught.value)

    (message,) = run_distributed(run, 1, init_process_group=False)
    assert "a process group of 1 ranks already" in message
    assert "this Trainer means 2" in message
    assert "restart the notebook" in message
