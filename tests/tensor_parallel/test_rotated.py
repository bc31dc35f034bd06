"""The projection to queries, keys and values with the rotation in it, against the two apart and plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.attention import qkv_parts
from lightning_megatron.layers.rope import Rope, rotate_fused
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.tensor_parallel import ColumnParallelLinear, product
from lightning_megatron.tensor_parallel.rotated import Heads, rotated_linear, rotates
from lightning_megatron.weight_gradients import open_sum
from tests.tensor_parallel.rotating import Rotating

S, B, H, SIZE, HEADS = 5, 3, 8, 4, (4, 2)
CPU = torch.device("cpu")
Found = dict[str, Tensor | None]


@pytest.fixture
def rotating() -> Iterator[Rotating]:
    made = Rotating()
    set_products(made)
    yield made
    set_products(TorchProducts())


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Projection:
    """The projection and what comes in, leaves of random values; ``mesh`` is of one rank unless given."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, bias: bool = False, mesh: Mesh | None = None) -> None:
        parts = qkv_parts(*HEADS, head_dim=SIZE, tp=1)
        self.qkv = ColumnParallelLinear(H, parts, bias=bias, mesh=mesh or Mesh(device=CPU), device=CPU, dtype=dtype)
        with torch.no_grad():
            self.qkv.weight.copy_(random(*self.qkv.weight.shape, seed=0))
        self.x = random(S, B, H, seed=1, dtype=dtype).requires_grad_()
        self.rope = Rope(head_dim=SIZE).tables(torch.tensor([3, 0, 7, 1, 20]))
        self.tables = self.rope.cos, self.rope.sin

    def together(self) -> Heads:
        return rotated_linear(self.x, self.qkv, self.tables, HEADS)

    def apart(self) -> Heads:
        return rotate_fused(self.qkv(self.x), HEADS, head_dim=SIZE, tables=self.rope)

    def found(self, heads: Heads) -> Found:
        torch.autograd.backward(heads, upstream(heads))
        return dict(zip("qkv", (part.detach() for part in heads), strict=True)) | {"x": self.x.grad, "w": self.qkv.weight.grad}


def upstream(heads: Heads) -> list[Tensor]:
    return [random(*part.shape, seed=2 + n, dtype=part.dtype) for n, part in enumerate(heads)]


