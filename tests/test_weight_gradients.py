"""Functions that add the gradient of their weight to its sum do what autograd does, and leave to it what they cannot."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.mesh import Mesh
from lightning_megatron.optim import DistributedOptimizer
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from lightning_megatron.tensor_parallel.embedding import add_rows
from lightning_megatron.tensor_parallel.linear import column_linear
from lightning_megatron.weight_gradients import close_sum, open_sum, sum_of

CPU = torch.device("cpu")
MESH = Mesh(device=CPU)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weight_with_sum(*shape: int) -> tuple[nn.Parameter, Tensor]:
    weight = nn.Parameter(random(*shape, seed=1))
    total = weight.grad = torch.ones(shape, dtype=torch.float64)
    open_sum(weight, total)
    return weight, total


def expected_sum(*shape: int, uses: int = 1) -> Tensor:
    """What autograd alone makes of ``uses`` backwards of a linear's sum over x."""
    weight = nn.Parameter(random(*shape, seed=1))
    weight.grad = torch.ones(shape, dtype=torch.float64)
    for _ in range(uses):
        nn.functional.linear(random(4, 2, shape[1]), weight).square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def loss_of(weight: Tensor, x: Tensor | None = None) -> Tensor:
    return column_linear(random(4, 2, weight.shape[1]) if x is None else x, weight, mesh=MESH).square().sum()


def test_a_product_adds_to_the_sum_without_a_gradient_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megatron.tensor_parallel import product

    monkeypatch.setattr(product, "weight_gradient", lambda *_: pytest.fail("a gradient was made beside the sum"))
    weight, total = weight_with_sum(3, 5)
    arrived: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda param: arrived.append(param.grad.clone()))
    for _ in range(2):
        loss_of(weight).backward()
    assert weight.grad is total
    torch.testing.assert_close(total, expected_sum(3, 5, uses=2))
    assert len(arrived) == 2
    torch.testing.assert_close(arrived[0], expected_sum(3, 5))


def test_autograd_grad_leaves_the_sum_alone() -> None:
    weight, total = weight_with_sum(3, 5)
    x = random(4, 2, 5).requires_grad_()
    for wanted in ([weight], [x], [x, weight]):
        found = torch.autograd.grad(loss_of(weight, x), wanted)
        plain = nn.Parameter(weight.detach().clone())
        other = random(4, 2, 5).requires_grad_()
        inputs = [plain if tensor is weight else other for tensor in wanted]
        expected = torch.autograd.grad(nn.functional.linear(other, plain).square().sum(), inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(total, torch.ones_like(total))
    loss_of(weight, x).backward(inputs=[x])
    assert torch.equal(total, torch.ones_like(total))


def detached(weight: nn.Parameter) -> None:
    weight.grad = None


def hooked(weight: nn.Parameter) -> None:
    weight.register_hook(lambda grad: grad * 2)


def replaced(weight: nn.Parameter) -> None:
    weight.grad = torch.zeros_like(weight)


@pytest.mark.parametrize(("change", "factor", "start"), [(detached, 1, 0), (hooked, 2, 1), (replaced, 1, 0)])
def test_what_happens_to_the_gradient_meanwhile_is_respected(
    change: Callable[[nn.Parameter], None], factor: float, start: float
) -> None:
    weight, total = weight_with_sum(3, 5)
    change(weight)
    loss_of(weight).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, (expected_sum(3, 5) - 1) * factor + start)
    assert (weight.grad is total) == (change is not replaced)


def test_a_closed_sum_is_left_alone() -> None:
    weight, total = weight_with_sum(3, 5)
    close_sum(weight)
    weight.grad = None
    loss_of(weight).backward()
    assert torch.equal(total, torch.ones_like(total))
    assert sum_of(weight) is None


def test_a_cast_or_a_view_in_between_is_left_to_autograd() -> None:
    weight, total = weight_with_sum(3, 5)
    column_linear(random(4, 2, 3), weight.t(), mesh=MESH).square().sum().backward()
    assert weight.grad is total
    plain = nn.Parameter(weight.detach().clone())
    nn.functional.linear(random(4, 2, 3), plain.t()).square().sum().backward()
    torch.testing.assert_close(total - 1, plain.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_a_checkpoint_the_sum_gets_the_gradient_once(use_reentrant: bool) -> None:
    weight, total = weight_with_sum(3, 5)
    x = random(4, 2, 5).requires_grad_()
    checkpoint(lambda given: loss_of(weight, given), x, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(total, expected_sum(3, 5))


def test_a_split_backward_adds_in_its_weight_part_and_tells_the_hooks() -> None:
    weight, total = weight_with_sum(5, 5)
    arrived: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda _: arrived.append(True))
    x = random(4, 2, 5).requires_grad_()
    loss = column_linear(column_linear(x, weight, mesh=MESH), weight, mesh=MESH).square().sum()
    split = SplitBackward([(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))], [x])
    split.run_input_part()
    assert x.grad is not None
    assert torch.equal(total, torch.ones_like(total))
    assert split.num_late == 2
    assert not arrived
    split.run_weight_part()
    plain = nn.Parameter(weight.detach().clone())
    nn.functional.linear(nn.functional.linear(x.detach(), plain), plain).square().sum().backward()
    torch.testing.assert_close(total - 1, plain.grad)
    assert arrived


class Tied(nn.Module):
    """A weight that is an embedding and a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(11, 8, mesh=MESH, vocab_multiple=4, device=CPU, dtype=dtype)
        self.middle = ColumnParallelLinear(8, 8, mesh=MESH, device=CPU, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return column_linear(self.middle(self.embedding(tokens)), self.embedding.weight, mesh=MESH).square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_optimizer_sums_micro_batches_as_plain_autograd_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Tied(dtype)
    exact = Tied(torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = DistributedOptimizer(optimizer, model.named_parameters(), mesh=MESH)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for step in range(2):
        exact.zero_grad()
        for micro in range(3):
            tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(10 * step + micro))
            sharded.last_backward() if micro == 2 else None
            model(tokens).backward()
            exact(tokens).backward()
        sharded.backward_done()
        for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            error = (mine.grad.double() - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert error < tolerance
        sharded.zero_gradients()
    sharded.close()


def test_hidden_gradients_keep_their_sum() -> None:
    torch.manual_seed(0)
    model = Tied(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = DistributedOptimizer(optimizer, model.named_parameters(), mesh=MESH)
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(0))
    model(tokens).backward()
    before = model.embedding.weight.grad.clone()
    sharded.hide_gradients()
    assert model.embedding.weight.grad is None
    assert sum_of(model.embedding.weight) is None
    sharded.show_gradients()
    assert torch.equal(model.embedding.weight.grad, before)
    model(tokens).backward()
    torch.testing.assert_close(model.embedding.weight.grad, 2 * before)


def test_a_pickled_parameter_leaves_its_sum_behind() -> None:
    weight, _ = weight_with_sum(3, 5)
    again = pickle.loads(pickle.dumps(weight))
    assert torch.equal(again, weight)
    assert sum_of(again) is None


def test_rows_are_added_in_the_dtype_of_the_sum() -> None:
    total, values = random(6, 4, dtype=torch.float32), random(40, 4, seed=2, dtype=torch.bfloat16)
    rows = torch.randint(-1, 6, (40,), generator=torch.Generator().manual_seed(3))
    expected = total.double()
    for row, value in zip(rows.tolist(), values, strict=True):
        if row >= 0:
            expected[row] += value.double()
    add_rows(total, rows, values)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
