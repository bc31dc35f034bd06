"""Regression with a residual MLP that is cut into pipeline stages: any model can be, see docs/pipeline-models.md.

python examples/pipeline_regression.py                                   # 2 CPU ranks, one stage each
python examples/pipeline_regression.py --vpp 2 --layout 2,1,1,2          # two uneven stages on each rank
python examples/pipeline_regression.py --pp 1                            # one process: the same losses
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy, PipelineModel

FEATURES, HIDDEN, LAYERS, SAMPLES = 8, 64, 6, 2048


class Block(nn.Module):
    """A residual block: ``[B, H] -> [B, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class ResidualMLP(PipelineModel):
    """``[B, features] -> [B]``. The pipeline is cut between the entries of ``layers``."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def first(self, features: Tensor) -> Tensor:
        return self.inlet(features)

    def last(self, hidden: Tensor) -> Tensor:
        return self.outlet(hidden).squeeze(-1)


class Regression(LightningModule):
    """Written as for one process: nothing here knows of stages or micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ResidualMLP()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, target = batch
        loss = F.mse_loss(self.model(features), target)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch} train_loss {self.trainer.callback_metrics['train_loss']:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def parse_options(arguments: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, default=1, help="stages on each rank")
    parser.add_argument("--layout", help="layers of each stage: 2,1,1,2 or 3*2 or auto; evenly if not given")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the data")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Trainer:
    options = parse_options(arguments)
    seed_everything(1, verbose=False)
    features = torch.randn(SAMPLES, FEATURES)
    data = TensorDataset(features, features.sin().sum(dim=1) + features[:, 0] * features[:, 1])
    strategy = MegatronStrategy(pp=options.pp, vpp=options.vpp, pipeline_layout=options.layout, micro_batch_size=32)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        strategy=strategy, accelerator=options.accelerator, devices=options.pp, max_epochs=options.epochs, **quiet
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=256, shuffle=True))
    return trainer


if __name__ == "__main__":
    main()
