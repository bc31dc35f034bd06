"""Factors that follow from a tensor itself, weights in 8 bits made when an optimizer's step ends, and the head's exact sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, log2, nan
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron.layers.backend import NormSpec
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend, make_weights
from lightning_megatron.layers.te_backend.scales import LARGEST, SPACING, own_factor
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.precision import MegatronPrecision


@pytest.mark.parametrize("dtype", LARGEST)
def test_an_own_factor_is_the_largest_of_its_powers_that_fits(dtype: torch.dtype) -> None:
    largest = torch.tensor([1e-30, 0.3, 1.0, 3.0, 7.0, 7.001, 28.0, 28.001, 448.0, 449.0, 57344.0, 57345.0, 1e30])
    step = 2.0 ** SPACING[dtype]
    for amax, factor in zip(largest.tolist(), own_factor(largest, dtype).tolist(), strict=True):
        assert amax * factor <= LARGEST[dtype] < amax * factor * step
        assert log2(factor) % SPACING[dtype] == 0


def test_nothing_and_overflows_have_the_factor_one() -> None:
    assert own_factor(torch.tensor([0.0, inf, nan]), torch.float8_e4m3fn).tolist() == [1.0, 1.0, 1.0]


class _Fast(PlainOperations):
    """Has another self for sums in fp32."""

    def __init__(self, options: Fp8Options | None) -> None:
        super().__init__(options)
        self.exact = PlainOperations(options)

    def with_fp32_sums(self) -> PlainOperations:
        return self.exact


def test_the_head_keeps_sums_in_fp32_where_layers_do_not() -> None:
    options = Fp8Options(head=True, fast_gradients=True)
    operations = _Fast(options)
    config = GPTConfig(num_layers=1, hidden_size=32, num_heads=2, vocab_size=64, max_seq_len=16, ffn_hidden_size=32)
    model = GPT(config, backend=TeBackend(operations, options))
    used = {name: child.job.operations for name, child in model.named_modules() if hasattr(child, "job")}
    assert used.pop("head") is operations.exact
    assert set(used.values()) == {operations}
    assert len(used) == 4


class _Counted(PlainOperations):
    """Notes how many weights it has rounded."""

    num_weights = 0

    def quantize_weight(self, weight: torch.Tensor) -> Any:
        self.num_weights += 1
        return super().quantize_weight(weight)


def test_used_weights_that_changed_are_made_ahead_and_not_again_in_the_forward() -> None:
    options = Fp8Options(recipe="delayed")
    operations = _Counted(options)
    backend = TeBackend(operations, options)
    where: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    made = [backend.norm_column_linear(16, 32, norm=NormSpec("rmsnorm"), mesh=Mesh(), **where)[1] for _ in range(2)]
    used, unused = (linear.requires_grad_(False) for linear in made)
    for linear in made:
        nn.init.normal_(linear.weight)
    model, x = nn.ModuleList(made), torch.randn(16, 1, 16)
    make_weights(model, [used.weight])
    assert operations.num_weights == 0  # of a model that has not run there is nothing to make

    used(x)
    assert operations.num_weights == 1
    used.weight.mul_(2.0)
    assert backend.scales is not None
    backend.scales.weights_changed()
    make_weights(model, [used.weight, unused.weight])
    assert operations.num_weights == 2
    result = used(x)
    assert operations.num_weights == 2
    exact = x @ used.weight.t()
    assert float((result - exact).norm() / exact.norm()) < 0.1
    backend.scales.weights_changed()
    make_weights(model, [unused.weight])
    assert operations.num_weights == 2  # another optimizer's


def test_weights_that_change_between_two_runs_are_rounded_anew() -> None:
    config = GPTConfig(num_layers=1, hidden_size=32, num_heads=2, ffn_hidden_size=32, vocab_size=32, max_seq_len=16)

    def opened() -> tuple[GPT, Callable[[], None]]:
        options = Fp8Options(recipe="current")
        backend = TeBackend(PlainOperations(options), options)
        assert backend.scales is not None
        precision = MegatronPrecision("bf16-mixed", fp8="current")
        model = GPT(config, seed=5, backend=backend)
        return model, partial(precision.use_scales, [backend.scales], torch.clone, torch.device("cpu"))

    (model, begin), (other, begin_other) = opened(), opened()
    tokens = torch.arange(16)[None]
    begin()
    before = model(tokens).detach()
    with torch.no_grad():
        for param in model.layers.parameters():
            param.data.mul_(1.5)  # as a flat buffer is written: no count of changes shows it
    begin()
    other.load_state_dict(model.state_dict())
    begin_other()
    assert torch.equal(model(tokens), other(tokens))
    assert not torch.equal(model(tokens), before)
