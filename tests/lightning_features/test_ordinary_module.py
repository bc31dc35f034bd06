"""A plain LightningModule, unchanged: the same metrics, learning rates, stopping step and best checkpoint as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.lightning_features.harness import CLASSES, FEATURES, History, Run, assert_same, net, on_ranks, one_process

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
    "pp4": (4, {"pp": 4, "micro_batch_size": 2}),
    "dp2": (2, {}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 1}),
}


class Classifier(L.LightningModule):
    """Nothing in here knows about the strategy."""

    def __init__(self, *, lr: float = 0.3) -> None:
        super().__init__()
        self.lr = lr
        self.model: nn.Module | None = None
        self.build()
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_f1 = MulticlassF1Score(CLASSES, average="macro")
        self.confidence = MeanMetric()

    def build(self) -> None:
        self.model = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("mean_input", x.mean(), sync_dist=True)  # before the model call
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.val_accuracy(logits, y)
        self.val_f1.update(logits, y)
        self.confidence.update(logits.softmax(-1).amax(-1))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)
        self.log_dict({"val_loss": nn.functional.cross_entropy(logits, y), "val_mean": logits.mean()})
        self.log("val_largest", logits.max(), reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("val_f1", self.val_f1.compute())
        self.log("confidence", self.confidence.compute())
        self.val_f1.reset()
        self.confidence.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class BuiltLate(Classifier):
    """The same with its model made in ``configure_model``."""

    def build(self) -> None: ...

    def configure_model(self) -> None:
        if self.model is None:
            self.model = net()


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    noise = torch.randn(samples, generator=generator)
    return TensorDataset(x, (x.sum(-1) + noise).mul(0.4).sigmoid().mul(CLASSES).long())


def behaviour(run: Run, kind: type[Classifier]) -> dict[str, Any]:
    history = History()
    stopping = EarlyStopping("val_loss", patience=3)
    best = ModelCheckpoint(f"{run.folder}/checkpoints", "{epoch}-{step}", monitor="val_loss", save_top_k=2)
    trainer = run.trainer(history, stopping, best, max_epochs=20, enable_checkpointing=True)
    module = kind()
    # 28 and 20 samples in batches of 8: the last ones are short, and not a multiple of the micro-batch size.
    trainer.fit(module, run.loader(data(28, 1), 8), run.loader(data(20, 2), 8))
    final = run.parameters(trainer, module)
    tested = trainer.test(module, run.loader(data(20, 4), 8), ckpt_path="best", verbose=False)
    predictions = trainer.predict(module, run.loader(data(22, 3), 8))
    return {
        "train": history.train,
        "evaluated": history.evaluated,
        "lrs": history.lrs,
        "steps": history.steps,
        "stopped": (trainer.current_epoch, trainer.global_step, stopping.stopped_epoch, stopping.wait_count),
        "best": (Path(best.best_model_path).name, float(best.best_model_score)),
        "kept": sorted(path.name for path in Path(run.folder, "checkpoints").iterdir()),
        "tested": tested,
        "final": final,
        "predictions": torch.cat(predictions),
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> dict[str, Any]:
    return one_process(lambda run: behaviour(run, Classifier), tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("layout", "kind"), [*((layout, Classifier) for layout in LAYOUTS), ("pp2 vpp2 dp2", BuiltLate)])
def test_an_ordinary_module_behaves_as_on_one_process(
    layout: str, kind: type[Classifier], expected: dict[str, Any], tmp_path: Any
) -> None:
    assert 3 < expected["stopped"][0] < 20
    assert len({*expected["lrs"]}) > 2
    world_size, options = LAYOUTS[layout]
    ranks = on_ranks(lambda run: behaviour(run, kind), world_size, tmp_path, **options)
    replicas = world_size // options.get("pp", 1)
    for rank, outcome in enumerate(ranks):
        predictions = outcome.pop("predictions")
        wanted = expected["predictions"][rank // options.get("pp", 1) :: replicas]
        assert torch.equal(predictions, wanted), f"rank {rank}"
        assert_same(outcome, {key: value for key, value in expected.items() if key != "predictions"})
    # Callbacks decide by these: they must not differ in a single bit between ranks.
    assert all(outcome["evaluated"] == ranks[0]["evaluated"] for outcome in ranks)
