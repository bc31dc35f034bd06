"""Uneven splits under the Trainer: every layout trains the same model, and the model says what its ends cost."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import MegatronStrategy
from lightning_megatron.models import GPTConfig, GPTModule
from lightning_megatron.models.gpt import GPT
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.pipeline.partition import layers_of_stages
from lightning_megatron.strategy.options import check_module
from lightning_megatron.testing import run_distributed
from tests.launch.test_cli import parsed
from tests.parity.harness import CONFIGS, Outcome, reference_run, strategy_run

CLASS = "--trainer.strategy=lightning_megatron.MegatronStrategy"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven": (2, {"pp": 2, "pipeline_layout": [3, 1]}),
    "all layers on the first of two": (2, {"pp": 2, "pipeline_layout": "4,0"}),
    "ends alone": (3, {"pp": 3, "pipeline_layout": "0,4,0"}),
    "a stage with nothing to train": (3, {"pp": 3, "pipeline_layout": [4, 0, 0]}),
    "interleaved, uneven": (2, {"pp": 2, "vpp": 2, "pipeline_layout": "2,0,1*2"}),
    "split backward, uneven": (3, {"pp": 3, "schedule": "zbh1", "pipeline_layout": "1,0,3"}),
    "a V, uneven": (2, {"pp": 2, "vpp": 2, "schedule": "zbv", "pipeline_layout": "1,2,0,1"}),
    "by cost": (2, {"pp": 2, "vpp": 2, "pipeline_layout": "auto"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", CONFIGS)
def test_one_step_under_an_uneven_split_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    config, precision = CONFIGS[model], "64-true"

    def run() -> Outcome:
        return strategy_run(config, options | {"micro_batch_size": 4}, optimizer="sgd", precision=precision, steps=1)

    expected = reference_run(config, optimizer="sgd", dtype=torch.float64, steps=1)
    for outcome in run_distributed(run, world_size):
        assert outcome.final.keys() == expected.final.keys()
        for name, value in expected.final.items():
            assert torch.allclose(outcome.final[name], value, rtol=1e-9, atol=1e-11), f"{name} differs from one process"
        torch.testing.assert_close(torch.tensor(outcome.norms), torch.tensor(expected.norms), rtol=1e-6, atol=0)


def test_a_gpt_knows_the_cost_of_its_head_by_flops() -> None:
    config = GPTConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=4096, max_seq_len=32)
    seq_len = config.max_seq_len
    head = 6 * 64 * 4096
    layer = (config.flops_per_token(seq_len) - head) / 8
    assert config.head_cost() == pytest.approx(head / layer)
    model = GPT(config, seed=0)
    assert (model.first_cost, model.last_cost) == (0, config.head_cost())
    assert [len(stage) for stage in layers_of_stages(8, 4, "auto", last_cost=model.last_cost)] == [2, 3, 3, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pp": 4, "pipeline_layout": [2, 2, 2]}, r"\[2, 2, 2\] has 3 numbers for pp\(4\) \* vpp\(1\) = 4 pipeline stages"),
        ({"pp": 2, "pipeline_layout": "2,3"}, r"\[2, 3\] sums to 5, but the model has 4 layers"),
        ({"pp": 2, "pipeline_layout": "2;2"}, "'2;2' is no number of layers"),
        ({"pp": 8}, r"pp\(8\) \* vpp\(1\) = 8 pipeline stages.* a pipeline_layout may have zeros"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_any_process_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_module(GPTModule(CONFIGS["gpt2_tied"]), MegatronStrategy(**options).parallelism)


def test_fewer_layers_than_stages_are_legal_when_the_layout_says_so() -> None:
    for layout in ([1, 1, 1, 0, 0, 0, 0, 1], "0*4,1*4", "auto"):
        check_module(GPTModule(CONFIGS["gpt2_tied"]), MegatronStrategy(pp=8, pipeline_layout=layout).parallelism)


class Shares(PipelineModel):
    """Four layers of which two hold one weight; or the head holds that of a layer."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__()
        self.inlet, self.outlet = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.get_submodule(other).weight = self.get_submodule(one).weight

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.inlet(x)

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.outlet(hidden)


class Holder(L.LightningModule):
    def __init__(self, model: PipelineModel) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).sum()


@pytest.mark.parametrize(
    ("one", "other", "options"),
    [
        ("layers.0", "layers.3", {"pp": 2}),
        ("layers.0", "layers.1", {"pp": 2, "vpp": 2}),
        ("layers.0", "outlet", {"pp": 2}),
        ("layers.3", "inlet", {"pp": 2}),
    ],
)
def test_a_weight_that_two_ranks_would_train_apart_is_refused(one: str, other: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are one parameter, but pipeline ranks") as error:
        check_module(Holder(Shares(one, other)), MegatronStrategy(**options).parallelism)
    assert f".{one}.weight" in str(error.value)
    assert f".{other}.weight" in str(error.value)


@pytest.mark.parametrize(
    ("one", "other", "options"),
    [
        ("layers.0", "layers.1", {"pp": 2}),
        ("layers.0", "layers.2", {"pp": 2, "vpp": 2}),
        ("layers.3", "outlet", {"pp": 2}),
        ("layers.0", "layers.3", {"pp": 2, "pipeline_layout": [4, 0]}),
        ("inlet", "outlet", {"pp": 4}),
    ],
)
def test_a_weight_may_be_shared_on_one_rank_and_by_the_ends(one: str, other: str, options: dict[str, Any]) -> None:
    check_module(Holder(Shares(one, other)), MegatronStrategy(**options).parallelism)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("5,8,8,7", (5, 8, 8, 7)), ("[5, 8, 8, 7]", (5, 8, 8, 7)), ("7*4", (7, 7, 7, 7)), ("auto", "auto"), ("null", None)],
)
def test_the_command_line_takes_every_form_of_a_layout(written: str, meant: object) -> None:
    strategy = parsed("--trainer.devices=4", CLASS, "--trainer.strategy.pp=4", f"--trainer.strategy.pipeline_layout={written}")
    assert strategy.parallelism.pipeline_layout == meant
