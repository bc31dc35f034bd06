"""Optimizers that need whole parameters: each on one data-parallel rank, put together over tp where it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.optim.layout import ParamSlot, plan_buckets, shard_range
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.sharding import Box, ParamSharding, set_sharding, sharding_of
from lightning_megatron.testing import run_distributed

STEPS = 5
SHAPES = {"embedding": (12, 8), "qkv": (16, 8), "out": (8, 16), "norms": (3, 8)}


class Spectral(torch.optim.Optimizer):
    """A user's own: steps by the gradient over its Frobenius norm."""

    wants_whole_parameters = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": lambda params: torch.optim.Muon(params, lr=0.1, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "user": lambda params: Spectral(params, lr=0.1),
}


def full(name: str, kind: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) * 100 + kind)
    return torch.randn(SHAPES[name], generator=generator)


def make_sharding(name: str, tp: Any) -> ParamSharding:
    rows, columns = SHAPES[name]
    if name == "norms":
        return ParamSharding((rows, columns), (Box((0, 0), (rows, columns), replicated=("tp",)),))
    if name == "out":
        return ParamSharding((rows, columns), (Box((0, tp.rank * columns // tp.size), (rows, columns // tp.size)),))
    parts = 2 if name == "qkv" else 1
    size = rows // parts // tp.size
    boxes = tuple(Box((part * rows // parts + tp.rank * size, 0), (size, columns)) for part in range(parts))
    return ParamSharding((rows, columns), boxes)


def param_groups(params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [params["embedding"], params["out"]]},
        {"params": [params["qkv"], params["norms"]], "lr": 0.05},
    ]


def train(
    optimizer: str,
    parallelism: Parallelism,
    dtype: torch.dtype,
    overlap: bool,
    bucket_mb: float,
    written_at: int | None = None,
) -> dict[str, Tensor]:
    mesh = Mesh.create(parallelism, device=torch.device("cpu"))
    params = {}
    for name in SHAPES:
        sharding = make_sharding(name, mesh.tp)
        local = sharding.cut(full(name, 0), (sum(box.size[0] for box in sharding.boxes), *sharding.boxes[0].size[1:]))
        params[name] = set_sharding(nn.Parameter(local.to(dtype)), sharding)
    config = DistributedOptimizerConfig(bucket_mb, overlap_grad_reduce=overlap, overlap_param_gather=overlap)
    sharded = DistributedOptimizer(OPTIMIZERS[optimizer](param_groups(params)), params.items(), mesh=mesh, config=config)
    assert all(tuple(shard.main.shape) == shard.shape for shard in sharded.shards)
    for step in range(STEPS):
        for name, param in params.items():
            share = 2 * (mesh.dp.rank + 1) / (mesh.dp.size * (mesh.dp.size + 1))
            gradient = sharding_of(param).cut(full(name, 1 + step), tuple(param.shape)) * share
            if name == "embedding":
                sharded.last_backward()
            (param.float() * gradient).sum().backward()
        sharded.backward_done()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        sharded.clip_by_norm(3.0)
        if step == written_at:
            write(params)
        sharded.step()
        sharded.update_parameters()
    sharded.wait_parameters()
    result = {}
    for name, param in params.items():
        whole = torch.zeros(SHAPES[name])
        for boxes, values in all_gather_object((sharding_of(param), param.detach()), mesh.world):
            for box, part in boxes.parts(values):
                region = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
                whole[region] = part.float()
        assert torch.equal(sharding_of(param).cut(whole, tuple(param.shape)), param.float()), "copies differ"
        result[name] = whole
    return result


@torch.no_grad()
def write(params: dict[str, nn.Parameter]) -> None:
    """Write into parameters between two steps, as a hook may do."""
    params["qkv"].mul_(-0.5)
    params["out"].data = params["out"] * 0.25
    params["norms"].zero_()


def reference(optimizer: str, written_at: int | None = None) -> dict[str, Tensor]:
    params = {name: nn.Parameter(full(name, 0)) for name in SHAPES}
    plain = OPTIMIZERS[optimizer](param_groups(params))
    for step in range(STEPS):
        for name, param in params.items():
            param.grad = full(name, 1 + step)
        nn.utils.clip_grad_norm_(params.values(), 3.0)
        if step == written_at:
            write(params)
        plain.step()
    return {name: param.detach() for name, param in params.items()}


LAYOUTS = {
    "one": (Parallelism(), 1),
    "dp3": (Parallelism(), 3),
    "tp2": (Parallelism(tp=2), 2),
    "tp2-dp2": (Parallelism(tp=2), 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_of_whole_parameters_equal_plain_torch_in_every_layout(optimizer: str, layout: str) -> None:
    parallelism, world_size = LAYOUTS[layout]
    expected = reference(optimizer)
    # Muon multiplies in bf16, so sums in another order show up there.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if optimizer == "muon" else {"rtol": 1e-5, "atol": 1e-5}
    for result in run_distributed(train, world_size, optimizer, parallelism, torch.float32, True, 128.0):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bucket_mb", [1e-9, 128.0])
@pytest.mark.parametrize("overlap", [True, False])
def test_muon_does_not_depend_on_overlap_and_bucket_size(overlap: bool, bucket_mb: float) -> None:
    first = run_distributed(train, 2, "muon", Parallelism(), torch.float32, overlap, bucket_mb)[0]
    plain = run_distributed(train, 2, "muon", Parallelism(), torch.float32, False, 128.0)[0]
    assert all(torch.equal(first[name], value) for name, value in plain.items())


@pytest.mark.parametrize("layout", ["dp3", "tp2-dp2"])
def test_main_parameters_of_bf16_are_whole_and_in_fp32(layout: str) -> None:
    parallelism, world_size = LAYOUTS[layout]
    expected = reference("user")
    for result in run_distributed(train, world_size, "user", parallelism, torch.bfloat16, True, 128.0):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_go_on_from_what_was_written_into_parameters_meanwhile(layout: str) -> None:
    parallelism, world_size = LAYOUTS[layout]
    expected = reference("user", STEPS - 1)
    for result in run_distributed(train, world_size, "user", parallelism, torch.float32, True, 128.0, STEPS - 1):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_whole_parameters_lie_inside_one_shard_and_are_balanced(num_shards: int) -> None:
    sizes = [1, 63, 64, 65, 200, 7, 1000, 129, 500, 400, 300] * 8
    slots = [ParamSlot(f"p{i}", numel, "float32") for i, numel in enumerate(sizes)]
    plans = plan_buckets(slots, bucket_numel=1, num_shards=num_shards, whole=True)
    assert [p.name for plan in plans for p in plan.placements] == [slot.name for slot in reversed(slots)]
    for plan in plans:
        shards = [shard_range(plan, index) for index in range(num_shards)]
        taken: list[tuple[int, int]] = []
        for placement in plan.placements:
            assert any(start <= placement.start and placement.stop <= stop for start, stop in shards)
            assert all(placement.stop <= start or placement.start >= stop for start, stop in taken)
            taken.append((placement.start, placement.stop))
        used = sum(-(-(stop - start) // 64) * 64 for start, stop in taken)
        assert plan.numel <= used + num_shards * 1024
