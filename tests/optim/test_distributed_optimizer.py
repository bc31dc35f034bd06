"""Training with the sharded optimizer against plain torch on one process, on the mean of the replicas' losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather_object, all_reduce
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig, buffers
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

STEPS = 3
TINY = 64 * 4 / 2**20  # a bucket of 64 elements, in MiB
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


class Net(nn.Module):
    """Sizes that no rank count divides, a 0-dim parameter, a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = nn.Linear(5, 37)
        self.frozen = nn.Linear(37, 37).requires_grad_(False)
        self.down = nn.Linear(37, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.frozen(torch.tanh(self.up(x)))) * self.scale


class Lion(torch.optim.Optimizer):
    """An optimizer as a user would write it: elementwise, with lazily made state."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["beta"])
                p.sub_(momentum.tanh(), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, momentum_decay=1e-2),
    "user": lambda params: Lion(params, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    optimizer: str = "sgd"
    bucket_mb: float = TINY
    dtype: torch.dtype = torch.float64
    clip_norm: float | None = None
    clip_value: float | None = None
    backwards: int = 1
    overlap: bool = True
    steps: int = STEPS


def groups(net: nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in net.named_parameters() if not name.endswith("weight")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}]


def batch(step: int, replica: int, backward: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + replica * 10 + backward)
    return (
        torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(4, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def reference(case: Case, replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    net = Net(case.dtype)
    optimizer, norms = OPTIMIZERS[case.optimizer](groups(net)), []
    for step in range(case.steps):
        optimizer.zero_grad()
        count = replicas * case.backwards
        losses = [loss_of(net, *batch(step, r, b, case.dtype)) for r in range(replicas) for b in range(case.backwards)]
        (torch.stack(losses).sum() / count).backward()
        trainable = [p for p in net.parameters() if p.requires_grad]
        norms.append(nn.utils.clip_grad_norm_(trainable, case.clip_norm or 1e9).item())
        if case.clip_value is not None:
            nn.utils.clip_grad_value_(trainable, case.clip_value)
        optimizer.step()
    return dict(net.state_dict()), norms


def train(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net(case.dtype)
    optimizer = OPTIMIZERS[case.optimizer](groups(net))
    config = DistributedOptimizerConfig(
        bucket_mb=case.bucket_mb, overlap_grad_reduce=case.overlap, overlap_param_gather=case.overlap
    )
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh, config=config)
    sharded.wait_in_forwards(net)
    norms = []
    for step in range(case.steps):
        for backward in range(case.backwards):
            loss = loss_of(net, *batch(step, mesh.dp.rank, backward, case.dtype))
            if backward == case.backwards - 1:
                sharded.last_backward()
            (loss / (mesh.dp.size * case.backwards)).backward()
        sharded.backward_done()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        norms.append(sharded.grad_norm.item())
        if case.clip_norm is not None:
            sharded.clip_by_norm(case.clip_norm)
        if case.clip_value is not None:
            sharded.clip_by_value(case.clip_value)
        optimizer.step()
        sharded.update_parameters()
    sharded.wait_parameters()
    replicas = all_gather_object({name: tensor.clone() for name, tensor in net.state_dict().items()}, mesh.world)
    assert all(torch.equal(replica[name], replicas[0][name]) for replica in replicas for name in replica)
    return replicas[0], norms


def check(case: Case, replicas: int) -> None:
    expected, expected_norms = reference(case, replicas)
    for state, norms in run_distributed(train, replicas, case):
        assert norms == pytest.approx(expected_norms, rel=TOLERANCE[case.dtype] * 10)
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_any_elementwise_optimizer_with_two_groups_equals_plain_torch(optimizer: str) -> None:
    check(Case(optimizer), replicas=2)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-foreach", "adamw-fused"])
def test_the_number_of_replicas_does_not_matter(optimizer: str, replicas: int) -> None:
    check(Case(optimizer), replicas)


@pytest.mark.parametrize("bucket_mb", [1e-9, 130 * 4 / 2**20, 128.0])
def test_the_bucket_size_does_not_matter(bucket_mb: float) -> None:
    check(Case("momentum", bucket_mb=bucket_mb), replicas=3)


@pytest.mark.parametrize("bucket_mb", [1e-9, TINY, 130 * 4 / 2**20, 128.0])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-foreach", "adagrad", "user"])
def test_overlap_and_bucket_size_change_nothing_in_five_clipped_steps(optimizer: str, overlap: bool, bucket_mb: float) -> None:
    check(Case(optimizer, bucket_mb=bucket_mb, overlap=overlap, clip_norm=0.05, backwards=2, steps=5), replicas=2)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach"])
def test_fp32_parameters_are_updated_in_place_by_their_shards(optimizer: str) -> None:
    check(Case(optimizer, dtype=torch.float32), replicas=2)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_norm": 1e6}, {"clip_value": 0.01}])
def test_clipping_by_norm_and_by_value_equals_torch(clip: dict[str, float]) -> None:
    check(Case("momentum", **clip), replicas=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_several_backwards_are_reduced_once(dtype: torch.dtype) -> None:
    check(Case("momentum", backwards=3, dtype=dtype), replicas=2)


def test_an_optimizer_works_without_a_process_group() -> None:
    expected, _ = reference(Case("adamw-foreach"), 1)
    state, _ = train(Case("adamw-foreach"))
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


TOKENS = [[5, 3, 0], [1, 0, 7], [0, 0, 0]]  # by step, by replica; nobody has a token in the last step


def train_on_tokens() -> tuple[dict[str, Tensor], list[float]]:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    sharded = DistributedOptimizer(optimizer, net.named_parameters(), mesh=mesh)
    norms = []
    for counts in TOKENS:
        x, y = batch(0, mesh.dp.rank, 0, torch.float64)
        count = counts[mesh.dp.rank]
        weights = torch.tensor([count, 0, 0, 0], dtype=torch.float64).unsqueeze(1)
        ((net(x) - y).square() * weights).sum().backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=torch.tensor(count))
        norms.append(sharded.grad_norm.item())
        optimizer.step()
        sharded.update_parameters()
    return dict(net.state_dict()), norms


def test_unequal_token_counts_weigh_every_token_alike_and_zero_tokens_are_zero() -> None:
    net, norms = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for counts in TOKENS:
        optimizer.zero_grad()
        batches = [batch(0, replica, 0, torch.float64) for replica in range(3)]
        losses = [(net(x) - y)[0].square().sum() * count for count, (x, y) in zip(counts, batches, strict=True)]
        (torch.stack(losses).sum() / max(sum(counts), 1)).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item())
        optimizer.step()
    for state, found in run_distributed(train_on_tokens, 3):
        assert found == pytest.approx(norms, rel=1e-11, abs=0.0)
        for name, tensor in net.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_token_count_beyond_fp32_is_exact() -> None:
    net = Net()
    sharded = DistributedOptimizer(torch.optim.SGD(net.parameters()), net.named_parameters(), mesh=Mesh())
    net.scale.grad.fill_(1.0)
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=torch.tensor(2**24 + 1))
    assert sharded.grad_norm.item() == 1 / (2**24 + 1)


def train_sixteen_bit(dtype: torch.dtype, optimizer_name: str, native: bool) -> None:
    """Each step, the same summed fp32 gradients go to an unsharded fp32 copy of the model."""
    buffers.HAS_GRAD_DTYPE = native
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    net = Net(dtype)
    copies = {name: nn.Parameter(p.detach().float()) for name, p in net.named_parameters() if p.requires_grad}
    plain, optimizer = OPTIMIZERS[optimizer_name](list(copies.values())), OPTIMIZERS[optimizer_name](net.parameters())
    sharded = DistributedOptimizer(
        optimizer, net.named_parameters(), mesh=mesh, config=DistributedOptimizerConfig(bucket_mb=TINY)
    )
    for step in range(STEPS):
        for backward in range(2):
            loss_of(net, *batch(step, mesh.dp.rank, backward, dtype)).backward()
        for slot in (slot for bucket in sharded._buckets for slot in bucket.slots):
            name = next(name for name, p in net.named_parameters() if p is slot.param)
            copies[name].grad = all_reduce(slot.view, mesh.dp).clone()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        optimizer.step()
        plain.step()
        sharded.update_parameters()
        for shard in sharded.shards:
            assert shard.main.dtype == torch.float32
            assert torch.equal(shard.main, copies[shard.name].flatten()[shard.start : shard.stop])
        for name, param in net.named_parameters():
            assert name not in copies or torch.equal(param, copies[name].to(dtype))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw-foreach"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_shards_of_16_bit_parameters_follow_fp32_arithmetic_bit_for_bit(
    dtype: torch.dtype, optimizer: str, native: bool
) -> None:
    run_distributed(train_sixteen_bit, 2, dtype, optimizer, native)


@pytest.mark.parametrize("native", [True, False])
def test_gradients_of_16_bit_parameters_accumulate_in_fp32(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatron.optim.buffers.HAS_GRAD_DTYPE", native)
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    sharded = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], mesh=Mesh())
    for _ in range(300):  # bf16 stops counting at 256
        param.sum().backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    assert torch.equal(sharded.shards[0].main.grad, torch.full((3,), 300.0))


def test_without_main_copies_the_16_bit_values_themselves_are_updated() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.25)
    sharded = DistributedOptimizer(optimizer, [("p", param)], mesh=Mesh(), main_params=False)
    (param * 2).sum().backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    sharded.clip_by_value(1.0)
    assert sharded.shards[0].main.grad.dtype == torch.bfloat16
    optimizer.step()
    sharded.update_parameters()
    assert torch.equal(param, torch.full((3,), 0.75, dtype=torch.bfloat16))


def test_main_copies_are_read_anew_after_a_weights_only_load() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sharded = DistributedOptimizer(torch.optim.SGD([param], lr=1.0), [("p", param)], mesh=Mesh())
    with torch.no_grad():
        param.fill_(2.0)
    sharded.refresh_main()
    assert torch.equal(sharded.shards[0].main, torch.full((3,), 2.0))
