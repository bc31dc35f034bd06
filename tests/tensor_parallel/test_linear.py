"""Column- and row-parallel linears against ``torch.nn.functional.linear`` on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.initialize import load_unsharded, materialize
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.sharding import Box, sharding_of
from lightning_megatron.tensor_parallel import ColumnParallelLinear, OutPart, RowParallelLinear
from lightning_megatron.testing import run_distributed

S, B, IN = 8, 3, 12
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-12}
LAYOUTS = [(1, True), (2, True), (2, False), (4, True), (4, False)]
GATE_UP = (OutPart(8), OutPart(8))


def mesh_of(tp: int, sequence_parallel: bool) -> Mesh:
    return Mesh.create(Parallelism(tp=tp, sequence_parallel=sequence_parallel), device=CPU)


def mesh_without_groups(tp: int, rank: int) -> Mesh:
    """For tests of shapes and boxes, which communicate nothing."""
    return Mesh(Parallelism(tp=tp), rank, tp, axes={"tp": Axis("tp", tuple(range(tp)), rank)})


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part_of(full: Tensor, mesh: Mesh, *, cut: bool) -> Tensor:
    """A leaf: this rank's part along dim 0, or the whole."""
    return (full.chunk(mesh.tp.size)[mesh.tp.rank] if cut else full).clone().requires_grad_()


@dataclass
class Result:
    """What one rank computed: output, gradient of its input, and of its parameters with their boxes."""

    y: Tensor
    grad_x: Tensor | None
    boxes: dict[str, tuple[Box, ...]]
    grads: dict[str, Tensor]


def result_of(layer: nn.Module, y: Tensor, x: Tensor) -> Result:
    named = {name: p for name, p in layer.named_parameters() if p.grad is not None}
    boxes = {name: sharding_of(p).boxes for name, p in named.items()}
    return Result(y.detach(), x.grad, boxes, {name: p.grad for name, p in named.items() if p.grad is not None})


def full_grad(results: list[Result], name: str, shape: tuple[int, ...]) -> Tensor:
    """Put the ranks' gradients together as the optimizer does: partial ones summed, replicated ones taken once."""
    full = torch.zeros(shape, dtype=results[0].grads[name].dtype)
    for rank, result in enumerate(results):
        local = result.grads[name]
        for box, part in zip(result.boxes[name], local.split([box.size[0] for box in result.boxes[name]]), strict=True):
            if box.partial or not box.replicated or rank == 0:
                full[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] += part
    return full


