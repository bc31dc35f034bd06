"""Weight gradients that are made beside the backward: the same sums, complete whenever somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.optim import DistributedOptimizer, DistributedOptimizerConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel.embedding import VocabParallelEmbedding
from lightning_megatron.tensor_parallel.linear import column_linear
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import beside_on, open_sum, set_beside
from tests.layers.test_recompute import LLAMA

TIED = replace(LLAMA, tied_embeddings=True)


class AtLast:
    """Does its work as late as it may: when the next one comes, or when somebody settles."""

    def __init__(self) -> None:
        self.num_done = self.num_waited = 0
        self._work: Callable[[], Any] | None = None

    def run(self, work: Callable[[], Any]) -> None:
        self.settle()
        self._work = work

    def settle(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.num_done += 1
            with torch.no_grad():
                work()


@pytest.fixture
def at_last() -> Iterator[AtLast]:
    made = AtLast()
    yield made
    set_beside(None)


def optimizer_of(model: GPT, mesh: Mesh) -> DistributedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    layout = DistributedOptimizerConfig(bucket_mb=1e-9)
    sharded = DistributedOptimizer(optimizer, model.named_parameters(), mesh=mesh, config=layout)
    sharded.wait_in_forwards(model)
    return sharded


def trained(
    config: GPTConfig, beside: AtLast | None, *, fp8: bool = False, recomputes: str = "", mesh: Mesh | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps of two micro-batches by SGD with momentum, and the parameters after them."""
    mesh = mesh or Mesh()
    options = Fp8Options() if fp8 else None
    model = GPT(config, seed=0, backend=TeBackend(PlainOperations(options), options) if fp8 else None)
    recompute(model, Recompute(recomputes) if recomputes else None)
    sharded = optimizer_of(model, mesh)
    set_beside(beside)
    losses = []
    for number in range(2):
        for part in range(2):
            drawn = torch.Generator().manual_seed(10 * number + part + 100 * mesh.rank)
            tokens = torch.randint(config.vocab_size, (2, 17), generator=drawn)
            if part == 1:
                sharded.last_backward()
            loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
            losses.append(loss.item())
            loss.backward()
        sharded.reduce_gradients()
        sharded.finish_gradients(num_tokens=None)
        sharded.optimizer.step()
        sharded.update_parameters()
    sharded.wait_parameters()
    set_beside(None)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


@pytest.mark.parametrize("fp8", [False, True], ids=["torch", "fp8"])
@pytest.mark.parametrize("recomputes", ["", "full", "selective"])
def test_training_has_the_same_bits(at_last: AtLast, fp8: bool, recomputes: str) -> None:
    expected = trained(LLAMA, None, fp8=fp8, recomputes=recomputes)
    assert_same(trained(LLAMA, at_last, fp8=fp8, recomputes=recomputes), expected)
    assert at_last.num_done == 4 * (4 * LLAMA.num_layers + 1)


def test_a_tied_weight_is_added_to_in_one_order(at_last: AtLast) -> None:
    assert_same(trained(TIED, at_last), trained(TIED, None))
    assert at_last.num_done


def test_an_addition_where_the_backward_runs_comes_behind_one_beside_it(at_last: AtLast) -> None:
    embedding = VocabParallelEmbedding(7, 5, mesh=Mesh(), vocab_multiple=1, device="cpu")
    tokens, found = torch.tensor([[1, 2, 2, 6]]), []
    with torch.no_grad():
        embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    for beside in (None, at_last):
        total = torch.full_like(embedding.weight, 9.0)  # of a step before: the first gradient is written over it
        embedding.weight.grad = None
        open_sum(embedding.weight, total)
        set_beside(beside)
        column_linear(embedding(tokens), embedding.weight, mesh=Mesh()).square().sum().backward()
        found.append(total)
    assert torch.equal(*found)


def test_gradients_are_complete_when_a_backward_returns(at_last: AtLast) -> None:
    tokens = torch.randint(LLAMA.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    found = []
    for beside in (None, at_last):
        model = GPT(LLAMA, seed=0)
        sharded = optimizer_of(model, Mesh())
        set_beside(beside)
        model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None})
        assert sharded
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name


def of_two_replicas() -> None:
    mesh = Mesh.create(Parallelism(), device=torch.device("cpu"))
    expected = trained(LLAMA, None, mesh=mesh)
    beside = AtLast()
    assert_same(trained(LLAMA, beside, mesh=mesh), expected)
    assert beside.num_done


def test_reductions_that_start_in_a_backward_find_complete_sums() -> None:
    run_distributed(of_two_replicas, 2)


def test_there_is_no_stream_to_be_beside_without_a_gpu() -> None:
    assert beside_on(torch.device("cpu"), wanted=True) is None
