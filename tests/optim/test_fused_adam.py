"""The fused step of Adam and AdamW (in its plain-torch form) against the optimizer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, float8
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.optim.main_values import main_values

MAKERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adam with decay": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(11, 53), nn.Linear(53, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def train(
    maker: str, steps: int, *, dtype: torch.dtype = torch.bfloat16, clip: Any = 0.5, **options: Any
) -> list[list[Tensor]]:
    """Main values after each step, of the shards on this rank."""
    alone = not torch.distributed.is_initialized()
    mesh = Mesh() if alone else Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net(dtype)
    groups = [
        {"params": [net.up.weight, net.down.weight]},
        {"params": [net.up.bias, net.down.bias, net.scale], "lr": 5e-2, "weight_decay": 0.0},
    ]
    sharded = DistributedOptimizer(
        MAKERS[maker](groups), net.named_parameters(), mesh=mesh, config=DistributedOptimizerConfig(bucket_mb=1e-3, **options)
    )
    seen = []
    for step in range(steps):
        x = torch.randn(8, 11, generator=torch.Generator().manual_seed(step * 10 + mesh.rank)).to(dtype)
        net(x).float().square().sum().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=torch.tensor(8.0), defer=True)
        if isinstance(clip, float):
            sharded.clip_by_norm(clip)
        elif clip == "value":
            sharded.clip_by_value(0.01)
        sharded.apply_scaling()
        sharded.step()
        sharded.update_parameters()
        sharded.wait_parameters()
        with main_values(sharded):
            seen.append([shard.main.detach().clone() for shard in sharded.shards])
        seen[-1] += [param.detach().clone() for param in net.parameters()]
    return seen


def assert_close(found: list[list[Tensor]], expected: list[list[Tensor]], **tolerance: float) -> None:
    for step, (some, others) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(some, others, strict=True):
            torch.testing.assert_close(a, b, **tolerance, msg=lambda text, step=step: f"step {step}: {text}")


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("clip", [0.5, "value", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_step_is_the_optimizers_own_step(maker: str, clip: Any, dtype: torch.dtype) -> None:
    # Main values in fp32; weights in bf16 may round the other way where a main value is next to the middle.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    own = train(maker, 8, dtype=dtype, clip=clip, fused_adam=False)
    assert_close(train(maker, 8, dtype=dtype, clip=clip, fused_adam=True), own, **tolerance)


@pytest.mark.parametrize("options", [{"state_dtype": "bf16"}, {"main_param": "none"}, {"offload_fraction": 0.5}])
def test_a_fused_step_keeps_values_as_pieces_do(options: dict[str, Any]) -> None:
    # Few steps, and an atol of some roundings to bf16 of a weight: without main values one that goes the other way stays.
    own = train("adamw", 4, fused_adam=False, **options)
    assert_close(train("adamw", 4, fused_adam=True, **options), own, rtol=2e-2, atol=2e-3)


def remainders(state_dtype: str) -> None:
    copies = train("adamw", 50, fused_adam=True, state_dtype=state_dtype)
    found = train("adamw", 50, fused_adam=True, state_dtype=state_dtype, main_param="remainder")
    assert all(torch.equal(a, b) for some, others in zip(found, copies, strict=True) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "fp8"])
def test_fused_steps_on_remainders_are_bit_equal_to_those_on_fp32_copies(state_dtype: str) -> None:
    remainders(state_dtype)


def test_the_same_on_two_replicas() -> None:
    run_distributed(remainders, 2, "fp32")


def against_own(maker: str) -> None:
    own = train(maker, 4, dtype=torch.float32, fused_adam=False)
    assert_close(train(maker, 4, dtype=torch.float32, fused_adam=True), own, rtol=1e-5, atol=1e-6)


def test_replicas_step_fused_as_they_do_by_the_optimizer() -> None:
    run_distributed(against_own, 2, "adamw")


def test_step_hooks_and_schedulers_see_a_fused_step() -> None:
    net = Net(torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    config = DistributedOptimizerConfig(fused_adam=True)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh(), config=config)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    for _ in range(2):
        net(torch.ones(1, 11)).sum().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        before = [param.detach().clone() for param in net.parameters()]
        sharded.step()
        sharded.update_parameters()
        scheduler.step()
    assert calls == ["after", "after"]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))  # lr was 0 by then
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_options_that_a_fused_step_does_not_know_are_left_to_the_optimizer() -> None:
    for options in ({"amsgrad": True}, {"maximize": True}):
        net = Net(torch.float32)
        optimizer = torch.optim.AdamW(net.parameters(), **options)
        config = DistributedOptimizerConfig(fused_adam=True)
        sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh(), config=config)
        assert not sharded._stepper.reads_buffer


@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_8_bit_values_stay_what_they_are_when_they_are_widened_and_narrowed(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    wide = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-30, 20, (numel,), generator=generator)
    wide[::7] = 0.0
    narrow, scales = float8.narrowed(wide)
    again, scales_again = float8.narrowed(float8.widened(narrow, scales))
    assert torch.equal(float8.widened(narrow, scales), float8.widened(again, scales_again))
    error = (float8.widened(narrow, scales) - wide).abs()
    limit = wide.abs() / 16 + scales.repeat_interleave(256)[:numel] * 2.0**-10
    assert (error <= limit).all()


def test_a_first_moment_in_8_bits_trains_nearly_as_one_in_bf16_does() -> None:
    wide = train("adamw", 30, state_dtype="bf16", fused_adam=True)
    narrow = train("adamw", 30, state_dtype="fp8")
    start = train("adamw", 1, state_dtype="bf16", fused_adam=True)
    moved = torch.cat([(a - b).float().flatten() for a, b in zip(wide[-1], start[0], strict=True)])
    apart = torch.cat([(a - b).float().flatten() for a, b in zip(narrow[-1], wide[-1], strict=True)])
    assert apart.norm() < 0.1 * moved.norm()


def test_states_in_8_bits_are_saved_as_fp32_and_restored_to_the_same_bits() -> None:
    net = Net(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = DistributedOptimizerConfig(state_dtype="fp8")
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=Mesh(), config=config)
    net(torch.ones(1, 11).bfloat16()).sum().backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    sharded.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float8_e4m3fn}
    before = [float8.widened(state["exp_avg"], state["exp_avg_scale"]) for state in optimizer.state.values()]
    with main_values(sharded):
        for state in optimizer.state.values():
            assert state["exp_avg"].dtype == torch.float32
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    after = [float8.widened(state["exp_avg"], state["exp_avg_scale"]) for state in optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_states_in_8_bits_of_another_optimizer_are_refused_by_name() -> None:
    net = Net(torch.bfloat16)
    config = DistributedOptimizerConfig(state_dtype="fp8")
    with pytest.raises(ValueError, match="SGD"):
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), mesh=Mesh(), config=config)
