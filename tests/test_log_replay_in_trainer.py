"""Log replay and metrics through a real Trainer, on a strategy that holds the whole model on the last stage."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from lightning_megatron.comm import all_reduce, broadcast_object
from lightning_megatron.log_replay import LogRecorder
from lightning_megatron.mesh import Mesh
from lightning_megatron.metrics import MetricSync
from lightning_megatron.micro_batch import split_batch
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed


def mesh_of(**sizes: int) -> Mesh:
    return Mesh.create(Parallelism(**sizes), device=torch.device("cpu"))


class StageDone(BaseException):
    pass


class TinyPipeline(ParallelStrategy):
    """Runs ``training_step`` on every stage; only the last one gets past the model. Gradients are averaged over dp."""

    is_distributed = True

    def __init__(self, mesh: Mesh, micro_batch_size: int) -> None:
        super().__init__()
        self.mesh, self.micro_batch_size, self.num_nodes = mesh, micro_batch_size, 1

    root_device = torch.device("cpu")

    @property
    def num_processes(self) -> int:
        return self.mesh.world_size

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.mesh.rank)
        self.cluster_environment.set_world_size(self.mesh.world_size)

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self.metrics = MetricSync(module, mesh=self.mesh)
        self.metrics.apply()
        self.recorder = LogRecorder(module, mesh=self.mesh)

        def unwind(*_: Any) -> None:
            if not self.mesh.pp.is_last:
                raise StageDone

        module.net.register_forward_pre_hook(unwind)
        super().setup(trainer)

    def model_to_device(self) -> None: ...

    def barrier(self, name: str | None = None) -> None:
        torch.distributed.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return broadcast_object(obj, self.mesh.world, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if reduce_op == "mean":
            return all_reduce(tensor.float(), self.mesh.dp) / self.mesh.dp.size
        return all_reduce(tensor, self.mesh.dp, getattr(torch.distributed.ReduceOp, str(reduce_op).upper()))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        total = int(all_reduce(torch.tensor(int(decision)), self.mesh.world))
        return total == self.mesh.world_size if all else total > 0

    def _run(self, name: str, batch: Any) -> list[Tensor | None]:
        parts, outputs = split_batch(batch, micro_batch_size=self.micro_batch_size), []
        with self.recorder.recording(), self.metrics.in_step():
            for index, (part, size) in enumerate(zip(parts, parts.sizes, strict=True)):
                self.recorder.begin(index, size, keep=self.mesh.pp.is_last)
                try:
                    output = getattr(self.lightning_module, name)(part)
                    outputs.append(output * (size / sum(parts.sizes)) if output is not None else None)
                except StageDone:
                    assert not self.mesh.pp.is_last
        return outputs

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        losses = [loss for loss in self._run("training_step", batch) if loss is not None]
        loss = torch.stack(losses).sum() if losses else None
        replayed = self.recorder.replay(loss)
        return replayed if loss is None else loss

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if closure_loss.requires_grad:
            closure_loss.backward()
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                parameter.grad = all_reduce(parameter.grad, self.mesh.dp) / self.mesh.dp.size
        return closure_loss

    def validation_step(self, batch: Any, *_: Any) -> None:
        self._run("validation_step", batch)
        self.recorder.replay(None)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 1)
        self.train_accuracy = BinaryAccuracy()
        self.val_metrics = MetricCollection({"acc": BinaryAccuracy(), "f1": BinaryF1Score()}, prefix="val_")
        self.manual = MeanMetric()
        self.history: list[dict[str, float]] = []

    def _loss(self, batch: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.net(batch[0]).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch[1]), logits, batch[1].long()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.log("inputs", batch[0].mean(), sync_dist=True)
        loss, logits, labels = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("largest", logits.max(), reduce_fx="max", sync_dist=True, on_epoch=True)
        self.log("positives", labels.sum().float(), reduce_fx=torch.sum, sync_dist=True, on_step=False, on_epoch=True)
        self.train_accuracy(logits.sigmoid(), labels)  # torchmetrics guesses, batch by batch, whether it gets logits
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        loss, logits, labels = self._loss(batch)
        self.val_metrics.update(logits.sigmoid(), labels)
        self.manual.update(logits)
        self.log("val_loss", loss, sync_dist=True)
        self.log_dict(self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self.log("manual", self.manual.compute())
        self.manual.reset()

    def on_train_epoch_end(self) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader(num_samples: int, batch_size: int, mesh: Mesh) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 3, generator=generator)
    data = TensorDataset(x, (x.sum(-1) > 0.3).float())
    sampler: DistributedSampler[Any] = DistributedSampler(data, mesh.dp.size, mesh.dp.rank, shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def fit(folder: str, pp: int, dp: int) -> tuple[list[dict[str, float]], list[str]]:
    """History of an epoch's callback metrics on this rank, and the warnings of torchmetrics."""
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    options |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "callbacks": [EarlyStopping("val_loss", patience=10)],
    }
    options |= {"use_distributed_sampler": False}
    mesh = mesh_of(pp=pp) if pp > 1 else Mesh()
    if pp > 1:
        options |= {"strategy": TinyPipeline(mesh, micro_batch_size=2), "devices": pp * dp}
    module = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(**options)
        # A replica's batches of 5 are cut 2 + 2 + 1; one process sees the samples of all replicas in one batch.
        replicas = dp if pp == 1 else 1
        trainer.fit(module, loader(20, 5 * replicas, mesh), loader(12, 3 * replicas, mesh))
    return module.history, [str(entry.message) for entry in caught if "before the ``update``" in str(entry.message)]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_trainer_sees_on_every_rank_what_one_process_would_have_seen(tmp_path: Any, dp: int) -> None:
    ((reference, _),) = run_distributed(lambda: fit(str(tmp_path), 1, dp), 1, init_process_group=False)
    assert len(reference) == 2
    assert {"train_loss_step", "train_acc_epoch", "val_acc", "val_f1", "manual", "positives"} < set(reference[0])
    for history, warned in run_distributed(lambda: fit(str(tmp_path), 2, dp), 2 * dp):
        assert warned == []
        for epoch, expected in zip(history, reference, strict=True):
            # Under dp, as in stock DDP, a metric's value of one step is that of the replica.
            own = {"train_acc_step", "train_acc"} if dp > 1 else set()
            compared = {name: value for name, value in expected.items() if name not in own}
            assert {name: epoch[name] for name in compared} == pytest.approx(compared, abs=1e-5)
            assert set(epoch) == set(expected)


