"""Parameters that are given to an optimizer after it has been laid out over the ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import MegatronStrategy
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.testing import run_distributed

MAKERS: dict[str, Any] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}
STEPS, LATE, NORM = 6, 2, 0.3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(7, 9)
        self.other = nn.Linear(9, 9, bias=False)
        self.head = nn.Linear(9, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.other(torch.tanh(self.frozen(x)))))


def batch(step: int, replica: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step * 10 + replica), dtype=torch.float64)


def thaw(net: Net, optimizer: Any) -> None:
    net.frozen.requires_grad_(True)
    optimizer.add_param_group({"params": list(net.frozen.parameters()), "lr": 0.05})


def reference(maker: str, replicas: int) -> list[Tensor]:
    net = Net().double()
    optimizer = MAKERS[maker]([*net.other.parameters(), *net.head.parameters()])
    for step in range(STEPS):
        if step == LATE:
            thaw(net, optimizer)
        optimizer.zero_grad()
        sum(net(batch(step, replica)).square().mean() for replica in range(replicas)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], NORM)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def train(maker: str, overlap: bool, fused: bool | None) -> tuple[list[Tensor], int]:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net().double()
    optimizer = MAKERS[maker]([*net.other.parameters(), *net.head.parameters()])
    config = DistributedOptimizerConfig(1e-4, overlap, overlap, fused_adam=fused)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)
    sharded.wait_in_forwards(net)
    for step in range(STEPS):
        if step == LATE:
            thaw(net, optimizer)
        sharded.last_backward()
        net(batch(step, mesh.rank)).square().mean().backward()
        sharded.backward_done()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        sharded.clip_by_norm(NORM)
        sharded.step()
        sharded.update_parameters()
    sharded.wait_parameters()
    return [p.detach().clone() for p in net.parameters()], len(optimizer.param_groups)


def can_be_late(maker: str) -> bool:
    """Whether plain torch trains a late group by it: torch 2.11 makes Adagrad's state in the constructor alone."""
    try:
        reference(maker, 1)
    except KeyError:
        return False
    return True


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_late_group_is_trained_as_plain_torch_trains_it(maker: str, overlap: bool) -> None:
    if not can_be_late(maker):
        pytest.skip(f"plain torch {torch.__version__} raises KeyError here, too")
    expected = reference(maker, 2)
    for values, num_groups in run_distributed(train, 2, maker, overlap, None):
        assert num_groups == 2
        for found, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def refuse() -> list[str]:
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=1.0)
    DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh())
    said = []
    for params in (net.head.weight, nn.Parameter(torch.zeros(3, 2))):
        with pytest.raises(ValueError, match="param") as error:
            optimizer.add_param_group({"params": params})
        said.append(str(error.value))
    assert len(optimizer.param_groups) == 1
    return said


def test_parameters_that_are_trained_already_or_not_the_modules_are_refused() -> None:
    trained, foreign = run_distributed(refuse, 1, init_process_group=False)[0]
    assert "'head.weight' is in a param group of this optimizer already" in trained
    assert "(3, 2) that is not one of the module's 5" in foreign


class Pipelined(PipelineModel):
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


class Thawing(L.LightningModule):
    """Trains the head and all layers but the first, and that one from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Pipelined()
        self.model.embed.requires_grad_(False)
        self.model.layers[0].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.model(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == LATE:
            params = [param.requires_grad_(True) for name, param in self.named_parameters() if "layers.0." in name]
            if params:  # on the stage that has the layer
                self.optimizers().add_param_group({"params": params, "lr": 0.5})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def fit(layout: dict[str, Any]) -> dict[str, Tensor]:
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = MegatronStrategy(**layout)
    x = torch.randn(5 * 8, 6, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=0.5,
    )
    trainer.fit(Thawing(), DataLoader(TensorDataset(x, torch.sin(x.sum(-1))), batch_size=8 // strategy.dp_size))
    return strategy.full_state_dict()


def test_layers_are_thawed_in_a_hook_at_any_layout() -> None:
    expected = run_distributed(fit, 1, {})[0]
    start = Pipelined().state_dict()
    assert not torch.equal(expected["model.layers.0.0.weight"], start["layers.0.0.weight"])
    assert torch.equal(expected["model.embed.weight"], start["embed.weight"])
    for world_size, layout in ((2, {}), (4, {"pp": 2, "micro_batch_size": 2})):
        for state in run_distributed(fit, world_size, layout):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
