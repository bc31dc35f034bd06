"""Reductions that start beside the backward, and parameters that arrive beside the next forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from lightning_megatron.comm import all_gather_object, all_gather_single
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, buffers
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

ONE_EACH = DistributedOptimizerConfig(bucket_mb=1e-9)


class Twin(nn.Module):
    """Two branches that may run in either order, a tied weight that is used outside of its module, an unused one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor, swapped: bool = False) -> Tensor:
        hidden = self.embed(x)
        if swapped:
            hidden = torch.tanh(self.right(hidden)) + self.left(hidden)
        else:
            hidden = self.left(hidden) + torch.tanh(self.right(hidden))
        return nn.functional.linear(hidden, self.embed.weight)


def tokens(rank: int) -> Tensor:
    return torch.arange(rank, rank + 4) % 7


def make(net: nn.Module, config: DistributedOptimizerConfig = ONE_EACH, **options: Any) -> DistributedOptimizer:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu")) if torch.distributed.is_initialized() else Mesh()
    sharded = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.5), net.named_parameters(), mesh=mesh, config=config, **options
    )
    sharded.wait_in_forwards(net)
    return sharded


def test_a_model_and_its_gradients_are_let_go_with_its_optimizer() -> None:
    net = Twin()
    sharded = make(net)
    net(tokens(0)).sum().backward()
    step(sharded)
    alive = [weakref.ref(param) for param in net.parameters()] + [weakref.ref(sharded)]
    del net, sharded
    gc.collect()
    assert [one() for one in alive] == [None] * len(alive)


def step(sharded: DistributedOptimizer) -> None:
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    sharded.optimizer.step()
    sharded.update_parameters()


def record_launches(launched: list[int], sharded: DistributedOptimizer) -> None:
    original = buffers.Bucket.launch_reduce

    def launch(self: buffers.Bucket) -> None:
        launched.append(sharded._buckets.index(self))
        original(self)

    buffers.Bucket.launch_reduce = launch  # type: ignore[method-assign]


def train_twin(overlap: bool) -> tuple[list[list[int]], list[int], dict[str, Tensor]]:
    net = Twin()
    sharded = make(net, DistributedOptimizerConfig(1e-9, overlap_grad_reduce=overlap, overlap_param_gather=overlap))
    rank, launched, by_step, early = sharded.mesh.rank, [], [], []
    record_launches(launched, sharded)
    for number in range(4):
        del launched[:]
        swapped = rank == 1 and number % 2 == 1
        for backward in range(2):
            if backward == 1:
                sharded.last_backward()
            if number == 2 and rank == 0 and backward == 1:
                continue  # this rank's last micro-batch has no token
            net(tokens(rank + backward), swapped).square().mean().backward()
        early.append(len(launched))
        sharded.backward_done()
        step(sharded)
        by_step.append(list(launched))
    sharded.wait_parameters()
    return by_step, early, {name: p.detach().clone() for name, p in net.named_parameters()}


def test_ranks_whose_hooks_fire_otherwise_or_not_at_all_launch_in_one_order() -> None:
    ranks = run_distributed(train_twin, 3, True)
    plain = run_distributed(train_twin, 3, False)
    for by_step, early, state in ranks:
        assert all(order == list(range(7)) for order in by_step)
        assert early[0] == 0  # the first step counts arrivals
        for name, value in plain[0][2].items():
            assert torch.equal(state[name], ranks[0][2][name])
            torch.testing.assert_close(state[name], value, rtol=1e-13, atol=1e-13)


class Chain(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(depth))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_buckets_are_launched_while_the_backward_runs() -> None:
    net, launched = Chain(), []
    sharded = make(net)
    for number in range(2):
        hidden = net.layers[0](torch.ones(2, 5, dtype=torch.float64))
        seen: list[int] = []
        hidden.register_hook(lambda _, seen=seen: seen.extend(launched))
        sharded.last_backward()
        if number == 1:
            record_launches(launched, sharded)
        net.layers[2](net.layers[1](hidden)).sum().backward()
        if number == 1:
            assert seen == [0, 1]  # the first layer's gradient is not there yet
            assert launched == [0, 1, 2]
        sharded.backward_done()
        step(sharded)


