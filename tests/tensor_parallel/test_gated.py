"""The linears of a gated feed-forward block with SwiGLU between them, in two Functions, against plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.activation import swiglu
from lightning_megatron.layers.mlp import gate_up_parts
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear, product
from lightning_megatron.tensor_parallel.gated import gated_linears, gates
from lightning_megatron.weight_gradients import ask_to_wait, open_sum
from tests.tensor_parallel.gating import Gating

S, B, H, F = 5, 3, 8, 12
CPU = torch.device("cpu")
NAMES = ("x", "gate_up", "down", "residual")


@pytest.fixture
def gating() -> Iterator[Gating]:
    made = Gating()
    set_products(made)
    yield made
    set_products(TorchProducts())


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass
class Block:
    """The two linears and what comes in, all leaves of random values; ``mesh`` is of one rank unless given."""

    dtype: torch.dtype = torch.float64
    bias: tuple[bool, bool] = (False, False)
    mesh: Mesh = field(default_factory=lambda: Mesh(device=CPU))
    num_rows: int = S

    def __post_init__(self) -> None:
        options: Any = {"mesh": self.mesh, "device": CPU, "dtype": self.dtype}
        self.gate_up = ColumnParallelLinear(H, gate_up_parts(F), bias=self.bias[0], **options)
        self.down = RowParallelLinear(F, H, bias=self.bias[1], **options)
        with torch.no_grad():
            for seed, linear in enumerate((self.gate_up, self.down)):
                linear.weight.copy_(random(*linear.weight.shape, seed=seed))
        shape = (self.num_rows, B, H)
        self.x, self.residual = (random(*shape, seed=seed, dtype=self.dtype).requires_grad_() for seed in (2, 3))

    @property
    def leaves(self) -> dict[str, Tensor]:
        return dict(zip(NAMES, (self.x, self.gate_up.weight, self.down.weight, self.residual), strict=True))

    def together(self) -> Tensor:
        return gated_linears(self.x, self.gate_up, self.down, self.residual)

    def apart(self) -> Tensor:
        result: Tensor = self.down(swiglu(self.gate_up(self.x)), residual=self.residual)
        return result

    def found(self, y: Tensor, grad: Tensor | None = None) -> dict[str, Tensor | None]:
        y.backward(upstream(y) if grad is None else grad)
        return {"y": y.detach(), **{name: leaf.grad for name, leaf in self.leaves.items()}}


def upstream(y: Tensor) -> Tensor:
    return random(*y.shape, seed=4, dtype=y.dtype)


def by_autograd(block: Block, grad: Tensor | None = None) -> dict[str, Tensor]:
    """In double precision, by torch's operations."""
    x, gate_up, down, residual = (leaf.detach().double().requires_grad_() for leaf in block.leaves.values())
    gate, up = functional.linear(x, gate_up).split(F, dim=-1)
    y = functional.linear(functional.silu(gate) * up, down) + residual
    y.backward(upstream(y) if grad is None else grad.double())
    grads = (leaf.grad for leaf in (x, gate_up, down, residual))
    return {"y": y.detach(), **{name: grad for name, grad in zip(NAMES, grads, strict=True) if grad is not None}}


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """By the norm of the difference."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert tensor is not None, name
        assert tensor.shape == value.shape, name
        error = torch.linalg.vector_norm(tensor.double() - value) / torch.linalg.vector_norm(value)
        assert error <= tolerance, f"{name}: {error}"


def assert_same_bits(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tensor = found[name]
        assert (tensor is None) == (value is None), name
        if tensor is not None and value is not None:
            assert tensor.dtype == value.dtype, name
            assert torch.equal(tensor, value), name


# The same


def transposed(y: Tensor) -> Tensor:
    return random(B, S, H, seed=6, dtype=y.dtype).transpose(0, 1)


def expanded(y: Tensor) -> Tensor:
    return random(H, seed=7, dtype=y.dtype).expand(y.shape)


@pytest.mark.parametrize("make_grad", [upstream, transposed, expanded], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_result_and_gradients_are_those_of_plain_autograd(
    dtype: torch.dtype, tolerance: float, make_grad: Any, gating: Gating
) -> None:
    block, apart = Block(dtype), Block(dtype)
    y = block.together()
    grad = make_grad(y)
    found = block.found(y, grad)
    assert gating.calls == ["forward", "gradient"]
    assert_close(found, by_autograd(block, grad), tolerance)
    assert_same_bits(found, apart.found(apart.apart(), grad))
    assert gating.calls == ["forward", "gradient"]


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows_or_none_are_as_good(num_rows: int, gating: Gating) -> None:
    block, apart = Block(num_rows=num_rows), Block(num_rows=num_rows)
    assert_same_bits(block.found(block.together()), apart.found(apart.apart()))
    assert gating.calls == ["forward", "gradient"]


def test_without_a_residual_nothing_is_added(gating: Gating) -> None:
    block, apart = Block(), Block()
    found = block.found(gated_linears(block.x, block.gate_up, block.down))
    assert_same_bits(found, apart.found(apart.down(swiglu(apart.gate_up(apart.x)))))
    assert gating.calls == ["forward", "gradient"]
    assert found["residual"] is None


def test_nothing_is_recorded_without_gradients(gating: Gating) -> None:
    block = Block()
    expected = block.apart().detach()
    with torch.no_grad():
        y = block.together()
    with torch.inference_mode():
        inferred = block.together()
    assert torch.equal(y, expected)
    assert torch.equal(inferred.clone(), expected)
    assert y.grad_fn is None
    assert not y.requires_grad
    assert gating.calls == ["forward", "forward"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputing_gives_the_same_bits(use_reentrant: bool, gating: Gating) -> None:
    block, apart = Block(), Block()

    def run(x: Tensor, residual: Tensor) -> Tensor:
        return gated_linears(x, block.gate_up, block.down, residual)

    found = block.found(checkpoint(run, block.x, block.residual, use_reentrant=use_reentrant))
    assert gating.calls == ["forward", "forward", "gradient"]
    assert_same_bits(found, apart.found(apart.apart()))


def test_a_gradient_of_the_gradient_is_refused(gating: Gating) -> None:
    block = Block()
    (grad,) = torch.autograd.grad(block.together().square().sum(), block.x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# Frozen


FROZEN = [frozen for number in range(1, 4) for frozen in combinations(NAMES, number)]


@pytest.mark.parametrize("frozen", FROZEN, ids="+".join)
def test_what_is_frozen_gets_no_gradient_and_leaves_the_others_as_they_are(frozen: tuple[str, ...], gating: Gating) -> None:
    block = Block()
    for name in frozen:
        block.leaves[name].requires_grad_(False)
    found, expected = block.found(block.together()), by_autograd(block)
    assert all(found.pop(name) is None for name in frozen)
    assert_close(found, {name: value for name, value in expected.items() if name not in frozen})
    reaches_both = not {"x", "gate_up"} <= set(frozen)
    assert gating.calls == ["forward", *["gradient"] * reaches_both]


@pytest.mark.parametrize(
    ("frozen", "of_gate_up", "of_down"),
    [
        ((), {"x", "gate_up"}, {"both", "down", "activated"}),
        (("gate_up",), {"gate_up"}, {"both", "down", "activated"}),
        (("x",), {"x"}, {"both", "down", "activated"}),
        (("down",), {"x", "gate_up"}, {"both", "down"}),
        (("x", "gate_up"), None, {"activated"}),
        (("x", "gate_up", "down"), None, set()),
    ],
    ids=str,
)
def test_what_no_gradient_needs_is_not_kept(
    frozen: tuple[str, ...], of_gate_up: set[str] | None, of_down: set[str], gating: Gating
) -> None:
    block = Block()
    for name in frozen:
        block.leaves[name].requires_grad_(False)
    shapes = {(S, B, H): "x", (2 * F, H): "gate_up", (S, B, 2 * F): "both", (H, F): "down", (S, B, F): "activated"}

    def kept(node: Any) -> set[str]:
        return {shapes[tuple(saved.shape)] for saved in node.saved_tensors if saved is not None}

    y = block.together()  # torch 2.11 forgets what is kept when this ends
    node: Any = y.grad_fn
    assert kept(node) == of_down
    below = node.next_functions[0][0]
    assert (None if below is None else kept(below)) == of_gate_up
    assert node.next_functions[1][0] is None  # nothing goes back through the activated


class Zeros(TorchDispatchMode):
    """Counts tensors that are made to be zero."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket.__name__ in ("zeros", "zeros_like", "new_zeros", "zero_", "efficientzerotensor")
        return func(*args, **(kwargs or {}))