def by_autograd(made: Projection) -> Found:
    """In double precision, by complex numbers."""
    x, weight = made.x.detach().double().requires_grad_(), made.qkv.weight.detach().double().requires_grad_()
    fused = functional.linear(x, weight).unflatten(-1, (-1, SIZE))
    turns = torch.complex(*(table[..., : SIZE // 2].double() for table in made.tables))
    q, k, v = fused.split((HEADS[0], HEADS[1], HEADS[1]), dim=2)

    def turned(part: Tensor) -> Tensor:
        pairs = torch.complex(*part.chunk(2, dim=-1)) * turns
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    heads = turned(q), turned(k), v
    torch.autograd.backward(heads, [grad.double() for grad in upstream(made.apart())])
    return dict(zip("qkv", (part.detach() for part in heads), strict=True)) | {"x": x.grad, "w": weight.grad}


def assert_close(found: Found, expected: Found, tolerance: float = 1e-7) -> None:
    """By the norm of the difference; tables are in fp32."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert tensor is not None, name
        assert value is not None, name
        assert tensor.shape == value.shape, name
        assert torch.linalg.vector_norm(tensor.double() - value) <= tolerance * torch.linalg.vector_norm(value), name


def assert_same_bits(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert tensor is value is None or (tensor is not None and value is not None and torch.equal(tensor, value)), name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_heads_and_gradients_are_those_of_plain_autograd(dtype: torch.dtype, tolerance: float, rotating: Rotating) -> None:
    made, apart = Projection(dtype), Projection(dtype)
    found = made.found(made.together())
    assert rotating.calls == ["forward"]
    assert_close(found, by_autograd(made), tolerance)
    assert_same_bits(found, apart.found(apart.apart()))
    assert rotating.calls == ["forward"]


def test_nothing_is_recorded_without_gradients(rotating: Rotating) -> None:
    made = Projection()
    expected = made.apart()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            heads = made.together()
            assert all(torch.equal(part, other) for part, other in zip(heads, expected, strict=True))
        assert not any(part.requires_grad for part in heads)
    assert rotating.calls == ["forward"] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_gives_the_same_bits(use_reentrant: bool, rotating: Rotating) -> None:
    made, apart = Projection(), Projection()
    heads = checkpoint(lambda x: rotated_linear(x, made.qkv, made.tables, HEADS), made.x, use_reentrant=use_reentrant)
    assert_same_bits(made.found(heads), apart.found(apart.apart()))
    assert rotating.calls == ["forward"] * 2


def test_a_gradient_of_the_gradient_is_refused(rotating: Rotating) -> None:
    made = Projection()
    (grad,) = torch.autograd.grad(made.together()[0].square().sum(), made.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_heads_that_no_loss_uses_have_gradients_of_zero(rotating: Rotating) -> None:
    made, apart = Projection(), Projection()
    for part in (1, 2):
        made.together()[part].square().sum().backward()
        apart.apart()[part].square().sum().backward()
    assert_same_bits({"x": made.x.grad, "w": made.qkv.weight.grad}, {"x": apart.x.grad, "w": apart.qkv.weight.grad})


@pytest.mark.parametrize("frozen", ["x", "w"])
def test_what_is_frozen_gets_no_gradient_and_is_not_kept_for_the_other(frozen: str, rotating: Rotating) -> None:
    made = Projection()
    leaf = made.x if frozen == "x" else made.qkv.weight
    leaf.requires_grad_(False)
    heads = made.together()
    node: Any = heads[0].grad_fn
    kept = {tuple(saved.shape) for saved in node.saved_tensors if saved is not None}
    tables = (S, 1, 1, SIZE)
    assert kept == {tables, tuple(made.qkv.weight.shape) if frozen == "w" else tuple(made.x.shape)}
    found, expected = made.found(heads), by_autograd(made)
    assert found.pop(frozen) is None
    del expected[frozen]
    assert_close(found, expected)


def with_sum(made: Projection) -> Tensor:
    """A sum for the weight's gradient that nothing has been written to."""
    total = torch.full_like(made.qkv.weight, float("nan"))
    open_sum(made.qkv.weight, total)
    return total


def test_the_weights_gradient_is_written_over_its_sum_then_added(rotating: Rotating, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "weight_gradient", lambda *_: pytest.fail("a gradient was made beside the sum"))
    made = Projection()
    expected = by_autograd(made)
    total = with_sum(made)
    for uses, how in ((1, "put"), (2, "add")):
        rotating.calls.clear()
        found = made.found(made.together())
        assert rotating.calls == ["forward", how]
        assert found["w"] is total
        for name in "xw":
            value = expected[name]
            assert value is not None
            torch.testing.assert_close(found[name], uses * value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sums", [False, True])
def test_a_split_backward_makes_the_weights_gradient_in_its_second_part(sums: bool, rotating: Rotating) -> None:
    made = Projection()
    expected = by_autograd(made)
    if sums:
        with_sum(made)
    heads = made.together()
    edges = [(torch.autograd.graph.get_gradient_edge(part), grad) for part, grad in zip(heads, upstream(heads), strict=True)]
    split = SplitBackward(edges, [made.x])
    split.run_input_part()
    assert split.num_late == 1
    assert rotating.calls == ["forward"]
    assert made.qkv.weight.grad is None
    split.run_weight_part()
    assert rotating.calls == ["forward", *["put"] * sums]
    parts = dict(zip("qkv", (part.detach() for part in heads), strict=True))
    assert_close(parts | {"x": made.x.grad, "w": made.qkv.weight.grad}, expected)


def test_a_backward_under_autocast_keeps_the_dtype_of_a_forward_outside_of_it(rotating: Rotating) -> None:
    made = Projection(torch.float32)
    heads = made.together()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = made.found(heads)
    assert_close(found, by_autograd(made), 1e-6)


def test_products_are_asked_only_on_one_rank_without_a_bias_and_without_autocast(rotating: Rotating) -> None:
    made = Projection()
    assert rotates(made.x, made.qkv, made.tables, HEADS)
    assert rotating.num_asked == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wide = Projection(torch.float32)
        assert not rotates(wide.x, wide.qkv, wide.tables, HEADS)
    two = Mesh(Parallelism(tp=2), 0, 2, axes={"tp": Axis("tp", (0, 1), 0)})
    for other in (Projection(bias=True), Projection(mesh=two)):
        assert not rotates(other.x, other.qkv, other.tables, HEADS)
    hook = made.qkv.register_forward_pre_hook(lambda *_: None)
    assert not rotates(made.x, made.qkv, made.tables, HEADS)
    hook.remove()
    assert rotating.num_asked == 1
    set_products(TorchProducts())
    assert not rotates(made.x, made.qkv, made.tables, HEADS)


def test_who_only_waits_is_waited_for(rotating: Rotating) -> None:
    made, waited = Projection(), list[Any]()

    def wait(module: Any, args: Any) -> None:
        waited.append(module)

    wait.only_waits = True  # type: ignore[attr-defined]
    made.qkv.register_forward_pre_hook(wait)
    assert rotates(made.x, made.qkv, made.tables, HEADS)
    made.together()
    assert waited == [made.qkv]
