"""Parameters of an optimizer that are frozen and thawed while it trains, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.lightning_features.harness import Regression, Run, Scenarios, regression_data
from tests.optim.test_late_groups import NORM, Net, batch, can_be_late

STEPS = 8
MAKERS: dict[str, Any] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.9, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, weight_decay=0.1),
}


def groups(net: Net) -> list[dict[str, Any]]:
    """Of which one is frozen at first, and one in a part."""
    named = list(net.named_parameters())
    return [
        {"params": [pair for pair in named if pair[1].dim() == 2]},
        {"params": [p for p in named if p[1].dim() < 2], "lr": 0.1},
    ]


def before_backward(net: Net, step: int, number: int) -> None:
    """What hooks do at the start of batches, two a step."""
    if step == 2 and number == 1:
        net.other.requires_grad_(False)  # within a step, which goes on with what has come
    if step == 3 and number == 0:
        net.head.requires_grad_(False)
        net.frozen.requires_grad_(True)
    if step == 6:
        net.head.requires_grad_(True)
        net.other.requires_grad_(True)


def before_step(net: Net, step: int) -> None:
    """What a hook does between the backward and the step."""
    net.head.bias.requires_grad_(step % 2 == 0 and step not in (3, 4, 5))


def reference(maker: str, replicas: int) -> list[Tensor]:
    net = Net().double()
    optimizer = MAKERS[maker](groups(net))
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            before_backward(net, step, number)
            for replica in range(replicas):
                net(batch(2 * step + number, replica)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), NORM)
        before_step(net, step)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train(maker: str, overlap: bool, fused: bool | None) -> tuple[list[Tensor], list[int]]:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net().double()
    optimizer = MAKERS[maker](groups(net))
    config = DistributedOptimizerConfig(1e-4, overlap, overlap, fused_adam=fused)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)
    sharded.wait_in_forwards(net)
    for step in range(STEPS):
        for number in range(2):
            before_backward(net, step, number)
            if number == 1:
                sharded.last_backward()
            net(batch(2 * step + number, mesh.rank)).square().mean().backward()
        sharded.backward_done()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        sharded.clip_by_norm(NORM)
        before_step(net, step)
        sharded.step()
        sharded.update_parameters()
    sharded.wait_parameters()
    assert all(len(group["params"]) == len(group["param_names"]) for group in optimizer.param_groups)
    return [p.detach().clone() for p in net.parameters()], [len(group["params"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_frozen_parameters_stay_and_thawed_ones_train_as_in_plain_torch(maker: str, overlap: bool, replicas: int) -> None:
    if not can_be_late(maker):
        pytest.skip("this torch makes the states of that optimizer in its constructor alone")
    expected = reference(maker, replicas)
    for values, members in run_distributed(train, replicas, maker, overlap, None):
        assert replicas > 1 or members == [3, 2]
        for found, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def frozen_under(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 4).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    config = DistributedOptimizerConfig(**options)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh(), config=config)
    seen = []
    for step in range(4):
        net.weight.requires_grad_(step != 2)
        net(torch.ones(2, 6).bfloat16()).float().square().mean().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None, defer=True)
        sharded.apply_scaling()
        sharded.step()
        sharded.update_parameters()
        seen.append((net.weight.detach().clone(), net.bias.detach().clone()))
    weights, biases = zip(*seen, strict=True)
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert not torch.equal(biases[1], biases[2])
    counts = {shard.name: float(optimizer.state[shard.main]["step"]) for shard in sharded.shards}
    assert counts == {"weight": 3.0, "bias": 4.0}


@pytest.mark.parametrize(
    "options",
    [{"fused_adam": True}, {"main_param": "remainder"}, {"offload_fraction": 1.0}, {"fused_adam": True, "state_dtype": "fp8"}],
)
def test_frozen_parameters_stay_however_main_values_and_states_are_kept(options: dict[str, Any]) -> None:
    run_distributed(frozen_under, 1, options, init_process_group=False)


scenario = Scenarios(
    {
        "megatron": (1, {}),
        "dp2": (2, {}),
        "pp2": (2, {"pp": 2, "micro_batch_size": 4}),
        "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2, "micro_batch_size": 2}),
    }
)
DATA = regression_data(48, 1)


class Freezes(Regression):
    """Trains the head in the first two epochs, and what is before it from the second one on."""

    def __init__(self) -> None:
        super().__init__()
        self.require("embed", "layers.1", "layers.2", "layers.3", on=False)

    def require(self, *parts: str, on: bool) -> None:
        """Freeze or thaw what this rank has of these parts."""
        for name, param in self.model.named_parameters():
            if name.startswith(parts):
                param.requires_grad_(on)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.require("embed", "layers", on=True)
        if self.current_epoch == 2:
            self.require("head", "layers.0", on=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class Zeroes(Freezes):
    """Has a hook that would clear the gradients of parameters that the strategy has made by then."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


def frozen_and_thawed_in_hooks(run: Run, kind: type[Freezes], accumulate: int) -> Any:
    return run.fit(kind(), run.loader(DATA, 8), max_epochs=3, accumulate_grad_batches=accumulate, gradient_clip_val=1.0)


@scenario
def every_batch(run: Run) -> Any:
    return frozen_and_thawed_in_hooks(run, Freezes, 1)["parameters"]


@scenario
def accumulated(run: Run) -> Any:
    return frozen_and_thawed_in_hooks(run, Freezes, 3)["parameters"]


@scenario
def zeroed_by_hand(run: Run) -> Any:
    return frozen_and_thawed_in_hooks(run, Zeroes, 2)["parameters"]


class Resumed(Freezes):
    """Thaws where a resumed run does, too."""

    def on_fit_start(self) -> None:
        self.model.requires_grad_(True)


@scenario
def resumed_after_the_thaw(run: Run) -> Any:
    first = Freezes()
    trainer = run.trainer(max_epochs=2)
    trainer.fit(first, run.loader(DATA, 8))
    path = f"{run.folder}/thawed.ckpt"
    trainer.save_checkpoint(path)
    module = Resumed()
    again = run.trainer(max_epochs=3)
    again.fit(module, run.loader(DATA, 8), ckpt_path=path)
    return run.parameters(again, module)


@pytest.mark.parametrize("layout", scenario.layouts)
@pytest.mark.parametrize("name", scenario.names)
def test_layers_frozen_and_thawed_by_hooks_train_as_on_one_process(
    name: str, layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scenario.compare(name, layout, tmp_path_factory.mktemp("frozen"))
