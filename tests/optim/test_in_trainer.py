"""What the optimizer's options do to a run of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronPrecision, MegatronStrategy
from lightning_megatron.optim import DistributedOptimizerConfig, buffers
from lightning_megatron.optim.arrivals import Arrivals
from lightning_megatron.optim.loss_scale import DynamicLossScale
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.testing import run_distributed
from tests.optim.test_overlap import HeldBack

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "pp2 dp2": (4, {"pp": 2, "micro_batch_size": 2}),
    "zbh1": (2, {"pp": 2, "micro_batch_size": 2, "schedule": "zbh1"}),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
}


class Net(PipelineModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 1, bias=False)

    def first(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def last(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Module(L.LightningModule):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.model, self.optimizer_name = Net(), optimizer
        self.overflow: tuple[int, int] | None = None  # step, rank
        self.logged: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.model(batch[0]).float().squeeze(-1) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", (self.model(batch[0]).float().squeeze(-1) - batch[1]).square().mean())

    def on_after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        if self.optimizer_name == "muon":
            return torch.optim.Muon(matrices, lr=0.05)
        if self.optimizer_name == "sgd":  # AdamW's epsilon is nothing in pure fp16
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in self.parameters() if p.dim() < 2]}], lr=0.01
        )


def data() -> TensorDataset:
    """One batch again and again: what a loader repeats after a resume is not in question here."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).repeat(3, 1)
    return TensorDataset(x, torch.sin(x.sum(-1)))


