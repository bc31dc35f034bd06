"""Operations with one pass forward and one backward, in their plain form, against autograd on plain formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.kernels.rotation import apply_rope
from lightning_megatron.layers.activation import swiglu
from lightning_megatron.layers.norm import LayerNorm, RMSNorm, add_and_norm
from lightning_megatron.layers.rope import Rope, rotate_fused, rotate_heads

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(
    run: Callable[..., tuple[Tensor, ...]],
    reference: Callable[..., tuple[Tensor, ...]],
    *given: Tensor,
    only: int | None = None,
) -> None:
    """Outputs and gradients; ``only`` sends a gradient into one of the outputs."""
    results = []
    for function in (run, reference):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        outputs = function(*leaves)
        grads = [random(*output.shape, seed=50 + index) for index, output in enumerate(outputs)]
        chosen = range(len(outputs)) if only is None else [only]
        torch.autograd.backward([outputs[i] for i in chosen], [grads[i] for i in chosen])
        results.append([*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        if found is None or expected is None:
            other = expected if found is None else found
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(found, expected, **EXACT)


def with_weight(norm: RMSNorm, weight: Tensor) -> RMSNorm:
    del norm._parameters["weight"]
    norm.weight = weight  # type: ignore[assignment]
    return norm


@pytest.mark.parametrize("only", [None, 0, 1])
def test_the_sum_and_its_norm_share_one_gradient(only: int | None) -> None:
    def run(hidden: Tensor, weight: Tensor, added: Tensor) -> tuple[Tensor, ...]:
        return add_and_norm(with_weight(RMSNorm(6, eps=1e-3, device=CPU), weight), hidden, added)

    def reference(hidden: Tensor, weight: Tensor, added: Tensor) -> tuple[Tensor, ...]:
        total = hidden + added
        return total, F.rms_norm(total, (6,), weight, 1e-3)

    compare(run, reference, random(4, 3, 6, seed=0), random(6, seed=1), random(4, 3, 6, seed=2), only=only)


def test_without_an_addend_the_hidden_state_goes_through() -> None:
    def run(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return add_and_norm(with_weight(RMSNorm(6, eps=1e-3, device=CPU), weight), hidden)

    def reference(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return hidden * 1.0, F.rms_norm(hidden, (6,), weight, 1e-3)

    compare(run, reference, random(4, 3, 6, seed=0), random(6, seed=1))


def test_other_norms_add_and_normalise_in_turn() -> None:
    norm = LayerNorm(6, device=CPU, dtype=torch.float64)
    hidden, added = random(4, 3, 6, seed=0), random(4, 3, 6, seed=2)
    total, normed = add_and_norm(norm, hidden, added)
    assert torch.equal(total, hidden + added)
    assert torch.equal(normed, norm(hidden + added))


def test_a_narrow_norm_is_computed_wide_and_rounded_once() -> None:
    norm = RMSNorm(64, device=CPU, dtype=torch.bfloat16)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    hidden = random(7, 64, seed=0).bfloat16()
    exact = F.rms_norm(hidden.double(), (64,), norm.weight.double(), 1e-5)
    assert torch.equal(norm(hidden), exact.bfloat16())


def test_swiglu_equals_its_formula() -> None:
    def reference(gate_up: Tensor) -> tuple[Tensor, ...]:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    compare(lambda gate_up: (swiglu(gate_up),), reference, random(4, 3, 10, seed=0))


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (3, 3), (2, 1)])
def test_rotating_a_fused_projection_equals_rotating_its_parts(heads: int, kv: int) -> None:
    size = 6
    tables = Rope(head_dim=size).tables(torch.arange(5))

    def reference(fused: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (part.unflatten(-1, (-1, size)) for part in fused.split([heads * size, kv * size, kv * size], dim=-1))
        return apply_rope(q, tables.cos, tables.sin), apply_rope(k, tables.cos, tables.sin), v

    fused = random(5, 2, (heads + 2 * kv) * size, seed=0)
    compare(lambda x: rotate_fused(x, (heads, kv), head_dim=size, tables=tables), reference, fused)


def test_rotating_heads_alone_equals_the_formula() -> None:
    tables = Rope(head_dim=6).tables(torch.arange(5))
    run, reference = ((lambda x, f=f: (f(x, tables.cos, tables.sin),)) for f in (rotate_heads, apply_rope))
    compare(run, reference, random(5, 2, 3, 6, seed=0))