def test_no_gradient_of_zeros_is_made_for_the_activated(gating: Gating) -> None:
    block = Block()
    y = block.together()
    grad = upstream(y)
    with Zeros() as zeros:
        y.backward(grad)
    assert gating.calls == ["forward", "gradient"]
    assert zeros.num == 0


# Weight gradients into sums, and later


def with_sums(block: Block) -> tuple[dict[str, Tensor], list[str]]:
    """Sums that nothing has been written to, and the names of parameters whose accumulation ran its hooks."""
    weights: Any = {"gate_up": block.gate_up.weight, "down": block.down.weight}
    totals, arrived = {}, list[str]()
    for name, weight in weights.items():
        totals[name] = torch.full_like(weight, float("nan"))
        open_sum(weight, totals[name])
        weight.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    return totals, arrived


def test_weight_gradients_are_written_over_their_sums_then_added(gating: Gating, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "weight_gradient", lambda *_: pytest.fail("a gradient was made beside the sum"))
    block = Block()
    totals, arrived = with_sums(block)
    expected = by_autograd(block)
    for uses, how in ((1, "put"), (2, "add")):
        gating.calls.clear()
        arrived.clear()
        found = block.found(block.together())
        assert gating.calls == ["forward", "gradient", how, how]
        assert arrived == ["down", "gate_up"]
        assert all(block.leaves[name].grad is total for name, total in totals.items())
        assert_close(found, {name: value * (1 if name == "y" else uses) for name, value in expected.items()})


