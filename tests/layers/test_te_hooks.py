"""Hooks and adapters inside of layers in 8 bits: they see numbers, and what they change is changed, gradients included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.layers.te_backend.handoff import goes_unheard
from lightning_megatron.models import GPT
from tests.layers.test_te_gated import LLAMA, TOKENS

Change = Callable[[nn.Module], Any]


def results(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, result: _half(result))


def inputs(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (_half(args[0]), *args[1:]))


def gradients_of_results(module: nn.Module) -> None:
    module.register_full_backward_pre_hook(lambda module, grads: tuple(grad if grad is None else grad * 0.5 for grad in grads))


def gradients_of_inputs(module: nn.Module) -> None:
    def half(module: nn.Module, of_inputs: Any, of_results: Any) -> Any:
        return tuple(grad if grad is None else grad * 0.5 for grad in of_inputs)

    module.register_full_backward_hook(half)


def _half(value: Any) -> Any:
    return tuple(_half(one) for one in value) if isinstance(value, tuple) else value * 0.5


PLACES: list[tuple[str, Change]] = [
    *((name, results) for name in ("attn_norm", "mlp_norm", "attn.qkv", "attn.core", "attn.out", "mlp.gate_up", "mlp.down")),
    *((name, results) for name in ("attn", "mlp")),
    *((name, inputs) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down", "attn", "mlp")),
    *((name, gradients_of_results) for name in ("attn_norm", "attn.qkv", "attn.core", "mlp.gate_up")),
    *((name, gradients_of_inputs) for name in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")),
]


def trained(
    options: Fp8Options | None,
    change: Change | None = None,
    name: str = "",
    way: str | None = None,
    *,
    backend: TeBackend | None = None,
) -> list[Tensor]:
    """Loss and gradients of a second step, whose factors come from a first one; on the torch backend without ``options``."""
    backend = backend if options is None else TeBackend(PlainOperations(options), options)
    model = GPT(replace(LLAMA, num_layers=1), seed=5, backend=backend)
    if change is not None:
        change(model.layers[0].get_submodule(name))
    recompute(model, Recompute.of(way))
    for _ in range(2):
        model.zero_grad()
        losses = model(TOKENS, labels=TOKENS.flip(1))
        losses.mean().backward()
        if backend is not None and backend.scales is not None:
            backend.scales.advance(lambda numbers: numbers)
    return [losses.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


def apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of a loss or a gradient."""
    norm = torch.linalg.vector_norm
    return max(float(norm(one - other) / norm(other)) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [Fp8Options(), Fp8Options(recipe="current", attention=True)], ids=["delayed", "attention"])
@pytest.mark.parametrize(("name", "change"), PLACES, ids=[f"{change.__name__} of {name}" for name, change in PLACES])
def test_what_a_hook_changes_is_changed(name: str, change: Change, options: Fp8Options) -> None:
    expected, unchanged = trained(None, change, name), trained(None)
    assert apart(unchanged, expected) > 0.4  # what would be found if the hook were not heard
    assert apart(trained(options, change, name), expected) < 0.25  # 8 bits


@pytest.mark.parametrize(("name", "change"), PLACES, ids=[f"{change.__name__} of {name}" for name, change in PLACES])
def test_hooks_do_the_same_on_both_backends_in_16_bits(name: str, change: Change) -> None:
    found = trained(None, change, name, backend=TeBackend(PlainOperations(None), None))
    assert apart(found, trained(None, change, name)) < 1e-4


def test_a_hook_is_shown_numbers() -> None:
    shown: list[bool] = []

    def look(module: nn.Module) -> None:
        for name in ("attn_norm", "mlp_norm", "attn", "mlp", "attn.qkv", "attn.core", "attn.out", "mlp.gate_up", "mlp.down"):
            child = module.get_submodule(name)
            child.register_forward_hook(lambda module, args, result: shown.append(bool(args[0].isfinite().all())))

    trained(Fp8Options(attention=True), look, "")
    assert len(shown) == 18
    assert all(shown)


