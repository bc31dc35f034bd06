"""SwiGLU stays out of the products where somebody looks in between, and where products cannot do it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from lightning_megatron.initialize import materialize
from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.activation import swiglu
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.optim.guard import ParameterGuard, wait_in_forwards
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import run_distributed
from tests.layers.test_gated_mlp import LAYERS, ONCE, GatingAndAdding, of
from tests.layers.test_recompute import LLAMA, assert_same_bits, plain
from tests.layers.test_residual import assert_close
from tests.tensor_parallel.gating import Gating


def hook(mlp: Any) -> None:
    mlp.gate_up.register_forward_hook(lambda module, args, out: out * 2)


def hook_down(mlp: Any) -> None:
    mlp.down.register_forward_hook(lambda module, args, out: out * 2)


def pre_hook(mlp: Any) -> None:
    mlp.gate_up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def pre_hook_down(mlp: Any) -> None:
    mlp.down.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))


def backward_hook(mlp: Any) -> None:
    mlp.gate_up.register_full_backward_hook(lambda module, grads, of_out: (grads[0] * 2,))


def backward_pre_hook(mlp: Any) -> None:
    mlp.down.register_full_backward_pre_hook(lambda module, of_out: (of_out[0] * 2,))


def replaced(mlp: Any) -> None:
    inner = mlp.gate_up.forward
    mlp.gate_up.forward = lambda hidden: inner(hidden) * 2


def replaced_down(mlp: Any) -> None:
    inner = mlp.down.forward
    mlp.down.forward = lambda activated, **named: inner(activated, **named) * 2


class DoubledColumn(ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class DoubledRow(RowParallelLinear):
    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, residual=residual) * 2


def subclass(mlp: Any) -> None:
    mlp.gate_up.__class__ = DoubledColumn


def subclass_down(mlp: Any) -> None:
    mlp.down.__class__ = DoubledRow


class Low(nn.Module):
    """As adapters of low rank add to a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((size, 1), 0.1)) for size in weight.shape)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b.t()


def adapt(mlp: Any) -> None:
    parametrize.register_parametrization(mlp.gate_up, "weight", Low(mlp.gate_up.weight))


def adapt_down(mlp: Any) -> None:
    parametrize.register_parametrization(mlp.down, "weight", Low(mlp.down.weight))


class Wrapped(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.linear(x) * 2
        return doubled


def wrap(mlp: Any) -> None:
    mlp.gate_up = Wrapped(mlp.gate_up)


def wrap_down(mlp: Any) -> None:
    mlp.down = Wrapped(mlp.down)


def own_activation(mlp: Any) -> None:
    mlp._activation = lambda gate_up: swiglu(gate_up) * 2


CHANGES = [hook, hook_down, pre_hook, pre_hook_down, backward_hook, backward_pre_hook, replaced, replaced_down]
CHANGES += [subclass, subclass_down, adapt, adapt_down, wrap, wrap_down, own_activation]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whoever_looks_in_between_sees_what_there_was_before(
    change: Callable[[Any], None], gating: Callable[..., Gating]
) -> None:
    model = GPT(LLAMA, seed=0)
    unchanged = of(model)
    change(model.layers[1].mlp)
    expected = of(model)
    assert change in (adapt, adapt_down) or any(not torch.equal(expected[name], unchanged[name]) for name in unchanged)
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == ["forward"] * (LAYERS - 1) + ["gradient"] * (LAYERS - 1)  # the other layers go on
    products = gating(GatingAndAdding())
    assert_close(of(model), expected)
    assert products.calls == ["forward"] * (LAYERS - 1) + ["gradient"] * (LAYERS - 1)


def test_a_hook_on_all_modules_sees_each_linear(gating: Callable[[], Gating]) -> None:
    model, seen = GPT(LLAMA, seed=0), list[type]()
    products = gating()
    handle = register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        of(model)
    finally:
        handle.remove()
    assert products.calls == []
    assert seen.count(RowParallelLinear) == 2 * LAYERS
    of(model)
    assert products.calls == ONCE


def test_a_hook_on_the_block_does_not_matter(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: out * 2)
    expected = of(model)
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == ONCE


OTHERS = {
    "biases": replace(LLAMA, bias=True),
    "gelu": replace(LLAMA, activation="gelu"),
    "gelu and biases": replace(LLAMA, activation="gelu", bias=True),
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS.keys())
def test_other_blocks_stay_as_they_are(config: GPTConfig, gating: Callable[[], Gating]) -> None:
    model = GPT(config, seed=0)
    expected = of(model)
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == []


@pytest.mark.parametrize("way", [["mlp_act"], "selective"], ids=str)
def test_a_dropped_activation_stays_apart_until_it_is_kept_again(way: Any, gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    expected = of(model)
    recompute(model, Recompute.of(way))
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == []
    recompute(model, None)
    assert_same_bits(of(model), expected)
    assert products.calls == ONCE


def test_the_other_backend_has_blocks_of_its_own(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0, backend=plain())
    expected = of(model)
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == products.asked == []


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_under_tensor_parallelism_it_stays_apart(sequence_parallel: bool) -> None:
    run_distributed(_two_ranks, 2, sequence_parallel)


def _two_ranks(sequence_parallel: bool) -> None:
    mesh = Mesh.create(Parallelism(tp=2, sequence_parallel=sequence_parallel), device=torch.device("cpu"))
    with use_mesh(mesh):
        model = GPT(LLAMA)
    materialize(model, device=mesh.device, seed=5)
    expected = of(model)
    products = Gating()
    set_products(products)
    try:
        assert_same_bits(of(model), expected)
    finally:
        set_products(TorchProducts())
    assert products.calls == products.asked == []


# Where parameters are still on their way


class Arriving:
    """Stands for a bucket: its parameter has its values when it has been waited for."""

    def __init__(self, param: nn.Parameter, calls: list[str]) -> None:
        self.params, self.is_gathering, self._calls = [param], True, calls
        self._values = param.detach().clone()
        param.data.fill_(float("nan"))

    def wait_gather(self) -> None:
        self.is_gathering = False
        self.params[0].data.copy_(self._values)
        self._calls.append("arrived")


@pytest.mark.parametrize("guarded", [False, True])
def test_parameters_on_their_way_are_waited_for_each_before_its_product(guarded: bool, gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    expected, products = of(model), gating()
    weights = [linear.weight for layer in model.layers for linear in (layer.mlp.gate_up, layer.mlp.down)]
    buckets: Any = [Arriving(weight, products.calls) for weight in weights]
    wait_in_forwards(model, buckets)
    guard = ParameterGuard(buckets)
    if guarded:  # else there are the hooks alone, as kernels need them that torch's functions do not see
        guard.start()
    try:
        assert_same_bits(of(model), expected)
    finally:
        ParameterGuard.release()
    assert guard.is_idle
    assert products.calls == ["arrived", "forward", "arrived"] * LAYERS + ["gradient"] * LAYERS
    products.calls.clear()
    assert_same_bits(of(model), expected)
    assert products.calls == ONCE
    assert_same_bits(of(copy.deepcopy(model)), of(model))


def test_a_hook_beside_the_one_that_waits_is_heard(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    wait_in_forwards(model, [])
    pre_hook(model.layers[1].mlp)
    expected = of(model)
    products = gating()
    assert_same_bits(of(model), expected)
    assert products.calls == ["forward", "gradient"]