def trainer(layout: dict[str, Any], config: DistributedOptimizerConfig, precision: Any, **options: Any) -> L.Trainer:
    strategy = MegatronStrategy(**layout, optimizer=config)
    kind: dict[str, Any] = {"plugins": [precision]} if isinstance(precision, MegatronPrecision) else {"precision": precision}
    defaults: dict[str, Any] = {"max_steps": 5, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    defaults |= {"enable_model_summary": False, "devices": world_size, "accelerator": "cpu", "gradient_clip_val": 0.5}
    return L.Trainer(strategy=strategy, **kind, **(defaults | options))


def loader(strategy: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8 // strategy.dp_size)


def fit(layout: dict[str, Any], config: DistributedOptimizerConfig, precision: Any, optimizer: str = "adamw") -> Any:
    module, run = Module(optimizer), trainer(layout, config, precision)
    run.fit(module, loader(run.strategy))
    assert _get_current_function_mode_stack() == []
    return run.strategy.full_state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_overlap_changes_nothing_in_a_run(optimizer: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]

    def run() -> None:
        states = [
            fit(options, DistributedOptimizerConfig(bucket_mb, overlap, overlap), "32-true", optimizer)
            for bucket_mb, overlap in ((128.0, False), (1e-9, True))
        ]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            torch.testing.assert_close(
                states[1][name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )

    run_distributed(run, world_size)


class Watch(Callback):
    """Evaluates, saves and reads weights right after each step, before anything has waited for them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.seen: list[Any] = []

    def on_train_batch_end(self, run: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kind = run.global_step % 3
        if kind == 0:
            self.seen.append(run.strategy.full_state_dict())
        elif kind == 2:
            run.save_checkpoint(f"{self.folder}/{run.global_step}")
        else:
            self.seen.append({name: float(p.detach().double().sum()) for name, p in module.named_parameters()})


@pytest.mark.parametrize("layout", ["dp2", "pp2 dp2"])
def test_evaluation_saving_and_reading_right_after_a_step_see_its_parameters(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size, options = LAYOUTS[layout]

    def run(overlap: bool) -> Any:
        folder = str(tmp_path / str(overlap))
        watch, module = Watch(folder), Module()
        config = DistributedOptimizerConfig(1e-9, overlap, overlap)
        extra = {"callbacks": [watch], "val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": 1}
        one = trainer(options, config, "32-true", **extra)
        one.fit(module, loader(one.strategy), loader(one.strategy))
        value = float(one.callback_metrics["val"])
        other = Module()
        two = trainer(options, config, "32-true")
        two.validate(other, loader(two.strategy), ckpt_path=f"{folder}/5", verbose=False)
        return watch.seen, value, float(two.callback_metrics["val"])

    plain = run_distributed(run, world_size, False)
    monkeypatch.setattr(buffers, "all_gather_single", HeldBack())
    held_back = run_distributed(run, world_size, True)
    assert repr(held_back) == repr(plain)


def overflow(folder: str, layout: dict[str, Any], name: str) -> Any:
    """Six steps; the gradient overflows on one replica in the third. Then three, and three from a checkpoint."""
    module_class = type("Overflowing", (Overflowing,), {})
    scale = {"growth_interval": 2, "hysteresis": 1}
    results = []
    for first in (6, 3):
        module = module_class()
        precision = MegatronPrecision(name, loss_scale=DynamicLossScale(2.0**8, **scale))
        run = trainer(layout, DistributedOptimizerConfig(), precision, max_steps=first)
        run.fit(module, loader(run.strategy))
        if first == 3:
            run.save_checkpoint(f"{folder}/three")
            module, precision = module_class(), MegatronPrecision(name, loss_scale=DynamicLossScale(2.0**8, **scale))
            run = trainer(layout, DistributedOptimizerConfig(), precision, max_steps=6)
            run.fit(module, loader(run.strategy), ckpt_path=f"{folder}/three")
        state = run.strategy.full_state_dict()
        results.append((module.scales, precision.state_dict(), run.strategy.num_skipped_steps, module.sums, state))
    return results


class Overflowing(Module):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.scales: list[float] = []
        self.sums: list[float] = []

    def on_after_backward(self) -> None:
        """Nothing: see ``training_step``."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2 and self.trainer.strategy.mesh.dp.is_last:
            loss = loss * 1e30  # more than fp16 has
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.scales.append(self.trainer.precision_plugin.loss_scale)
        self.sums.append(sum(float(p.detach().double().sum()) for p in self.parameters()))


@pytest.mark.parametrize(
    ("name", "layout"), [("16-mixed", "one"), ("16-mixed", "dp2"), ("16-mixed", "pp2 dp2"), ("16-true", "dp2")]
)
def test_an_overflow_on_one_replica_skips_the_step_everywhere_and_the_scale_is_resumed(
    name: str, layout: str, tmp_path: Path
) -> None:
    world_size, options = LAYOUTS[layout]
    ranks = run_distributed(overflow, world_size, str(tmp_path), options, name)
    for (scales, state, skipped, sums, weights), (late_scales, late_state, _, _, late_weights) in ranks:
        assert scales == [256, 512, 256, 256, 512, 512]
        assert late_scales == scales[3:]
        assert late_state == state
        assert skipped == 1
        assert sums[2] == sums[1] != sums[3]
        for key, value in weights.items():
            assert torch.equal(late_weights[key], value)
            assert torch.equal(ranks[0][0][4][key], value)


def logged_losses(precision: Any) -> list[float]:
    module, run = Module("sgd"), trainer({}, DistributedOptimizerConfig(), precision, max_steps=3)
    run.fit(module, loader(run.strategy))
    return module.logged


def test_the_logged_loss_is_never_scaled() -> None:
    plain = run_distributed(logged_losses, 1, "32-true")[0]
    for name in ("16-mixed", "16-true"):
        scaled = run_distributed(logged_losses, 1, MegatronPrecision(name))[0]
        assert scaled == pytest.approx(plain, rel=0.05)


VARIANTS = {
    "remainder": DistributedOptimizerConfig(main_param="remainder"),
    "host": DistributedOptimizerConfig(offload_fraction=0.5),
    "bf16 states": DistributedOptimizerConfig(state_dtype="bf16"),
    "muon": DistributedOptimizerConfig(),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_resumes_from_a_checkpoint_with_every_kind_of_main_values(variant: str, tmp_path: Path) -> None:
    optimizer = "muon" if variant == "muon" else "adamw"

    def run() -> None:
        config, states = VARIANTS[variant], []
        for first in (6, 3):
            module, one = Module(optimizer), trainer({}, config, "bf16-mixed", max_steps=first)
            one.fit(module, loader(one.strategy))
            if first == 3:
                one.save_checkpoint(f"{tmp_path}/three")
                module, one = Module(optimizer), trainer({}, config, "bf16-mixed", max_steps=6)
                one.fit(module, loader(one.strategy), ckpt_path=f"{tmp_path}/three")
            states.append(one.strategy.full_state_dict())
        for name, value in states[0].items():
            assert torch.equal(states[1][name], value), name

    run_distributed(run, 2)


def log_all() -> tuple[list[str], int, int]:
    class Logging(Module):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norms = self.trainer.strategy.module_norms(depth=3)
            self.names = sorted(norms)
            self.zeros = self.trainer.strategy.num_zero_gradients()
            total = sum(float(norm) ** 2 for norm in norms.values()) ** 0.5
            assert total == pytest.approx(float(self.trainer.strategy.grad_norm), rel=1e-6)

    module, run = Logging(), trainer({"pp": 2}, DistributedOptimizerConfig(), "32-true", max_steps=1)
    run.fit(module, loader(run.strategy))
    return module.names, module.zeros, run.strategy.num_skipped_steps


def test_norms_by_module_and_counts_of_zeros_are_the_same_on_all_stages() -> None:
    for names, zeros, skipped in run_distributed(log_all, 2):
        assert names == ["model.embed", "model.head", *(f"model.layers.{i}" for i in range(4))]
        assert (zeros, skipped) == (0, 0)


@pytest.mark.parametrize("layout", ["dp2", "pp2 dp2", "pp2 vpp2"])
def test_all_buckets_are_on_their_way_when_the_last_backward_ends(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world_size, options = LAYOUTS[layout]
    if layout == "pp2 dp2":
        options = options | {"schedule": "1f1b"}  # one that does not split the backward
    left: list[int] = []
    original = Arrivals.backward_done

    def backward_done(self: Arrivals, stage: int) -> None:
        here = [bucket for bucket in self._buckets if bucket.params and self._stage_of(bucket) == stage]
        left.append(sum(not bucket._launched for bucket in here))
        original(self, stage)

    def run() -> list[int]:
        module, one = Module(), trainer(options, DistributedOptimizerConfig(1e-9), "32-true", accumulate_grad_batches=2)
        one.fit(module, loader(one.strategy))
        return left

    def stage_of(self: Arrivals, bucket: buffers.Bucket) -> int:
        index = [b for b in self._buckets for _ in b.params]
        return next(stage for stage, params in self._stages._stages.items() if any(index[p] is bucket for p in params))

    monkeypatch.setattr(Arrivals, "backward_done", backward_done)
    monkeypatch.setattr(Arrivals, "_stage_of", stage_of, raising=False)
    stages = 2 if layout == "pp2 vpp2" else 1
    for counts in run_distributed(run, world_size):
        assert all(count > 0 for count in counts[:stages])  # the first step counts arrivals
        assert counts[stages:] == [0] * (len(counts) - stages)
        assert len(counts) == 5 * stages