class Adapter(nn.Module):
    """A linear with something beside it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.part_sizes = base, getattr(base, "part_sizes", None)
        first = torch.randn(8, base.weight.shape[1], generator=torch.Generator().manual_seed(1)) * 0.2
        second = torch.randn(base.weight.shape[0], 8, generator=torch.Generator().manual_seed(2)) * 0.2
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x: Tensor) -> Any:
        """The linear's result, and more."""
        return self.base(x) + x @ self.first.t() @ self.second.t()


def wraps(*names: str) -> Change:
    def change(layer: Any) -> None:
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(layer.get_submodule(parent), child, Adapter(layer.get_submodule(name)))

    return change


@pytest.mark.parametrize("attention", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(
    "names", [("attn.qkv",), ("attn.out",), ("mlp.gate_up",), ("mlp.down",), ("mlp.gate_up", "mlp.down")], ids=str
)
def test_what_an_adapter_adds_is_added(names: tuple[str, ...], attention: bool) -> None:
    expected = trained(None, wraps(*names))
    assert apart(trained(Fp8Options(attention=attention), wraps(*names)), expected) < 0.25


@pytest.mark.parametrize("way", ["norm", "mlp", "layer", "attention_core"])
def test_what_runs_a_module_again_is_no_hook(way: str) -> None:
    found = trained(Fp8Options(attention=True), way=way)
    assert all(torch.equal(one, other) for one, other in zip(found, trained(Fp8Options(attention=True)), strict=True))
    model = GPT(LLAMA, seed=5, backend=TeBackend(PlainOperations(Fp8Options()), Fp8Options()))
    recompute(model, Recompute.of(way))
    wrapped = [child for child in model.modules() if "forward" in vars(child)]
    assert wrapped
    assert goes_unheard(*wrapped)
    results(wrapped[0])
    assert not goes_unheard(*wrapped)


class Beside(nn.Module):
    """A block with something beside it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any) -> Any:
        """The block's result, and more."""
        return self.block(x, *args) + 0.3 * x


@pytest.mark.parametrize("name", ["attn", "mlp"])
def test_what_stands_beside_a_block_is_added(name: str) -> None:
    def change(layer: Any) -> None:
        setattr(layer, name, Beside(getattr(layer, name)))

    assert apart(trained(Fp8Options(), change), trained(None, change)) < 0.25


@pytest.mark.parametrize("name", ["attn.qkv", "attn.out", "mlp.gate_up", "mlp.down"])
def test_another_linear_is_given_numbers(name: str) -> None:
    def change(layer: Any) -> None:
        parent, _, child = name.rpartition(".")
        old = layer.get_submodule(name)
        new = nn.Linear(old.weight.shape[1], old.weight.shape[0], bias=False)
        new.weight.data.copy_(old.weight.data)
        new.part_sizes = getattr(old, "part_sizes", None)
        setattr(layer.get_submodule(parent), child, new)

    assert apart(trained(Fp8Options(attention=True), change), trained(None, change)) < 0.25


def test_a_norm_that_somebody_else_calls_returns_numbers_and_leaves_nothing_behind() -> None:
    options = Fp8Options()
    backend = TeBackend(PlainOperations(options), options)
    model = GPT(replace(LLAMA, num_layers=1), seed=5, backend=backend)
    model(TOKENS, labels=TOKENS.flip(1)).mean().backward()
    layer: Any = model.layers[0]
    x, y = torch.randn(8, 2, 64), torch.randn(8, 2, 64)
    expected = layer.mlp(y)
    assert layer.mlp_norm(x).isfinite().all()
    assert torch.equal(layer.mlp(y), expected)


def test_anomaly_detection_finds_none() -> None:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        found = trained(Fp8Options(attention=True))
    assert apart(found, trained(Fp8Options(attention=True))) < 1e-5
