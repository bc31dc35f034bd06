"""Split backwards together with the other axes, precisions and Trainers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import run_distributed
from tests.parity.harness import CONFIGS, Outcome, ParityModule, Samples, reference_run, strategy_run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 zbh1": (4, {"tp": 2, "pp": 2, "schedule": "zbh1"}),
    "tp2 without sp, zbv": (4, {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zbv", "sequence_parallel": False}),
    "tp2 zbv": (4, {"tp": 2, "pp": 2, "vpp": 2, "schedule": "zbv"}),
    "dp2 zbh1": (4, {"pp": 2, "schedule": "zbh1"}),
    "dp2 zbv": (4, {"pp": 2, "vpp": 2, "schedule": "zbv"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", CONFIGS)
def test_one_sgd_step_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    config = CONFIGS[model]

    def run() -> Outcome:
        return strategy_run(config, {"micro_batch_size": 3} | options, optimizer="sgd", precision="64-true", steps=1)

    expected = reference_run(config, optimizer="sgd", dtype=torch.float64, steps=1)
    for outcome in run_distributed(run, world_size):
        for name, value in expected.final.items():
            change, reference = outcome.final[name] - outcome.initial[name], value - expected.initial[name]
            torch.testing.assert_close(change, reference, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("model", CONFIGS)
def test_a_split_backward_gives_the_bits_of_a_whole_one(model: str, precision: str) -> None:
    def run() -> list[Outcome]:
        common: dict[str, Any] = {"optimizer": "adamw", "precision": precision, "steps": 3}
        layouts = [{"pp": 2, "schedule": schedule, "micro_batch_size": 2} for schedule in ("1f1b", "zbh1")]
        return [strategy_run(CONFIGS[model], layout, **common) for layout in layouts]

    for whole, parted in run_distributed(run, 2):
        assert whole.losses == parted.losses
        assert all(torch.equal(parted.final[name], value) for name, value in whole.final.items())


def test_a_later_trainer_goes_on_with_a_v_that_auto_laid() -> None:
    config = CONFIGS["gpt2_tied"]

    def run() -> list[str]:
        module = ParityModule(config, optimizer="sgd", dtype=torch.float32)
        styles = []
        for options in ({"num_microbatches": 1}, {"micro_batch_size": 4}):
            strategy = MegatronStrategy(pp=2, vpp=2, **options)
            quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
            trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, **quiet)
            trainer.fit(module, DataLoader(Samples(config.vocab_size), batch_size=8))
            styles.append(strategy.parallelism.placement)
            assert strategy.is_last_stage == (torch.distributed.get_rank() == 0)
        return styles

    assert run_distributed(run, 2) == [["v", "v"]] * 2
