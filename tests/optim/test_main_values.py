"""Main values as remainders, states in bf16 and anything in host memory, against plain fp32 copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, pieces
from lightning_megatron.optim.remainder import Remainder
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.optim.main_values import main_values


def round_trip(bits: Tensor) -> None:
    wide = bits.to(torch.int32).view(torch.float32)
    high = torch.empty_like(wide, dtype=torch.bfloat16)
    rest = Remainder(wide.numel(), device=torch.device("cpu"))
    rest.split(wide, high, 0, wide.numel())
    assert torch.equal(high, wide.to(torch.bfloat16))
    assert torch.equal(rest.join(high, 0, wide.numel()).view(torch.int32), wide.view(torch.int32))


@pytest.mark.parametrize("base", [0x0000_0000, 0x3F80_0000, 0x3F81_0000, -0x4080_0000, 0x7F00_0000, -0x8000_0000, 0x7F7F_0000])
def test_a_bf16_value_and_its_remainder_are_the_fp32_value_for_every_remainder(base: int) -> None:
    round_trip(torch.arange(base, base + 2**17 - 1 if base < 0x7F7F_0000 else base + 2**16, dtype=torch.int64))


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_any_number_of_values_can_be_split_and_joined(numel: int) -> None:
    round_trip(torch.randint(-(2**31), 0x7F7F_FFFF, (numel,), generator=torch.Generator().manual_seed(numel)) & ~0x4000_0000)


class Lamb1(torch.optim.Optimizer):
    """An optimizer of a user's own, with a step count that is a group's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.1)
                p.sub_(momentum / (1 - 0.9 ** group["step"]), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "user": lambda params: Lamb1(params, lr=1e-2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(11, 53), nn.Linear(53, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def groups(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": [net.up.weight, net.down.weight]},
        {"params": [net.up.bias, net.down.bias, net.scale], "lr": 5e-2},
    ]


def train(steps: int, optimizer: str, **options: Any) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    alone = not torch.distributed.is_initialized()
    mesh = Mesh() if alone else Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net()
    config = DistributedOptimizerConfig(bucket_mb=200 * 4 / 2**20, **options)
    sharded = DistributedOptimizer(OPTIMIZERS[optimizer](groups(net)), net.named_parameters(), mesh=mesh, config=config)
    seen = []
    for step in range(steps):
        x = torch.randn(8, 11, generator=torch.Generator().manual_seed(step * 10 + mesh.rank)).bfloat16()
        net(x).float().square().mean().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=torch.tensor(1.0))
        sharded.clip_by_norm(0.5)
        sharded.step()
        sharded.update_parameters()
        sharded.wait_parameters()
        seen.append([p.detach().clone() for p in net.parameters()])
    with main_values(sharded):
        mains = {f"{shard.name}[{shard.start}]": shard.main.detach().clone() for shard in sharded.shards}
    values = [p.tolist() for p in net.parameters()]
    assert all(other == values for other in all_gather_object(values, mesh.world))
    return seen, mains


VARIANTS = {
    "remainder": {"main_param": "remainder"},
    "copies on the host": {"offload_fraction": 1.0},
    "half on the host": {"offload_fraction": 0.5},
    "remainders on the host": {"main_param": "remainder", "offload_fraction": 1.0},
}


def compare(variant: str, optimizer: str, steps: int, piece_numel: int) -> None:
    pieces.PIECE_NUMEL = piece_numel
    pieces.PieceStepper.__init__.__kwdefaults__["numel"] = piece_numel
    plain, plain_mains = train(steps, optimizer)
    other, other_mains = train(steps, optimizer, **VARIANTS[variant])
    for step, (expected, found) in enumerate(zip(plain, other, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), f"step {step}"
    assert plain_mains.keys() == other_mains.keys()
    assert all(torch.equal(value, other_mains[name]) for name, value in plain_mains.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_where_main_values_are_kept_changes_no_bit(variant: str, optimizer: str) -> None:
    run_distributed(compare, 1, variant, optimizer, 6, 64, init_process_group=False)


@pytest.mark.parametrize("piece_numel", [100, 2**25])
def test_fifty_steps_with_remainders_are_those_with_copies_bit_for_bit(piece_numel: int) -> None:
    run_distributed(compare, 2, "remainder", "adamw", 50, piece_numel)


def narrow_states(optimizer: str) -> tuple[float, set[torch.dtype]]:
    plain, _ = train(10, optimizer)
    net = Net()
    config = DistributedOptimizerConfig(state_dtype="bf16")
    sharded = DistributedOptimizer(OPTIMIZERS[optimizer](groups(net)), net.named_parameters(), mesh=Mesh(), config=config)
    for step in range(10):
        x = torch.randn(8, 11, generator=torch.Generator().manual_seed(step * 10)).bfloat16()
        net(x).float().square().mean().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=torch.tensor(1.0))
        sharded.clip_by_norm(0.5)
        sharded.step()
        sharded.update_parameters()
    states = [value for state in sharded.optimizer.state.values() for key, value in state.items() if key != "step"]
    start = list(Net().parameters())
    moved = torch.cat([(a - b).flatten() for a, b in zip(plain[-1], start, strict=True)]).float()
    differs = torch.cat([(a - b).flatten() for a, b in zip(plain[-1], net.parameters(), strict=True)]).float()
    return (differs.norm() / moved.norm()).item(), {value.dtype for value in states}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "momentum"])
def test_states_in_bf16_train_almost_as_those_in_fp32(optimizer: str) -> None:
    difference, dtypes = narrow_states(optimizer)
    assert dtypes == {torch.bfloat16}
    assert difference < 0.1


def test_remainders_of_fp16_are_refused_by_name() -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    config = DistributedOptimizerConfig(main_param="remainder")
    with pytest.raises(ValueError, match=r"'p' is torch.float16, but main_param='remainder'"):
        DistributedOptimizer(torch.optim.SGD([param]), [("p", param)], mesh=Mesh(), config=config)


def test_fp32_parameters_are_their_own_main_parameters_whatever_is_asked_for() -> None:
    param = nn.Parameter(torch.zeros(3))
    config = DistributedOptimizerConfig(main_param="remainder")
    sharded = DistributedOptimizer(torch.optim.SGD([param]), [("p", param)], mesh=Mesh(), config=config)
    assert sharded.shards[0].main.data_ptr() == param.data_ptr()


@pytest.mark.parametrize("variant", VARIANTS)
def test_main_values_are_read_anew_after_a_weights_only_load_and_can_be_restored(variant: str) -> None:
    param = nn.Parameter(torch.ones(9, dtype=torch.bfloat16))
    config = DistributedOptimizerConfig(**VARIANTS[variant])
    sharded = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], mesh=Mesh(), config=config)
    with main_values(sharded), torch.no_grad():
        sharded.shards[0].main.fill_(1.001)
    with main_values(sharded):
        assert torch.equal(sharded.shards[0].main, torch.full((9,), 1.001))
    with torch.no_grad():
        param.fill_(2.0)
    sharded.refresh_main()
    with main_values(sharded):
        assert torch.equal(sharded.shards[0].main, torch.full((9,), 2.0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("main_param", "fp64"),
        ("state_dtype", "int8"),
        ("offload_fraction", 1.5),
        ("offload_fraction", -0.1),
        ("grad_reduce_dtype", "fp16"),
        ("nonfinite", "warn"),
    ],
)
def test_options_that_do_not_exist_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        DistributedOptimizerConfig(**{name: value})