# Lightning's own refusals must reach every stage: one that goes on alone would hang.


def refused(value: Any, **kwargs: Any) -> Callable[[], str]:
    class Wrong(Net):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss, logits, _ = self._loss(batch)
            self.log("wrong", logits if value is logits_of_the_batch else value, **kwargs)
            return loss

    def run() -> str:
        options: dict[str, Any] = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
        mesh = mesh_of(pp=2)
        trainer = Trainer(strategy=TinyPipeline(mesh, micro_batch_size=2), devices=2, **options)
        with pytest.raises((ValueError, MisconfigurationException)) as error:
            trainer.fit(Wrong(), loader(4, 4, mesh))
        return str(error.value)

    return run


logits_of_the_batch = object()


@pytest.mark.parametrize(
    ("value", "kwargs", "message"),
    [
        (logits_of_the_batch, {}, "the tensor must have a single element"),
        ("text", {}, "`str` values cannot be logged"),
        (1.0, {"reduce_fx": torch.median}, "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported"),
        (SumMetric(), {}, "not an attribute of the LightningModule"),
    ],
)
def test_what_lightning_refuses_is_refused_on_every_stage(value: Any, kwargs: dict[str, Any], message: str) -> None:
    for raised in run_distributed(refused(value, **kwargs), 2):
        assert message in raised
