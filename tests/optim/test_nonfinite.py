"""Gradients that are not finite, the loss scale of fp16, and the one multiplication."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.head = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def make(parallelism: Parallelism | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    alone = not torch.distributed.is_initialized()
    mesh = Mesh() if alone else Mesh.create(parallelism or Parallelism(), device=torch.device("cpu"))
    net = Net().to(dtype)
    config = DistributedOptimizerConfig(bucket_mb=100 * 4 / 2**20, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)


def finish(sharded: DistributedOptimizer, **options: Any) -> None:
    sharded.reduce_gradients()
    sharded.finish_gradients(**({"num_tokens": None} | options))


def inputs(rank: int = 0) -> Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))


def plant(bad_rank: int, policy: str, parallelism: Parallelism) -> Any:
    net, sharded = make(parallelism, nonfinite=policy)
    before = [p.detach().clone() for p in net.parameters()]
    for number in range(2):
        net(inputs(sharded.mesh.rank)).sum().backward()
        if number == 0 and sharded.mesh.rank == bad_rank:
            net.layers[1].weight.grad[3, 3] = torch.nan
            net.layers[2].bias.grad[0] = torch.inf
        if policy == "raise":
            with pytest.raises(RuntimeError) as error:
                finish(sharded)
            return str(error.value)
        finish(sharded)
        assert sharded.should_skip == (number == 0 and policy == "skip")
        if not sharded.should_skip:
            sharded.optimizer.step()
        sharded.update_parameters()
        sharded.wait_parameters()
        if number == 0 and policy == "skip":
            assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
            assert sharded.optimizer.state == {}
        assert not sharded.should_skip
    finite = all(bool(p.isfinite().all()) for p in net.parameters())
    return sharded.num_skipped, finite


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_raise_names_the_first_parameter_and_the_rank_whose_gradient_it_is(bad_rank: int) -> None:
    for message in run_distributed(plant, 3, bad_rank, "raise", Parallelism()):
        assert message.startswith(f"[dp={bad_rank}] the gradient of 'layers.1.weight' is not finite (nan or inf); 2 parameter")


def test_raise_says_the_stage_and_the_tensor_parallel_rank() -> None:
    for message in run_distributed(plant, 4, 3, "raise", Parallelism(pp=2, order="pp-dp-tp-cp")):
        assert message.startswith("[pp=0 dp=1] the gradient of 'layers.1.weight'"), message


def raise_after_the_update(bad_rank: int, clips: str) -> str:
    """A fused step is on its way before the host looks: it must have changed nothing."""
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net()
    config = DistributedOptimizerConfig(bucket_mb=100 * 4 / 2**20, fused_adam=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)
    for number in range(2):
        net(inputs(mesh.rank)).sum().backward()
        before = [p.detach().clone() for p in net.parameters()]
        states = [{k: v.clone() for k, v in optimizer.state[shard.main].items()} for shard in sharded.shards if number]
        if number and mesh.rank == bad_rank:
            net.layers[1].weight.grad[3, 3] = torch.inf
            net.layers[2].bias.grad[0] = -torch.inf
        finish(sharded, num_tokens=torch.tensor(4.0), defer=True)
        with pytest.raises(RuntimeError) if number else nullcontext() as error:
            if clips == "norm":
                sharded.clip_by_norm(1.0)
            elif clips == "value":
                sharded.clip_by_value(1.0)
            sharded.step()
        if not number:
            sharded.update_parameters()
            sharded.wait_parameters()
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    for shard, state in zip(sharded.shards, states, strict=True):
        assert state["step"] == 1.0
        assert all(torch.equal(optimizer.state[shard.main][name], value) for name, value in state.items())
    return str(error.value)


@pytest.mark.parametrize("clips", ["", "norm", "value"])
def test_raise_by_a_fused_step_has_changed_nothing_and_names_the_same(clips: str) -> None:
    for message in run_distributed(raise_after_the_update, 2, 1, clips):
        assert message.startswith("[dp=1] the gradient of 'layers.1.weight' is not finite (nan or inf); 2 parameter"), message


def test_raise_works_on_one_process() -> None:
    assert plant(0, "raise", Parallelism()).startswith("[rank=0] the gradient of 'layers.1.weight'")


@pytest.mark.parametrize("world_size", [1, 3])
def test_skip_leaves_everything_as_it_was_on_all_ranks_and_counts(world_size: int) -> None:
    assert run_distributed(plant, world_size, 0, "skip", Parallelism()) == [(1, True)] * world_size


def test_ignore_goes_on() -> None:
    assert run_distributed(plant, 2, 1, "ignore", Parallelism()) == [(0, False)] * 2


def scaled_step(loss_scale: float, overflow_rank: int | None) -> tuple[bool, list[Any], float]:
    net, sharded = make(dtype=torch.float16)
    (net(inputs(sharded.mesh.rank).half()).float().square().sum() * loss_scale).backward()
    if sharded.mesh.rank == overflow_rank:
        net.layers[0].weight.grad[0, 0] = torch.inf
    finish(sharded, num_tokens=torch.tensor(8.0), loss_scale=loss_scale)
    if not sharded.should_skip:
        sharded.optimizer.step()
    skipped = sharded.should_skip
    sharded.update_parameters()
    sharded.wait_parameters()
    values = [p.tolist() for p in net.parameters()]
    assert all(other == values for other in all_gather_object(values, sharded.mesh.world))
    return skipped, values, sharded.grad_norm.item()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    start = [p.half().tolist() for p in Net().parameters()]
    for skipped, values, _ in run_distributed(scaled_step, 3, 1024.0, 2):
        assert skipped
        assert values == start


def test_the_loss_scale_changes_nothing_but_the_scale() -> None:
    (_, plain, norm), (_, scaled, scaled_norm) = (run_distributed(scaled_step, 2, scale, None)[0] for scale in (1.0, 1024.0))
    assert scaled_norm == pytest.approx(norm, rel=2e-3)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-3, atol=2e-3)


def test_at_a_scale_of_one_a_gradient_that_is_not_finite_is_no_overflow() -> None:
    net, sharded = make(dtype=torch.float16)
    net(inputs().half()).sum().backward()
    net.head.bias.grad[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"'head.bias' is not finite"):
        finish(sharded, loss_scale=1.0)


@pytest.mark.parametrize("main_params", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.01, 1e9])
def test_a_deferred_division_gives_the_same_gradients(clip: float | None, dtype: torch.dtype, main_params: bool) -> None:
    found = []
    for defer in (False, True):
        net = Net().to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh(), main_params=main_params)
        net(inputs().to(dtype)).sum().backward()
        finish(sharded, num_tokens=torch.tensor(7.0), loss_scale=4.0, defer=defer)
        if clip is not None:
            sharded.clip_by_norm(clip)
        sharded.apply_scaling()
        found.append([shard.main.grad.clone() for shard in sharded.shards])
    tolerance = 1e-6 if found[0][0].dtype == torch.float32 else 1e-2
    for now, later in zip(*found, strict=True):
        torch.testing.assert_close(now, later, rtol=tolerance, atol=0.0)


def test_value_clipping_comes_after_a_deferred_division() -> None:
    net, sharded = make()
    net(inputs()).sum().backward()
    finish(sharded, num_tokens=torch.tensor(1000.0), defer=True)
    expected = [(p.grad / 1000).flatten().clamp(-1e-3, 1e-3) for p in net.parameters()]
    sharded.clip_by_value(1e-3)
    by_param = {shard.name: shard.main.grad for shard in sharded.shards}
    for (name, _), value in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(by_param[name], value)


def watch() -> tuple[dict[str, float], int, float]:
    net, sharded = make()
    with torch.no_grad():
        net.layers[2].weight[:4] = 0.0
    (net(inputs(sharded.mesh.rank)) * torch.tensor([1.0, 0.0])).sum().backward()
    finish(sharded, num_tokens=torch.tensor(2.0))
    norms = {name: norm.item() for name, norm in sharded.module_norms(depth=2).items()}
    zeros = int(sharded.num_zero_gradients())
    sharded.clip_by_norm(1e-4)
    assert {name: norm.item() for name, norm in sharded.module_norms(depth=2).items()} == norms
    return norms, zeros, sharded.grad_norm.item()


def test_module_norms_and_zero_counts_are_those_of_one_process() -> None:
    net = Net()
    with torch.no_grad():
        net.layers[2].weight[:4] = 0.0
    for rank in (0, 1):
        (net(inputs(rank)) * torch.tensor([1.0, 0.0])).sum().backward()
    for norms, zeros, total in run_distributed(watch, 2):
        assert list(norms) == ["head", "layers.0", "layers.1", "layers.2"]
        for name, norm in norms.items():
            grads = [p.grad.flatten() / 4 for p in net.get_submodule(name).parameters()]
            assert norm == pytest.approx(torch.cat(grads).norm().item(), rel=1e-5)
        assert total == pytest.approx(sum(norm**2 for norm in norms.values()) ** 0.5, rel=1e-12)
        assert zeros == sum(int((p.grad == 0).sum()) for p in net.parameters())
        assert zeros >= 10
