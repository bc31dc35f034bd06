"""Layers whose products and communication run in pieces beside each other compute what they compute one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.strategy.options import check_overlap
from lightning_megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import run_distributed
from tests.parity.harness import LLAMA_GQA, Outcome, strategy_run
from tests.tensor_parallel.test_overlap import NAMES

CPU = torch.device("cpu")
LENGTH, BATCH, SIZE = 20, 2, 12
KINDS = {**NAMES, "addmm": "gemm"}


def mesh_of(tp: int, *, pieces: int, sequence_parallel: bool = True) -> Mesh:
    return Mesh.create(Parallelism(tp=tp, sequence_parallel=sequence_parallel, tp_overlap=pieces), device=CPU)


class Block(nn.Module):
    def __init__(self, mesh: Mesh, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = ColumnParallelLinear(SIZE, 8 * mesh.tp.size, mesh=mesh, bias=bias, device=CPU, dtype=dtype)
        self.down = RowParallelLinear(8 * mesh.tp.size, SIZE, mesh=mesh, bias=bias, device=CPU, dtype=dtype)
        with torch.no_grad():
            for param in (self.up.bias, self.down.bias):
                if param is not None:
                    param.normal_()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).tanh())
        return result


def outcome(mesh: Mesh, *, frozen: str | None = None) -> dict[str, Tensor]:
    """Output and gradients of a block, on inputs that are the same at every number of pieces."""
    block = Block(mesh)
    rows = LENGTH // mesh.tp.size if mesh.sequence_parallel else LENGTH
    generator = torch.Generator().manual_seed(mesh.tp.rank if mesh.sequence_parallel else 9)
    x = torch.randn(rows, BATCH, SIZE, generator=generator, dtype=torch.float64).requires_grad_(frozen != "input")
    if frozen is not None and frozen != "input":
        block.get_parameter(frozen).requires_grad_(False)
    y = block(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    grads = {name: param.grad for name, param in block.named_parameters() if param.grad is not None}
    return {"y": y.detach(), **grads, **({} if x.grad is None else {"x": x.grad})}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_pieces_change_neither_outputs_nor_gradients(tp: int, sequence_parallel: bool) -> None:
    def run() -> list[dict[str, Tensor]]:
        return [outcome(mesh_of(tp, pieces=pieces, sequence_parallel=sequence_parallel)) for pieces in (1, 2, 3, 4, 9)]

    for expected, *found in run_distributed(run, tp):
        for one in found:
            assert one.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(one[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("frozen", ["input", "up.weight", "down.weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    def run() -> list[dict[str, Tensor]]:
        return [outcome(mesh_of(2, pieces=pieces), frozen=frozen) for pieces in (1, 2)]

    for expected, found in run_distributed(run, 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


class Order(TorchDispatchMode):
    """Lists collectives and products in the order in which they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in KINDS:
            self.launched.append(KINDS[name])
        return func(*args, **(kwargs or {}))


def test_each_piece_is_on_its_way_before_the_product_beside_it() -> None:
    def run() -> dict[str, list[str]]:
        block = Block(mesh_of(2, pieces=2), bias=False)
        x = torch.ones(LENGTH // 2, BATCH, SIZE, dtype=torch.float64, requires_grad=True)
        found = {}
        with Order() as order:
            hidden = block.up(x)
        found["column"] = order.launched
        with Order() as order:
            y = block.down(hidden)
        found["row"] = order.launched
        with Order() as order:
            torch.autograd.grad(y, (hidden, block.down.weight), torch.ones_like(y))
        found["row backward"] = order.launched
        return found

    for found in run_distributed(run, 2):
        assert found["column"] == ["gather", "gemm", "gemm"]
        assert found["row"] == ["gemm", "gemm", "scatter", "gemm", "gemm", "scatter"]
        assert found["row backward"] == ["gather", "gemm", "gemm", "gemm"]


def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers() -> None:
    def run() -> None:
        layer = RowParallelLinear(4, 2, mesh=mesh_of(2, pieces=2), device=CPU)
        with pytest.raises(ValueError, match=r"\(3, 1, 2\) does not divide by the 2 ranks"):
            layer(torch.ones(3, 1, 2))

    run_distributed(run, 2)


def test_a_number_of_pieces_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_overlap=0 is not a size"):
        Parallelism(tp=2, tp_overlap=0)


def test_training_in_pieces_is_the_same_within_rounding() -> None:
    def run() -> list[Outcome]:
        options: dict[str, Any] = {"optimizer": "sgd", "precision": "64-true", "steps": 2}
        return [strategy_run(LLAMA_GQA, {"tp": 2, "tp_overlap": pieces}, **options) for pieces in (1, 2)]

    for expected, outcome in run_distributed(run, 2):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-10)
        for name, value in expected.final.items():
            torch.testing.assert_close(outcome.final[name], value, rtol=1e-9, atol=1e-10, msg=name)


def test_pieces_of_block_formats_are_refused_by_name() -> None:
    blocks = Fp8Options(recipe="blockwise")
    backend = TeBackend(PlainOperations(None), blocks)
    with pytest.raises(ValueError, match="tp_overlap=2 does not go with fp8='blockwise'"):
        check_overlap(Parallelism(tp=2, tp_overlap=2), backend)
    check_overlap(Parallelism(tp=2), backend)
    for options in (None, Fp8Options(), Fp8Options(recipe="current")):
        check_overlap(Parallelism(tp=2, tp_overlap=2), TeBackend(PlainOperations(options), options))
