"""The activated of a gated block by the product before it, and handed to the linear behind it; in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.models import GPT, GPTConfig

LLAMA = GPTConfig(
    num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, ffn_hidden_size=64, vocab_size=96, max_seq_len=32, init_std=0.1
)
TOKENS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(3))


class Noting(PlainOperations):
    """Notes which way each activation was made; ``together``: whether products make them."""

    def __init__(self, options: Fp8Options | None, *, together: bool = True) -> None:
        super().__init__(options)
        self.together, self.apart_calls, self.gated_calls = together, 0, 0

    def activate_quantized(self, *args: Any, **kwargs: Any) -> Any:
        self.apart_calls += 1
        return super().activate_quantized(*args, **kwargs)

    def product_gated(self, *args: Any, **kwargs: Any) -> Any:
        made = super().product_gated(*args, **kwargs) if self.together else None
        self.gated_calls += made is not None
        self.apart_calls -= made is not None  # it was not called by a layer
        return made


def trained(
    operations: PlainOperations,
    options: Fp8Options,
    way: str | None = None,
    see: Callable[[GPT], None] | None = None,
    **fields: Any,
) -> list[Tensor]:
    """Losses and gradients of two steps, of which the second has a history, and the factors in the end."""
    backend = TeBackend(operations, options)
    model = GPT(replace(LLAMA, **fields), seed=5, backend=backend)
    recompute(model, Recompute.of(way))
    if see is not None:
        see(model)
    found = []
    for _ in range(2):
        model.zero_grad()
        losses = model(TOKENS, labels=TOKENS.flip(1))
        losses.mean().backward()
        found += [losses.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]
        assert backend.scales is not None
        backend.scales.advance(lambda numbers: numbers)
    assert backend.scales is not None
    return [*found, *backend.scales.tensors[0]]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("way", [None, "mlp_act", "mlp", "layer"])
def test_the_product_before_makes_what_the_linear_behind_would(recipe: Any, way: str | None) -> None:
    options = Fp8Options(recipe=recipe)
    together, apart = Noting(options), Noting(options, together=False)
    found, expected = trained(together, options, way), trained(apart, options, way)
    forwards = 2 * 2 * (2 if way in ("mlp", "layer") else 1)  # steps, layers
    again = 4 if way == "mlp_act" else 0  # for the gradient of the weight, from gate and up
    assert (together.gated_calls, together.apart_calls) == (forwards, again)
    assert (apart.gated_calls, apart.apart_calls) == (0, forwards + again)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _sees_gate_up(model: GPT) -> None:
    for layer in model.layers:
        layer.mlp.gate_up.register_forward_hook(lambda module, args, result: result * 0.5)


def _sees_down(model: GPT) -> None:
    for layer in model.layers:
        layer.mlp.down.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))


@pytest.mark.parametrize("see", [_sees_gate_up, _sees_down])
def test_who_changes_gate_and_up_is_heard(see: Callable[[GPT], None]) -> None:
    options = Fp8Options()
    together, apart = Noting(options), Noting(options, together=False)
    found, expected = trained(together, options, see=see), trained(apart, options, see=see)
    assert together.gated_calls == 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[0], trained(apart, options)[0])


@pytest.mark.parametrize("way", ["layers.*.mlp.gate_up", "layers.*.mlp.down"])
def test_a_linear_that_is_recomputed_alone_hands_nothing_over(way: str) -> None:
    options = Fp8Options()
    together = Noting(options)
    found, expected = trained(together, options, way), trained(Noting(options, together=False), options)
    assert together.gated_calls == 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_without_8_bits_and_without_gradients_nothing_changes() -> None:
    operations = Noting(None)
    wide = GPT(LLAMA, seed=5, backend=TeBackend(operations, None))
    wide(TOKENS, labels=TOKENS.flip(1)).mean().backward()
    assert operations.gated_calls == 0
    options = Fp8Options(recipe="current")
    together, apart = Noting(options), Noting(options, together=False)
    with torch.no_grad():
        one, other = (GPT(LLAMA, seed=5, backend=TeBackend(operations, options))(TOKENS) for operations in (together, apart))
    assert torch.equal(one, other)
    assert (together.gated_calls, apart.gated_calls) == (2, 0)


def test_a_copy_computes_the_same() -> None:
    options = Fp8Options(recipe="current")
    model: nn.Module = GPT(LLAMA, seed=5, backend=TeBackend(Noting(options), options))
    before = model(TOKENS)
    assert torch.equal(before, deepcopy(model)(TOKENS))