def test_autograd_grad_leaves_the_sums_alone(gating: Gating) -> None:
    block = Block()
    totals, arrived = with_sums(block)
    expected = by_autograd(block)
    y = block.together()
    grads = torch.autograd.grad(y, list(block.leaves.values()), upstream(y))
    assert_close({"y": y.detach(), **dict(zip(NAMES, grads, strict=True))}, expected)
    block.together().backward(upstream(y), inputs=[block.x])
    assert not arrived
    assert all(total.isnan().all() for total in totals.values())
    assert gating.calls == ["forward", "gradient"] * 2


def test_who_wants_to_see_a_weights_gradient_sees_it(gating: Gating) -> None:
    block = Block()
    totals, arrived = with_sums(block)
    block.gate_up.weight.register_hook(lambda grad: grad * 2)
    expected = by_autograd(block)
    found = block.found(block.together())
    assert_close(found, expected | {"gate_up": 2 * expected["gate_up"]})
    assert arrived == ["down", "gate_up"]
    assert block.down.weight.grad is totals["down"]
    assert gating.calls == ["forward", "gradient", "put"]


@pytest.mark.parametrize("sums", [False, True])
def test_weight_gradients_wait_until_they_are_asked_for(sums: bool, gating: Gating) -> None:
    block = Block()
    arrived = with_sums(block)[1] if sums else []
    expected = by_autograd(block)
    y = block.together()
    node: Any = y.grad_fn
    waiting = {"down": ask_to_wait(node), "gate_up": ask_to_wait(node.next_functions[0][0])}
    y.backward(upstream(y), inputs=[block.x, block.residual])
    found = {"y": y.detach(), **{name: leaf.grad for name, leaf in block.leaves.items()}}
    assert found["gate_up"] is found["down"] is None
    assert not arrived
    assert gating.calls == ["forward", "gradient"]
    for name, (compute,) in waiting.items():
        with torch.no_grad():
            made = compute()
        assert (made is None) == sums
        found[name] = block.leaves[name].grad if sums else made
    assert arrived == (["down", "gate_up"] if sums else [])
    assert_close(found, expected)


@pytest.mark.parametrize("sums", [False, True])
def test_a_split_backward_makes_weight_gradients_in_its_second_part(sums: bool, gating: Gating) -> None:
    block = Block()
    arrived = with_sums(block)[1] if sums else []
    expected = by_autograd(block)
    y = block.together()
    split = SplitBackward([(torch.autograd.graph.get_gradient_edge(y), upstream(y))], [block.x, block.residual])
    split.run_input_part()
    assert split.num_late == 2
    assert gating.calls == ["forward", "gradient"]
    assert block.gate_up.weight.grad is block.down.weight.grad is None
    assert_close({name: block.leaves[name].grad for name in ("x", "residual")}, {n: expected[n] for n in ("x", "residual")})
    split.run_weight_part()
    assert gating.calls == ["forward", "gradient", *["put"] * 2 * sums]
    assert sorted(arrived) == (["down", "gate_up"] if sums else [])
    assert_close({"y": y.detach(), **{name: leaf.grad for name, leaf in block.leaves.items()}}, expected)


# Autocast


def test_a_backward_under_autocast_keeps_the_dtype_of_a_forward_outside_of_it(gating: Gating) -> None:
    block = Block(torch.float32)
    y = block.together()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block.found(y)
    assert_close(found, by_autograd(block, upstream(y)), 1e-6)
    assert gating.calls == ["forward", "gradient"]


# Where it can be had


def test_products_are_asked_only_on_one_rank_without_biases_and_without_autocast(gating: Gating) -> None:
    block = Block()
    assert gates(block.x, block.gate_up, block.down)
    assert gating.asked == [(torch.float64, torch.float64)]
    wide = Block(torch.float32)
    gating.asked.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which casts, and may in another way
        assert not gates(wide.x, wide.gate_up, wide.down)
    two = Mesh(Parallelism(tp=2), 0, 2, axes={"tp": Axis("tp", (0, 1), 0)})
    for other in (Block(bias=(True, False)), Block(bias=(False, True)), Block(mesh=two)):
        assert not gates(other.x, other.gate_up, other.down)
    assert not gating.asked
    set_products(TorchProducts())
    assert not gates(block.x, block.gate_up, block.down)
