"""What ``torch.compile`` fuses computes what it computes without, and is compiled once for all layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers import compiled as compiled_file
from lightning_megatron.layers import norm as norm_file
from lightning_megatron.layers.graphs import graph_layers
from lightning_megatron.layers.norm import LayerNorm, add_and_norm
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.torch_backend import TorchBackend
from lightning_megatron.mesh import current_mesh
from lightning_megatron.models import GPT
from tests.parity.harness import GPT2_TIED


class Counted:
    """Stands for a compiled function, and counts."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.calls = 0

    def __call__(self, function: Any, **_: Any) -> Any:
        self.made.append(function)

        def run(*args: Any) -> Any:
            self.calls += 1
            return function(*args)

        return run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(torch, "compile", counted)
    compiled_file._compiled.cache_clear()
    yield counted
    compiled_file._compiled.cache_clear()


def outcome(model: GPT) -> dict[str, Tensor]:
    tokens = torch.randint(model.config.vocab_size, (2, 10), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(tokens, labels=tokens).mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: param.grad.clone() for name, param in model.named_parameters()}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def test_a_model_runs_one_compiled_function_in_all_of_its_layers(counted: Counted) -> None:
    expected = outcome(GPT(GPT2_TIED, seed=0))
    assert counted.calls == 0
    model = GPT(GPT2_TIED, seed=0, backend=TorchBackend(compiles=True))
    assert same(outcome(model), expected)
    assert counted.made == [norm_file._add_layer_norm]
    assert counted.calls == len(model.layers)  # the norm after attention; that before it has nothing to add


def test_norms_that_are_made_again_are_not_compiled(counted: Counted) -> None:
    model = GPT(GPT2_TIED, seed=0, backend=TorchBackend(compiles=True))
    recompute(model, Recompute("norm"))
    assert same(outcome(model), outcome(GPT(GPT2_TIED, seed=0)))
    assert counted.calls == 0


def test_while_parameters_are_watched_nothing_is_compiled(counted: Counted) -> None:
    model = GPT(GPT2_TIED, seed=0, backend=TorchBackend(compiles=True))

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Watch():
        outcome(model)
    assert counted.calls == 0


def test_graphs_and_compiled_functions_are_refused_together() -> None:
    model = GPT(replace(GPT2_TIED, num_layers=1), backend=TorchBackend(compiles=True))
    with pytest.raises(ValueError, match="cuda_graphs=True does not go with compile_pointwise=True"):
        graph_layers(model, current_mesh(), recorder=object())  # type: ignore[arg-type]


def test_an_addition_and_norm_are_traced_as_one_graph_with_their_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without code generation, which takes a quarter of a minute on a CPU: tests/gpu/graphs.py has that.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    compiled_file._compiled.cache_clear()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, 2, 16, generator=generator).requires_grad_() for _ in range(2)]
    weights = [torch.randn(5, 2, 16, generator=generator) for _ in range(2)]
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        norm = LayerNorm(16, compiled=is_compiled, device="cpu")
        with torch.no_grad():
            norm.bias.add_(0.5)
        both = add_and_norm(norm, *inputs)
        loss = sum((result * weight).sum() for result, weight in zip(both, weights, strict=True))
        found.append([*both, *torch.autograd.grad(loss, [*inputs, norm.weight, norm.bias])])
    compiled_file._compiled.cache_clear()
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
