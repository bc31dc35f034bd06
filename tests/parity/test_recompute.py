"""A recomputed activation changes nothing but memory: every bit of a step is the same, under every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.utils.checkpoint wants it: once, in the parent of all ranks

from lightning_megatron.layers.recompute import Recompute
from lightning_megatron.testing import run_distributed
from tests.parity.harness import GPT2_TIED, LLAMA_GQA, Outcome, strategy_run

LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank": (1, {"micro_batch_size": 4}, 1),
    "tp2": (2, {"tp": 2}, 1),
    "pp2, accumulation 3": (2, {"pp": 2, "micro_batch_size": 4}, 3),
    "pp2 vpp2": (2, {"pp": 2, "vpp": 2, "micro_batch_size": 4}, 1),
    "zbh1": (2, {"pp": 2, "schedule": "zbh1", "micro_batch_size": 4}, 1),
    "zbv": (2, {"pp": 2, "vpp": 2, "schedule": "zbv", "micro_batch_size": 4}, 1),
    "cp2": (2, {"cp": 2}, 1),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 4}, 1),
}
WAYS: list[Any] = [Recompute("full", every=2), "selective", ["mlp", "attention_core", "norm"]]


@pytest.mark.parametrize(
    ("precision", "layout"), [*(("bf16-mixed", layout) for layout in LAYOUTS), ("32-true", "one rank"), ("32-true", "tp2 pp2")]
)
def test_a_step_with_dropout_is_the_same_bit_by_bit(precision: str, layout: str) -> None:
    world_size, options, accumulate = LAYOUTS[layout]
    config = replace(GPT2_TIED if precision == "32-true" else LLAMA_GQA, hidden_dropout=0.2, attention_dropout=0.1)

    def step(way: Any) -> Outcome:
        layout = {**options, "recompute": way}
        return strategy_run(config, layout, optimizer="sgd", precision=precision, steps=1, accumulate=accumulate)

    for outcomes in run_distributed(lambda: [step(way) for way in (None, *WAYS)], world_size):
        expected = outcomes[0]
        for way, outcome in zip(WAYS, outcomes[1:], strict=True):
            assert outcome.losses == expected.losses, way
            assert outcome.norms == expected.norms, way
            different = [name for name, value in expected.final.items() if not torch.equal(outcome.final[name], value)]
            assert not different, f"{way}: {different}"
