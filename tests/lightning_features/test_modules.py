"""Modules of any make: frozen parts, buffers, batch norm, dropout, random numbers, 16-bit precision, calls outside a step."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.lightning_features.harness import (
    FEATURES,
    History,
    Regression,
    Run,
    Scenarios,
    assert_same,
    on_ranks,
    regression_data,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pp": 2, "micro_batch_size": 3}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
}
scenario = Scenarios(LAYOUTS)
TRAIN, VAL = regression_data(22, 1), regression_data(14, 2)


def fit(run: Run, module: L.LightningModule, **options: Any) -> dict[str, Any]:
    return run.fit(module, run.loader(TRAIN, 8), run.loader(VAL, 8), **({"max_epochs": 2} | options))


@scenario
def a_frozen_first_stage(run: Run) -> Any:
    module = Regression()
    for part in (module.model.embed, module.model.layers[0], module.model.layers[1]):
        part.requires_grad_(False)
    return fit(run, module, gradient_clip_val=0.2)


@scenario
def only_the_head_is_given_to_the_optimizer(run: Run) -> Any:
    class Head(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.model.head.parameters(), lr=0.05)

    return fit(run, Head())


@scenario
def only_what_trains_is_given_to_the_optimizer(run: Run) -> Any:
    class Trained(Regression):
        def configure_optimizers(self) -> Any:
            self.configured = getattr(self, "configured", 0) + 1
            optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Trained()
    for part in (module.model.embed, *list(module.model.layers)[:3]):
        part.requires_grad_(False)
    return fit(run, module)


@scenario
def groups_by_part_of_the_model(run: Run) -> Any:
    class Groups(Regression):
        def configure_optimizers(self) -> Any:
            parts = [self.model.embed, self.model.layers, self.model.head]
            groups = [{"params": part.parameters(), "lr": 0.02 * (i + 1)} for i, part in enumerate(parts)]
            return torch.optim.AdamW(groups, weight_decay=0.1)

    return fit(run, Groups())


@scenario
def thawing_at_a_later_fit(run: Run) -> Any:
    module, history = Regression(), History()
    module.model.embed.requires_grad_(False)
    trainer = run.trainer(history, max_epochs=1)
    trainer.fit(module, run.loader(TRAIN, 8))
    for param in module.model.parameters():
        param.requires_grad_(True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.loader(TRAIN, 8))
    return run.summary(trainer, module, history)


@scenario
def buffers_and_losses_of_the_module(run: Run) -> Any:
    class Weighted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0]))
            self.register_buffer("shift", torch.tensor(0.1), persistent=False)
            self.criterion = nn.SmoothL1Loss()

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return self.criterion(self.model(x * self.scale).squeeze(-1) + self.shift, y)

    return fit(run, Weighted())


@scenario
def calls_outside_of_a_step(run: Run) -> Any:
    class Looks(Regression):
        def on_validation_epoch_end(self) -> None:
            with torch.no_grad():
                self.log("probe", self.model(torch.linspace(-1, 1, 5 * FEATURES).view(5, FEATURES)).square().mean())

        def on_train_epoch_end(self) -> None:
            with torch.no_grad():
                again = [float(self.model(TRAIN[:size][0]).sum()) for size in (1, 4)]
            self.log_dict({"one": again[0], "four": again[1]})

    return fit(run, Looks())


@scenario
def batch_norm_sees_the_statistics_of_its_batch(run: Run) -> Any:
    """With the whole batch as one micro-batch and one replica, its statistics are those of one process."""
    if run.layout is not None:
        if run.replicas > 1:
            return None
        run = Run({**run.layout, "micro_batch_size": 8}, run.folder, run.world_size)
    return fit(run, Regression(batch_norm=True))


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_modules_train_as_on_one_process(name: str, layout: str, tmp_path_factory: Any) -> None:
    if "batch_norm" in name and "dp2" in layout:
        pytest.skip("statistics are a replica's own: see the next test")
    scenario.compare(name, layout, tmp_path_factory.getbasetemp() / "modules")


def test_replicas_validate_with_the_same_running_statistics(tmp_path: Any) -> None:
    class Keeps(Regression):
        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def run_it(run: Run) -> Any:
        module = Keeps(batch_norm=True)
        fit(run, module)
        return module.seen

    ranks = on_ranks(run_it, 2, tmp_path, micro_batch_size=4)
    assert ranks[0]
    assert_same(ranks[1], ranks[0], tolerance=0.0)


class Noisy(Regression):
    """Draws from every generator before the model call, and has dropout in its layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.4)
        self.draws: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        self.draws.append((batch_idx, float(noise)))
        loss = self.loss([batch[0] + 0.1 * noise, batch[1]])
        torch.rand(3), random.random(), np.random.rand()  # only the last stage gets here
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("drawn_between_steps", torch.rand(()) + random.random() + float(np.random.rand()))


def test_random_numbers_and_dropout_do_not_depend_on_the_pipeline(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        L.seed_everything(7, verbose=False)
        module = Noisy()
        summary = fit(run, module)
        return summary, sorted(set(module.draws))

    whole = on_ranks(run_it, 1, tmp_path, micro_batch_size=2)[0]
    assert len({noise for _, noise in whole[1]}) > 10
    for layout in ({"pp": 2}, {"pp": 2, "vpp": 2}):
        for summary, draws in on_ranks(run_it, 2, tmp_path, micro_batch_size=2, **layout):
            assert draws == whole[1]
            assert_same(summary, whole[0])


def test_replicas_draw_different_numbers(tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        L.seed_everything(7, verbose=False)
        module = Noisy()
        fit(run, module)
        return {noise for _, noise in module.draws}

    ranks = on_ranks(run_it, 4, tmp_path, pp=2)
    assert ranks[0] == ranks[1]
    assert not ranks[0] & ranks[2]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_a_regression_on_fp32_inputs_trains_in_16_bit_as_in_32(norm: bool, tmp_path: Any) -> None:
    def run_it(run: Run) -> Any:
        outcomes = {}
        for precision in ("32-true", "bf16-mixed", "bf16-true"):
            module, loader = Regression(lr=0.03, batch_norm=norm), run.loader(regression_data(32, 1), 16)
            summary = run.fit(module, loader, loader, max_epochs=4, precision=precision)
            losses = [epoch["val_loss"] for epoch in summary["evaluated"]]
            outcomes[precision] = losses, {param.dtype for param in module.model.layers.parameters()}
        return outcomes

    layouts = [(1, {}), (2, {"pp": 2, "micro_batch_size": 8})]
    for outcomes in (rank for size, layout in layouts for rank in on_ranks(run_it, size, tmp_path, **layout)):
        expected, _ = outcomes.pop("32-true")
        assert expected[-1] < expected[0]
        for losses, dtypes in outcomes.values():
            assert torch.bfloat16 in dtypes
            assert losses == pytest.approx(expected, rel=0.1)
