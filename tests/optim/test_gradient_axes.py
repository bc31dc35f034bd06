"""Gradients over tensor, pipeline and expert axes: every layout must update as one rank does with the full gradient.

The model is a table of full tensors. Each rank holds its parts by hand-made shardings, and its gradients are given: a known
share of the full gradient, such that the shares of all ranks add up to it exactly once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.sharding import Box, ParamSharding, set_sharding, sharding_of
from lightning_megatron.testing import run_distributed

KV_HEADS, VOCAB, HIDDEN = 2, 7, 50
SHAPES = {
    "embedding": (VOCAB, HIDDEN),  # tied; its vocabulary is cut over tp and padded
    "norm": (HIDDEN,),  # replicated over tp, each rank's gradient a share
    "qkv": (4 + 2 * KV_HEADS, HIDDEN),  # four q rows cut over tp, then k and v rows, shared by ranks where tp > 2
    "bias": (3,),  # replicated over tp, each rank's gradient whole
    "experts": (4, 9),  # cut over ep
}
SMALL = DistributedOptimizerConfig(bucket_mb=300 * 4 / 2**20)  # several buckets, and shards that end inside a parameter


def full_tensor(name: str, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + 1000 * (kind == "gradient"))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def rows(start: int, count: int, shape: tuple[int, ...], **axes: tuple[str, ...]) -> Box:
    return Box((start, *[0] * (len(shape) - 1)), (count, *shape[1:]), **axes)


def make_sharding(name: str, mesh: Mesh) -> tuple[ParamSharding, tuple[int, ...]]:
    """The sharding and the local shape."""
    shape, tp = SHAPES[name], mesh.tp
    if name == "norm":
        return ParamSharding(shape, (rows(0, HIDDEN, shape, replicated=("tp",), partial=("tp",)),)), shape
    if name == "bias":
        return ParamSharding(shape, (rows(0, 3, shape, replicated=("tp",)),)), shape
    if name == "experts":
        count = 4 // mesh["ep"].size
        boxes = (rows(mesh["ep"].rank * count, count, shape),)
        return ParamSharding(shape, boxes, expert=True), (count, *shape[1:])
    if name == "embedding":
        padded = -(-VOCAB // tp.size)
        held = max(0, min(padded, VOCAB - tp.rank * padded))
        return ParamSharding(shape, (rows(tp.rank * padded, held, shape),), tied=True), (padded, HIDDEN)
    sharing = max(1, tp.size // KV_HEADS)
    shared = {"replicated": (f"tp:{sharing}",), "partial": (f"tp:{sharing}",)} if sharing > 1 else {}
    queries, heads = 4 // tp.size, KV_HEADS * sharing // tp.size
    head = tp.rank // sharing * heads
    boxes = (
        rows(tp.rank * queries, queries, shape),
        rows(4 + head, heads, shape, **shared),
        rows(4 + KV_HEADS + head, heads, shape, **shared),
    )
    return ParamSharding(shape, boxes), (queries + 2 * heads, HIDDEN)


def names_of(mesh: Mesh) -> list[str]:
    """Embedding on both ends, the middle of the model on the first stage, experts on the last."""
    held = []
    if mesh.pp.is_first:
        held += ["embedding", "norm", "qkv"]
    if mesh.pp.is_last:
        held += ["embedding", "bias", "experts"]
    return list(dict.fromkeys(held))


def share(axis: Axis) -> float:
    """Uneven weights that add up to one over the axis."""
    return (axis.rank + 1) / (axis.size * (axis.size + 1) / 2)


def make_model(mesh: Mesh) -> dict[str, nn.Parameter]:
    params = {}
    for name in names_of(mesh):
        sharding, shape = make_sharding(name, mesh)
        params[name] = set_sharding(nn.Parameter(sharding.cut(full_tensor(name, "value"), shape)), sharding)
    return params


def given_gradient(name: str, param: nn.Parameter, mesh: Mesh) -> Tensor:
    sharding = sharding_of(param)
    gradient = sharding.cut(full_tensor(name, "gradient"), tuple(param.shape))
    for box, part in sharding.parts(gradient):
        for axis in box.partial:
            part *= share(mesh[axis])
    gradient *= share(mesh["edp"] if sharding.expert else mesh.dp_cp)
    return gradient * (share(mesh["ends"]) if sharding.tied else 1.0)


def update(parallelism: Parallelism, trained: tuple[str, ...]) -> dict[str, Tensor]:
    """One SGD step with lr = 1 and a clip; returns local parameters."""
    mesh = Mesh.create(parallelism, device=torch.device("cpu"))
    params = make_model(mesh)
    for name, param in params.items():
        param.requires_grad_(name in trained)
    optimizer = torch.optim.SGD([{"params": []}, {"params": list(params.values())}], lr=1.0)
    sharded = DistributedOptimizer(optimizer, params.items(), mesh=mesh, config=SMALL)
    for name, param in params.items():
        if name in trained:
            (param * given_gradient(name, param, mesh)).sum().backward()
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    norm = torch.stack([full_tensor(name, "gradient").square().sum() for name in trained]).sum().sqrt()
    torch.testing.assert_close(sharded.grad_norm, norm, rtol=1e-13, atol=0.0)
    assert len(set(all_gather_object(sharded.grad_norm.item(), mesh.world))) == 1
    sharded.clip_by_norm(0.5)
    optimizer.step()
    sharded.update_parameters()
    for name, param in params.items():
        step = full_tensor(name, "gradient") * 0.5 / norm if name in trained else 0.0
        expected = sharding_of(param).cut(full_tensor(name, "value") - step, tuple(param.shape))
        torch.testing.assert_close(param.detach(), expected, rtol=0.0, atol=1e-6)  # clipping adds 1e-6 to the norm
    return {name: param.detach() for name, param in params.items()}


LAYOUTS = {
    "one": (Parallelism(), 1),
    "dp2": (Parallelism(), 2),
    "tp2": (Parallelism(tp=2), 2),
    "tp4-shared-kv": (Parallelism(tp=4), 4),
    "tp2-dp2": (Parallelism(tp=2), 4),
    "cp2-dp2": (Parallelism(cp=2), 4),
    "pp2": (Parallelism(pp=2), 2),
    "pp3-empty-middle": (Parallelism(pp=3), 3),
    "pp2-dp2": (Parallelism(pp=2), 4),
    "pp2-tp2": (Parallelism(tp=2, pp=2), 4),
    "ep2-dp2": (Parallelism(ep=2), 2),
    "ep2-dp4": (Parallelism(ep=2), 4),
    "ep2-tp2": (Parallelism(ep=2, tp=2), 4),
    "order": (Parallelism(tp=2, cp=2, order="cp-tp-pp-dp"), 4),
    "dp-fastest": (Parallelism(cp=2, order="dp-cp-tp-pp"), 4),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_layout_steps_and_measures_the_norm_as_one_rank_does(layout: str) -> None:
    parallelism, world_size = LAYOUTS[layout]
    run_distributed(update, world_size, parallelism, tuple(SHAPES))


@pytest.mark.parametrize("trained", [("experts",), ("embedding",), ("norm",), ("qkv", "norm"), ("bias",)])
@pytest.mark.parametrize("layout", ["tp2-dp2", "pp2-tp2", "ep2-tp2"])
def test_freezing_any_part_leaves_ranks_without_parameters_in_step(layout: str, trained: tuple[str, ...]) -> None:
    parallelism, world_size = LAYOUTS[layout]
    run_distributed(update, world_size, parallelism, trained)


@pytest.mark.parametrize(
    ("layout", "name"), [("tp2-dp2", "norm"), ("tp2-dp2", "bias"), ("cp2-dp2", "qkv"), ("pp2-dp2", "embedding")]
)
def test_copies_of_a_parameter_stay_bitwise_equal(layout: str, name: str) -> None:
    parallelism, world_size = LAYOUTS[layout]
    copies = [held[name] for held in run_distributed(update, world_size, parallelism, tuple(SHAPES))]
    assert len(copies) == world_size
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_vocabulary_padding_never_counts_in_the_norm() -> None:
    param = nn.Parameter(torch.zeros(4, 2))
    set_sharding(param, ParamSharding((3, 2), (rows(0, 3, (3, 2)),)))
    sharded = DistributedOptimizer(torch.optim.SGD([param]), [("p", param)], mesh=Mesh())
    param.grad.fill_(1.0)
    sharded.reduce_gradients()
    sharded.finish_gradients(num_tokens=None)
    assert sharded.grad_norm.item() == pytest.approx(6**0.5)


def lay_out_differently(kind: str) -> None:
    mesh = Mesh.create(Parallelism(tp=2), device=torch.device("cpu"))
    params = make_model(mesh)
    if mesh.rank == 2 and kind == "frozen":
        params["norm"].requires_grad_(False)
    if mesh.rank == 1 and kind == "whole":
        sharding = sharding_of(params["norm"])
        set_sharding(params["norm"], replace(sharding, boxes=(replace(sharding.boxes[0], partial=()),)))
    one_each = DistributedOptimizerConfig(bucket_mb=1e-9)
    DistributedOptimizer(torch.optim.SGD(params.values()), params.items(), mesh=mesh, config=one_each)


@pytest.mark.parametrize(("kind", "axis", "ranks"), [("frozen", "dp", "0 and 2"), ("whole", "tp", "0 and 1")])
def test_ranks_that_lay_gradients_out_differently_all_raise_one_message(kind: str, axis: str, ranks: str) -> None:
    with pytest.raises(AssertionError) as error:
        run_distributed(lay_out_differently, 4, kind)
    assert str(error.value).count("ValueError: ranks") == 4
    assert f"ranks {ranks} sum gradients over axis '{axis}" in str(error.value)
    assert "norm" in str(error.value)
