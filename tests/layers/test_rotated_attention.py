"""Models whose projections rotate in their product compute the same, and rotate apart where somebody looks in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.models import GPT
from tests.layers.test_offload import moving
from tests.layers.test_recompute import LLAMA, assert_same_bits, kept_in_a_layer, outcome, tokens
from tests.tensor_parallel.rotating import Rotating

LAYERS = LLAMA.num_layers


@pytest.fixture
def rotating() -> Iterator[Rotating]:
    made = Rotating()
    yield made
    set_products(TorchProducts())


def of(model: nn.Module) -> dict[str, Tensor]:
    return outcome(model, tokens(), labels=tokens())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("way", "forwards"), [(None, 1), (["norm"], 1), (["attention_core"], 1), (["layer"], 2)], ids=str)
@pytest.mark.parametrize("moves", [False, True], ids=["", "offload"])
def test_loss_and_gradients_are_the_same_bit_by_bit(
    moves: bool, way: Any, forwards: int, dtype: torch.dtype, rotating: Rotating
) -> None:
    model = GPT(LLAMA, seed=0, dtype=dtype)
    expected = of(model)
    log = moving(model, way).log if moves else recompute(model, Recompute.of(way))
    set_products(rotating)
    assert_same_bits(of(model), expected, way)
    assert rotating.calls.count("forward") == forwards * LAYERS
    assert not moves or log


@pytest.mark.parametrize("way", [None, "selective", "full", ["norm"]], ids=str)
def test_no_more_is_kept(way: Any, rotating: Rotating) -> None:
    before = kept_in_a_layer(LLAMA, way)
    set_products(rotating)
    assert kept_in_a_layer(LLAMA, way) == before


def test_one_that_is_looked_at_rotates_apart(rotating: Rotating) -> None:
    model = GPT(LLAMA, seed=0)
    expected, seen = of(model), list[Tensor]()
    model.layers[0].attn.qkv.register_forward_hook(lambda module, args, result: seen.append(result.detach()))
    set_products(rotating)
    assert_same_bits(of(model), expected, None)
    assert len(seen) == 1
    assert rotating.calls.count("forward") == LAYERS - 1


def test_heads_that_are_normed_before_are_not_rotated_in_the_product(rotating: Rotating) -> None:
    model = GPT(replace(LLAMA, qk_norm=True), seed=0)
    expected = of(model)
    set_products(rotating)
    assert_same_bits(of(model), expected, None)
    assert "forward" not in rotating.calls
