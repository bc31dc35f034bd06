"""One optimizer step under every layout equals one process: every parameter's change, the loss and the gradient norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.testing import run_distributed
from tests.parity.harness import CONFIGS, Outcome, reference_run, strategy_run

LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "tp2": (2, {"tp": 2}, 1),
    "tp4": (4, {"tp": 4}, 1),
    "tp2 without sp": (2, {"tp": 2, "sequence_parallel": False}, 1),
    "pp2": (2, {"pp": 2, "micro_batch_size": 4}, 1),
    "pp4": (4, {"pp": 4, "micro_batch_size": 4}, 1),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 4}, 1),
    "pp2 vpp2, M not a multiple of pp": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 5}, 1),
    "dp2": (2, {}, 1),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 4}, 1),
    "tp2 pp2 dp2": (8, {"tp": 2, "pp": 2, "micro_batch_size": 4}, 1),
    "accumulation 3": (2, {"pp": 2, "micro_batch_size": 4}, 3),
}
TOLERANCE = {"32-true": {"rtol": 1e-4, "atol": 1e-6}, "64-true": {"rtol": 1e-9, "atol": 1e-12}}
DTYPE = {"32-true": torch.float32, "64-true": torch.float64}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", CONFIGS)
def test_one_sgd_step_equals_one_process(model: str, layout: str) -> None:
    world_size, options, accumulate = LAYOUTS[layout]
    config = CONFIGS[model]

    def run() -> dict[str, Outcome]:
        return {
            precision: strategy_run(config, options, optimizer="sgd", precision=precision, steps=1, accumulate=accumulate)
            for precision in TOLERANCE
        }

    ranks = run_distributed(run, world_size)
    for precision, tolerance in TOLERANCE.items():
        expected = reference_run(config, optimizer="sgd", dtype=DTYPE[precision], steps=1)
        for outcome in (rank[precision] for rank in ranks):
            assert outcome.initial.keys() == expected.initial.keys()
            for name, value in expected.initial.items():
                assert torch.equal(outcome.initial[name], value), f"{name} does not start at the same bits"
            for name, value in expected.final.items():
                _assert_same_change(name, outcome, expected, tolerance)
                assert outcome.final[name].shape == value.shape
            torch.testing.assert_close(torch.tensor(outcome.norms), torch.tensor(expected.norms), **TOLERANCE["32-true"])
        losses = [sum(rank[precision].losses) for rank in ranks]
        assert all(torch.isfinite(torch.tensor(loss)) for loss in losses)
        if accumulate == 1 and "dp2" not in layout:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses * world_size), rtol=1e-5, atol=1e-6)


def _assert_same_change(name: str, outcome: Outcome, expected: Outcome, tolerance: dict[str, float]) -> None:
    change = outcome.final[name] - outcome.initial[name]
    reference = expected.final[name] - expected.initial[name]
    torch.testing.assert_close(change, reference, **tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", CONFIGS)
def test_replicas_are_bitwise_equal_after_three_adamw_steps(model: str, layout: str) -> None:
    world_size, options, accumulate = LAYOUTS[layout]
    if accumulate > 1:
        pytest.skip("24 samples make three steps of eight; accumulation is covered by the SGD test")
    config = CONFIGS[model]

    def run() -> Outcome:
        clip = {"gradient_clip_val": 0.5}
        return strategy_run(config, options, optimizer="adamw", precision="32-true", steps=3, trainer_options=clip)

    ranks = run_distributed(run, world_size)
    copies: dict[Any, set[str]] = {}
    for outcome in ranks:
        for key, bits in outcome.fingerprints.items():
            copies.setdefault(key, set()).add(bits)
    different = sorted(key for key, bits in copies.items() if len(bits) > 1)
    assert not different, f"copies differ between ranks: {different}"
    first = ranks[0].final
    for outcome in ranks[1:]:
        assert all(torch.equal(outcome.final[name], value) for name, value in first.items())
