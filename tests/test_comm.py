"""Differentiable collectives: the gradient of each is that of the same computation on one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_megatron import comm
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

SIZE = 2


def mesh_of(tp: int = SIZE, pp: int = 1) -> Mesh:
    return Mesh.create(Parallelism(tp=tp, pp=pp), device=torch.device("cpu"))


def full_input() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def weights(rank: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


@pytest.mark.parametrize("dim", [0, 1])
def test_gathering_for_unlike_consumers_sums_their_gradients(dim: int) -> None:
    def run() -> tuple[Tensor, Tensor]:
        tp = mesh_of().tp
        own = comm.own_part(full_input(), tp, dim).clone().requires_grad_()
        gathered = comm.all_gather_from(own, tp, dim)
        (gathered * weights(tp.rank)[:4]).sum().backward()
        assert own.grad is not None
        return gathered.detach(), own.grad

    ranks = run_distributed(run, SIZE)
    summed = sum(weights(rank)[:4] for rank in range(SIZE))
    for rank, (gathered, grad) in enumerate(ranks):
        assert torch.equal(gathered, full_input())
        torch.testing.assert_close(grad, summed.chunk(SIZE, dim)[rank])


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_gathers_the_gradients(dim: int) -> None:
    def run() -> tuple[Tensor, Tensor]:
        tp = mesh_of().tp
        mine = (full_input() * (tp.rank + 1)).requires_grad_()
        part = comm.reduce_scatter_to(mine, tp, dim)
        (part * part.detach()).sum().backward()
        assert mine.grad is not None
        return part.detach(), mine.grad

    for rank, (part, grad) in enumerate(run_distributed(run, SIZE)):
        total = full_input() * 3
        torch.testing.assert_close(part, total.chunk(SIZE, dim)[rank])
        torch.testing.assert_close(grad, total)


def test_entering_and_leaving_a_region_are_each_others_gradients() -> None:
    def run() -> Tensor:
        tp = mesh_of().tp
        x = full_input().requires_grad_()
        comm.reduce_from(comm.copy_to(x, tp) * weights(tp.rank)[:4], tp).sum().backward()
        assert x.grad is not None
        return x.grad

    for grad in run_distributed(run, SIZE):
        torch.testing.assert_close(grad, weights(0)[:4] + weights(1)[:4])


@pytest.mark.parametrize("conjugate", [comm.gather_from, comm.scatter_to])
def test_scatter_and_gather_for_like_consumers_keep_the_gradient_whole(conjugate: Callable[..., Tensor]) -> None:
    def run() -> tuple[Tensor, Tensor]:
        tp = mesh_of().tp
        start = full_input() if conjugate is comm.scatter_to else comm.own_part(full_input(), tp, 0).clone()
        start.requires_grad_()
        result = conjugate(start, tp, 0)
        scale = weights(9)[:4] if result.shape[0] == 4 else comm.own_part(weights(9)[:4], tp, 0)
        (result * scale).sum().backward()
        assert start.grad is not None
        return result.detach(), start.grad

    for rank, (result, grad) in enumerate(run_distributed(run, SIZE)):
        scattered = conjugate is comm.scatter_to
        torch.testing.assert_close(result, full_input().chunk(SIZE)[rank] if scattered else full_input())
        torch.testing.assert_close(grad, weights(9)[:4] if scattered else weights(9)[:4].chunk(SIZE)[rank])


def test_parts_come_in_the_order_of_axis_positions_not_of_ranks() -> None:
    def run() -> tuple[list[int], list[object], Tensor]:
        pp = mesh_of(tp=1, pp=2).pp  # its ranks stand in reverse
        gathered = comm.all_gather(torch.tensor([pp.rank]), pp)
        summed = comm.reduce_scatter(torch.tensor([10.0, 20.0]), pp)
        return gathered.tolist(), comm.all_gather_object(pp.rank, pp), summed / 2

    for rank, (gathered, objects, part) in enumerate(run_distributed(run, 2)):
        assert gathered == [0, 1]
        assert objects == [0, 1]
        assert float(part) == (20.0 if rank == 0 else 10.0)  # global rank 0 stands last


def test_an_axis_of_one_rank_returns_its_input() -> None:
    alone, x = Axis("tp"), full_input().requires_grad_()
    for function in (comm.copy_to, comm.reduce_from, comm.all_reduce):
        assert function(x, alone) is x
    for function in (comm.gather_from, comm.scatter_to, comm.all_gather_from, comm.reduce_scatter_to):
        assert function(x, alone, 0) is x


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers() -> None:
    def run() -> str:
        with pytest.raises(ValueError, match="pad it to a multiple of 2") as error:
            comm.reduce_scatter(torch.ones(3, 2), mesh_of().tp)
        return str(error.value)

    assert all("(3, 2)" in message and "2 ranks of axis 'tp'" in message for message in run_distributed(run, SIZE))


def test_collectives_leave_their_input_alone() -> None:
    def run() -> bool:
        x = full_input()
        comm.all_reduce(x, mesh_of().tp)
        return torch.equal(x, full_input())

    assert all(run_distributed(run, SIZE))