def whole(parts: list[Tensor], *, cut: bool) -> Tensor:
    """Undo the cut along the sequence; where there is none, all ranks must agree to the last bit."""
    if cut:
        return torch.cat(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


# ---------------------------------------------------------------------------------------------------------- column


def run_column(tp: int, sequence_parallel: bool, parts: tuple[OutPart, ...]) -> list[Result]:
    out = sum(part.size for part in parts)

    def rank_main() -> Result:
        mesh = mesh_of(tp, sequence_parallel)
        layer = ColumnParallelLinear(IN, parts, mesh=mesh, bias=True, device="cpu", dtype=torch.float64)
        load_unsharded(layer, {"weight": random(out, IN, seed=1), "bias": random(out, seed=2)})
        x = part_of(random(S, B, IN, seed=3), mesh, cut=mesh.sequence_parallel)
        y = layer(x)
        rows = torch.cat([torch.arange(b.offset[0], b.offset[0] + b.size[0]) for b in sharding_of(layer.weight).boxes])
        y.backward(random(S, B, out, seed=10 + mesh.tp.rank)[..., rows])
        return result_of(layer, y, x)

    return run_distributed(rank_main, tp)


def check_column(tp: int, sequence_parallel: bool, parts: tuple[OutPart, ...]) -> None:
    """Each rank sends its own upstream gradient into the rows that it holds; the reference gets their sum."""
    results = run_column(tp, sequence_parallel, parts)
    out = sum(part.size for part in parts)
    x, weight, bias = (random(S, B, IN, seed=3), random(out, IN, seed=1), random(out, seed=2))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    reference = F.linear(x, weight, bias)
    upstream = torch.zeros(S, B, out, dtype=torch.float64)
    for rank, result in enumerate(results):
        rows = torch.cat([torch.arange(b.offset[0], b.offset[0] + b.size[0]) for b in result.boxes["weight"]])
        torch.testing.assert_close(result.y, reference[..., rows].detach(), **EXACT)
        upstream[..., rows] += random(S, B, out, seed=10 + rank)[..., rows]
    reference.backward(upstream)
    grad_x = whole([r.grad_x for r in results if r.grad_x is not None], cut=sequence_parallel and tp > 1)
    torch.testing.assert_close(grad_x, x.grad, **EXACT)
    torch.testing.assert_close(full_grad(results, "weight", (out, IN)), weight.grad, **EXACT)
    torch.testing.assert_close(full_grad(results, "bias", (out,)), bias.grad, **EXACT)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_column_linear_equals_the_unsharded_linear(tp: int, sequence_parallel: bool) -> None:
    check_column(tp, sequence_parallel, GATE_UP)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(("tp", "replicas"), [(2, 2), (4, 2), (4, 4)])
def test_gradients_of_shared_key_and_value_rows_sum_to_the_reference(tp: int, replicas: int, sequence_parallel: bool) -> None:
    kv = 3 * tp // replicas
    check_column(tp, sequence_parallel, (OutPart(8), OutPart(kv, replicas), OutPart(kv, replicas)))


# ------------------------------------------------------------------------------------------------------------- row


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_row_linear_equals_the_unsharded_linear(tp: int, sequence_parallel: bool) -> None:
    out = 5

    def rank_main() -> Result:
        mesh = mesh_of(tp, sequence_parallel)
        layer = RowParallelLinear(IN, out, mesh=mesh, bias=True, device="cpu", dtype=torch.float64)
        load_unsharded(layer, {"weight": random(out, IN, seed=1), "bias": random(out, seed=2)})
        x = random(S, B, IN, seed=3).chunk(tp, dim=-1)[mesh.tp.rank].clone().requires_grad_()
        y = layer(x)
        y.backward(part_of(random(S, B, out, seed=4), mesh, cut=mesh.sequence_parallel).detach())
        return result_of(layer, y, x)

    results = run_distributed(rank_main, tp)
    x, weight, bias = (random(S, B, IN, seed=3), random(out, IN, seed=1), random(out, seed=2))
    for leaf in (x, weight, bias):
        leaf.requires_grad_()
    reference = F.linear(x, weight, bias)
    reference.backward(random(S, B, out, seed=4))
    y = whole([r.y for r in results], cut=sequence_parallel and tp > 1)
    torch.testing.assert_close(y, reference.detach(), **EXACT)
    grad_x = torch.cat([r.grad_x for r in results if r.grad_x is not None], dim=-1)
    torch.testing.assert_close(grad_x, x.grad, **EXACT)
    torch.testing.assert_close(full_grad(results, "weight", (out, IN)), weight.grad, **EXACT)
    torch.testing.assert_close(full_grad(results, "bias", (out,)), bias.grad, **EXACT)


# --------------------------------------------------------------------------------------- both, and what is around them


class Block(nn.Module):
    """Column, activation, row: the tensor-parallel block of an MLP."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(IN, 16, mesh=mesh, bias=True, device="cpu", dtype=dtype)
        self.down = RowParallelLinear(16, IN, mesh=mesh, bias=True, device="cpu", dtype=dtype)
        shapes = {"up.weight": (16, IN), "up.bias": (16,), "down.weight": (IN, 16), "down.bias": (IN,)}
        load_unsharded(self, {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())})

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def run_block(
    tp: int, dtype: torch.dtype, call: Callable[[Block, Tensor], Tensor], sequence_parallel: bool = True
) -> list[Result]:
    def rank_main() -> Result:
        mesh = mesh_of(tp, sequence_parallel)
        block = Block(mesh, dtype)
        x = part_of(random(S, B, IN, seed=3, dtype=dtype), mesh, cut=mesh.sequence_parallel)
        y = call(block, x)
        y.backward(part_of(random(S, B, IN, seed=4, dtype=y.dtype), mesh, cut=mesh.sequence_parallel).detach())
        return result_of(block, y, x)

    return run_distributed(rank_main, tp)


def assert_same_block(results: list[Result], reference: Result, *, cut: bool, rtol: float, atol: float) -> None:
    assert results[0].y.dtype == reference.y.dtype
    torch.testing.assert_close(whole([r.y for r in results], cut=cut), reference.y, rtol=rtol, atol=atol)
    grads_x = [r.grad_x for r in results if r.grad_x is not None]
    torch.testing.assert_close(whole(grads_x, cut=cut), reference.grad_x, rtol=rtol, atol=atol)
    for name, expected in reference.grads.items():
        actual = full_grad(results, name, tuple(expected.shape))
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_block_in_bf16_is_within_rounding_of_one_rank(sequence_parallel: bool) -> None:
    reference = run_block(1, torch.bfloat16, Block.__call__)[0]
    results = run_block(2, torch.bfloat16, Block.__call__, sequence_parallel)
    assert results[0].grads["up.weight"].dtype == torch.bfloat16
    # bf16 keeps 8 bits; sums of some 24 terms of size up to 30 are rounded in another order.
    assert_same_block(results, reference, cut=sequence_parallel, rtol=3e-2, atol=0.5)


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_autocast_computes_in_bf16_and_keeps_fp32_gradients(sequence_parallel: bool, backward_inside: bool) -> None:
    def rank_main(tp: int) -> Result:
        mesh = mesh_of(tp, sequence_parallel)
        block = Block(mesh, torch.float32)
        x = part_of(random(S, B, IN, seed=3, dtype=torch.float32), mesh, cut=mesh.sequence_parallel)
        upstream = part_of(random(S, B, IN, seed=4, dtype=torch.bfloat16), mesh, cut=mesh.sequence_parallel).detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
            if backward_inside:
                y.backward(upstream)
        if not backward_inside:
            y.backward(upstream)
        return result_of(block, y, x)

    reference, results = run_distributed(rank_main, 1, 1)[0], run_distributed(rank_main, 2, 2)
    assert reference.y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in results[0].grads.values())
    assert_same_block(results, reference, cut=sequence_parallel, rtol=3e-2, atol=0.5)


def test_autocast_equals_torch_linear_under_autocast_on_one_rank() -> None:
    layer = ColumnParallelLinear(IN, 16, mesh=Mesh(), bias=True, device="cpu")
    plain = nn.Linear(IN, 16)
    plain.load_state_dict(layer.state_dict())
    x = random(S, B, IN, seed=3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = layer(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-2, atol=1e-2)  # bf16 GEMMs, summed in other orders


def test_a_backward_under_autocast_keeps_the_dtype_of_a_forward_outside_of_it() -> None:
    layer = ColumnParallelLinear(IN, 16, mesh=Mesh(), device="cpu", dtype=torch.float32)
    x = random(S, B, IN, seed=3, dtype=torch.float32).requires_grad_()
    upstream = random(S, B, 16, seed=4, dtype=torch.float32)
    y = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.backward(upstream)
    torch.testing.assert_close(x.grad, upstream @ layer.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_recomputing_the_block_gives_the_same_bits(sequence_parallel: bool) -> None:
    kept = run_block(2, torch.float32, Block.__call__, sequence_parallel)
    redone = run_block(2, torch.float32, lambda block, x: checkpoint(block, x, use_reentrant=False), sequence_parallel)
    for a, b in zip(kept, redone, strict=True):
        assert torch.equal(a.y, b.y)
        assert a.grad_x is not None
        assert b.grad_x is not None
        assert torch.equal(a.grad_x, b.grad_x)
        assert all(torch.equal(a.grads[name], b.grads[name]) for name in a.grads)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_frozen_weights_and_inputs_without_gradient_leave_the_other_gradients_as_they_are(sequence_parallel: bool) -> None:
    def call(block: Block, x: Tensor, frozen: tuple[str, ...]) -> Tensor:
        for name, param in block.named_parameters():
            param.requires_grad_(name not in frozen)
        return block(x.detach() if "x" in frozen else x)

    everything = run_block(2, torch.float64, lambda block, x: call(block, x, ()), sequence_parallel)
    for frozen in (("up.weight", "up.bias"), ("up.weight", "down.weight", "down.bias"), ("x",), ("x", "up.weight")):
        results = run_block(2, torch.float64, lambda block, x, f=frozen: call(block, x, f), sequence_parallel)
        for result, full in zip(results, everything, strict=True):
            assert set(result.grads) == set(full.grads) - set(frozen)
            assert all(torch.equal(grad, full.grads[name]) for name, grad in result.grads.items())
            assert (result.grad_x is None) == ("x" in frozen)
            if result.grad_x is not None:
                assert full.grad_x is not None
                assert torch.equal(result.grad_x, full.grad_x)


def test_the_column_linear_keeps_only_its_shard_of_the_sequence_for_backward() -> None:
    def rank_main() -> list[tuple[int, ...]]:
        layer = ColumnParallelLinear(IN, 16, mesh=mesh_of(2, True), device="cpu")
        saved: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.ones(S // 2, B, IN, requires_grad=True))
        return saved

    assert run_distributed(rank_main, 2)[0] == [(S // 2, B, IN), (8, IN)]


def test_nothing_is_recorded_without_gradients() -> None:
    def rank_main() -> bool:
        block = Block(mesh_of(2, True), torch.float64)
        with torch.no_grad():
            return bool(block(torch.ones(S // 2, B, IN, dtype=torch.float64)).requires_grad)

    assert run_distributed(rank_main, 2) == [False, False]


# ------------------------------------------------------------------------------------------------ layout, pure tests


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_boxes_of_the_column_linear_tile_each_part_once_for_each_replica(tp: int, bias: bool) -> None:
    for replicas in [n for n in (1, 2, 4, 8) if tp % n == 0]:
        parts = (OutPart(16), OutPart(8, replicas), OutPart(8, replicas))
        held = torch.zeros(32, 6 if not bias else 1, dtype=torch.long)
        for rank in range(tp):
            layer = ColumnParallelLinear(6, parts, mesh=mesh_without_groups(tp, rank), bias=bias, device="meta")
            param = layer.bias if layer.bias is not None else layer.weight
            boxes = sharding_of(param).boxes
            assert layer.part_sizes == tuple(box.size[0] for box in boxes) == (16 // tp, 8 * replicas // tp, 8 * replicas // tp)
            assert sum(box.numel for box in boxes) == param.numel()
            for box in boxes:
                held[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] += 1
        assert (held[:16] == 1).all()
        assert (held[16:] == replicas).all()


def test_replicated_pieces_name_the_axis_of_the_ranks_that_share_them() -> None:
    parts = (OutPart(8), OutPart(8, 2), OutPart(8, 4))
    for rank in range(4):
        boxes = sharding_of(ColumnParallelLinear(2, parts, mesh=mesh_without_groups(4, rank), device="meta").weight).boxes
        assert [box.replicated for box in boxes] == [(), ("tp:2",), ("tp",)]
        assert all(box.partial == box.replicated for box in boxes)
        assert [box.offset for box in boxes] == [(2 * rank, 0), (8 + rank // 2 * 4, 0), (16, 0)]


def test_the_row_bias_is_partial_only_under_sequence_parallelism() -> None:
    for sequence_parallel, partial in ((True, ("tp",)), (False, ())):
        axes = {"tp": Axis("tp", (0, 1), 0)}
        mesh = Mesh(Parallelism(tp=2, sequence_parallel=sequence_parallel), 0, 2, axes=axes)
        layer = RowParallelLinear(4, 6, mesh=mesh, bias=True, device="meta")
        assert layer.bias is not None
        (box,) = sharding_of(layer.bias).boxes
        assert (box.size, box.replicated, box.partial) == ((6,), ("tp",), partial)
        assert sharding_of(layer.weight).boxes == (Box((0, 0), (6, 2)),)


def test_first_values_do_not_depend_on_tp() -> None:
    whole_layer = ColumnParallelLinear(6, GATE_UP, mesh=Mesh(), bias=True, device="meta")
    materialize(whole_layer, device=CPU, seed=1)
    for rank in range(4):
        layer = ColumnParallelLinear(6, GATE_UP, mesh=mesh_without_groups(4, rank), bias=True, device="meta")
        materialize(layer, device=CPU, seed=1)
        expected = torch.cat([block.chunk(4)[rank] for block in whole_layer.weight.split(8)])
        assert torch.equal(layer.weight, expected)
        assert layer.bias is not None
        assert not layer.bias.any()
    torch.manual_seed(7)
    eager = ColumnParallelLinear(6, GATE_UP, mesh=Mesh(), device="cpu")
    torch.manual_seed(7)
    cut = ColumnParallelLinear(6, GATE_UP, mesh=mesh_without_groups(4, 1), device="cpu")
    assert torch.equal(cut.weight, torch.cat([block.chunk(4)[1] for block in eager.weight.split(8)]))


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    mesh = mesh_without_groups(4, 0)
    with pytest.raises(ValueError, match=r"6 output rows .* 4 equal pieces .*tp=4.* multiple of 4"):
        ColumnParallelLinear(8, 6, mesh=mesh, device="meta")
    with pytest.raises(ValueError, match=r"3 output rows .* 2 equal pieces .*replicas=2"):
        ColumnParallelLinear(8, [OutPart(8), OutPart(3, 2)], mesh=mesh, device="meta")
    with pytest.raises(ValueError, match=r"replicas=3 does not divide the 4 ranks"):
        ColumnParallelLinear(8, [OutPart(12, 3)], mesh=mesh, device="meta")
    with pytest.raises(ValueError, match=r"in_features=6 .* tp=4; make it a multiple of 4"):
        RowParallelLinear(6, 8, mesh=mesh, device="meta")