@pytest.fixture(autouse=True)
def _original_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.Bucket, "launch_reduce", buffers.Bucket.launch_reduce)


def train_stages(vpp_order: tuple[int, int]) -> None:
    """Two stages on a rank; the shared scale belongs to both. Each stage's last backward may come first."""
    net = Chain(4)
    net.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    members = {
        0: [*net.layers[:2].parameters(), net.scale],
        1: [*net.layers[2:].parameters(), net.scale],
    }
    reference = Chain(4)
    reference.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    plain = torch.optim.SGD(reference.parameters(), lr=0.5)
    sharded = make(net, stages=members)
    assert all(len({id(p) for p in b.params} & {id(p) for p in members[0]}) in (0, len(b.params)) for b in sharded._buckets)

    def loss(net: nn.Module, stage: int, rank: int) -> Tensor:
        x = torch.full((2, 5), float(rank + 1), dtype=torch.float64)
        first, second = net.layers[2 * stage], net.layers[2 * stage + 1]
        return second(torch.tanh(first(x)) * net.scale).square().sum()

    for _ in range(3):
        for microbatch in range(2):
            for stage in vpp_order:
                if microbatch == 1:
                    sharded.last_backward(stage)
                loss(net, stage, sharded.mesh.rank).backward()
                if microbatch == 1:
                    sharded.backward_done(stage)
        step(sharded)
        plain.zero_grad()
        for rank in range(sharded.mesh.world_size):
            for stage in vpp_order:
                (2 * loss(reference, stage, rank)).backward()
        plain.step()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(net.get_parameter(name), param, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stages_end_in_any_order_and_share_parameters(order: tuple[int, int]) -> None:
    run_distributed(train_stages, 2, order)


def arrive_late() -> str:
    net = Chain()
    sharded = make(net)
    x = torch.ones(2, 5, dtype=torch.float64)
    for number in range(2):
        sharded.last_backward()
        net(x).sum().backward()
        if number == 0:
            step(sharded)
    with pytest.raises(RuntimeError, match=r"^\[dp=\d\] a gradient of 'layers.2.weight' arrived after its bucket") as error:
        net(x).sum().backward()
    step(sharded)
    return str(error.value)


def test_a_gradient_that_comes_too_late_is_an_error_that_names_the_parameter() -> None:
    assert "overlap_grad_reduce=False" in run_distributed(arrive_late, 2)[0]


class HeldBack:
    """All-gathers whose data comes only when somebody waits: the slowest network there is, and no clock."""

    def __init__(self) -> None:
        self.waits = 0

    def __call__(self, output: Tensor, source: Tensor, *, group: Any, async_op: bool) -> Any:
        arrived = torch.empty_like(output)
        all_gather_single(arrived, source.clone(), group=group)  # now, so that collectives keep their order
        return _Handle(self, output, arrived)


class _Handle:
    def __init__(self, owner: HeldBack, output: Tensor, arrived: Tensor) -> None:
        self._owner, self._output, self._arrived = owner, output, arrived

    def wait(self) -> None:
        self._owner.waits += 1
        self._output.copy_(self._arrived)


READS: dict[str, Callable[[Twin], Any]] = {
    "a forward": lambda net: net(tokens(0)),
    "a submodule's forward": lambda net: net.left(torch.ones(1, 6, dtype=torch.float64)),
    "a functional use": lambda net: nn.functional.linear(torch.ones(1, 6, dtype=torch.float64), net.left.weight),
    "a custom function": lambda net: Times.apply(net.left.weight),
    "a state dict": lambda net: {name: value.clone() for name, value in net.state_dict().items()},
    "a state dict of parameters": lambda net: [value.sum() for value in net.state_dict(keep_vars=True).values()],
    "data": lambda net: net.left.weight.data.clone(),
    "a list": lambda net: torch.cat([net.left.weight, net.right.weight]),
    "keywords": lambda net: torch.add(input=net.left.weight, other=1.0),
    "a penalty": lambda net: torch.stack([p.square().sum() for p in net.parameters()]).sum(),
    "numpy": lambda net: net.left.weight.detach().numpy().copy(),
    "tolist": lambda net: net.left.bias.tolist(),
    "repr": lambda net: repr(net.left.bias),
    "a copy": lambda net: torch.nn.utils.parameters_to_vector(net.parameters()),
    "norms": lambda net: torch._foreach_norm(list(net.parameters())),
}


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def read(name: str) -> tuple[str, int]:
    """What a read right after a step sees; under a name of its own, what ``wait_parameters`` sees first."""
    net = Twin()
    sharded = make(net)
    net(tokens(sharded.mesh.rank)).square().mean().backward()
    step(sharded)
    shapes = [(p.shape, p.requires_grad, p.numel(), p.device, p.dtype, p.grad is None) for p in net.parameters()]
    assert len(shapes) == 7
    waits = buffers.all_gather_single.waits
    assert waits == 0, "looking at shapes waits for nothing"
    seen = repr(READS[name](net))
    waits = buffers.all_gather_single.waits
    sharded.wait_parameters()
    assert _get_current_function_mode_stack() == []
    assert repr(READS[name](net)) == seen
    values = [value.tolist() for value in net.parameters()]
    assert len({repr(rank) for rank in all_gather_object(values, sharded.mesh.world)}) == 1
    return seen, waits


@pytest.mark.parametrize("name", READS)
def test_nobody_sees_a_parameter_before_it_has_arrived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_printoptions(precision=15, threshold=10**6)
    monkeypatch.setattr(buffers, "all_gather_single", HeldBack())
    first, second = run_distributed(read, 2, name)
    assert first[1] > 0
    assert first[0] == second[0] or name == "a forward"


def train_with_held_back_gathers() -> dict[str, Tensor]:
    net = Twin()
    sharded = make(net)
    for number in range(3):
        for _ in range(2):
            net(tokens(sharded.mesh.rank), number == 1).square().mean().backward()
        step(sharded)
        assert len(_get_current_function_mode_stack()) == 1
    sharded.refresh_main()
    assert _get_current_function_mode_stack() == []
    sharded.close()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_training_with_gathers_held_back_equals_training_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "all_gather_single", HeldBack())
    slow = run_distributed(train_with_held_back_gathers, 2)
    net = Twin()
    plain = torch.optim.SGD(net.parameters(), lr=0.5)
    for number in range(3):
        plain.zero_grad()
        for rank in (0, 1):
            (2 * net(tokens(rank), number == 1).square().mean()).backward()
        plain.step()
    for state in slow:
        for name, param in net.named_parameters():
            torch.testing.assert_close(state[name], param.detach(), rtol=1e-12, atol=1e-12)


def reduce_narrow() -> None:
    param = nn.Parameter(torch.zeros(300))
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    sharded = DistributedOptimizer(
        torch.optim.SGD([param], lr=1.0),
        [("p", param)],
        mesh=mesh,
        config=DistributedOptimizerConfig(grad_reduce_dtype="bf16"),
    )
    parts = [torch.randn(300, generator=torch.Generator().manual_seed(rank)) for rank in range(mesh.world_size)]
    (param * parts[mesh.rank]).sum().backward()
    step(sharded)
    expected = torch.stack([part.bfloat16().float() for part in parts]).sum(0)
    torch.testing.assert_close(-param.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 4])
def test_bf16_reduction_rounds_each_rank_once_and_sums_in_fp32(world_size: int) -> None:
    if world_size == 1:
        param = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([param], lr=1.0)
        config = DistributedOptimizerConfig(grad_reduce_dtype="bf16")
        sharded = DistributedOptimizer(optimizer, [("p", param)], mesh=Mesh(), config=config)
        (param * 1.001).sum().backward()
        step(sharded)  # nothing travels, nothing is rounded
        torch.testing.assert_close(param.detach(), torch.full((3,), -1.001))
    else:
        run_distributed(reduce_narrow, world_size)
