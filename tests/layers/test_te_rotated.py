"""Queries and keys rotated by the 8-bit product of their projection; in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations
from lightning_megatron.models import GPT
from tests.layers.test_te_gated import LLAMA, trained


class Noting(PlainOperations):
    """Counts products that rotate; ``together``: whether they do."""

    def __init__(self, options: Fp8Options | None, *, together: bool = True) -> None:
        super().__init__(options)
        self.together, self.num_rotated = together, 0

    def product_rotated(self, *args: Any, **kwargs: Any) -> Any:
        made = super().product_rotated(*args, **kwargs) if self.together else None
        self.num_rotated += made is not None
        return made


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(("way", "forwards"), [(None, 1), ("attention_core", 1), ("norm", 1), ("layer", 2)])
def test_what_the_product_rotates_is_what_a_pass_rotates(recipe: Any, way: str | None, forwards: int) -> None:
    options = Fp8Options(recipe=recipe)
    together, apart = Noting(options), Noting(options, together=False)
    assert_same(trained(together, options, way), trained(apart, options, way))
    assert (together.num_rotated, apart.num_rotated) == (2 * LLAMA.num_layers * forwards, 0)


def test_what_is_rotated_matters() -> None:
    class Still(Noting):
        def product_rotated(self, weight: Any, x: Any, like: Tensor, rotation: Any) -> Tensor:
            return self.product(weight, x, None, like)

    options = Fp8Options()
    assert not torch.equal(trained(Still(options), options)[0], trained(Noting(options), options)[0])


def _halves_qkv(model: GPT) -> None:
    for layer in model.layers:
        layer.attn.qkv.register_forward_hook(lambda module, args, result: result * 0.5)


def test_who_changes_the_projection_sees_it_before_it_is_rotated() -> None:
    options = Fp8Options()
    together, apart = Noting(options), Noting(options, together=False)
    found = trained(together, options, see=_halves_qkv)
    assert together.num_rotated == 0
    assert_same(found, trained(apart, options, see=_halves_qkv))
    assert not torch.equal(found[0], trained(apart, options)[0])


@pytest.mark.parametrize("way", ["layers.*.attn.qkv", "layers.*.attn"])
def test_what_is_recomputed_around_it_is_the_same(way: str) -> None:
    options = Fp8Options()
    assert_same(trained(Noting(options), options, way), trained(Noting(options, together=False), options))


def test_heads_that_are_normed_before_are_rotated_apart() -> None:
    options = Fp8Options()
    together = Noting(options)
    assert_same(trained(together, options, qk_norm=True), trained(Noting(options, together=False), options, qk_norm=True))
    assert together.num_rotated == 0
