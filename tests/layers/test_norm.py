from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.sharding import sharding_of

CPU = torch.device("cpu")


def test_rms_norm_equals_its_formula_with_gradients() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(16, eps=1e-3, device=CPU, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 16, dtype=torch.float64, requires_grad=True)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert_close(norm(x), expected)
    weights = torch.randn_like(x)
    ours = torch.autograd.grad((norm(x) * weights).sum(), (x, norm.weight))
    theirs = torch.autograd.grad((expected * weights).sum(), (x, norm.weight))
    assert_close(ours, theirs)


def test_layer_norm_equals_that_of_torch() -> None:
    torch.manual_seed(0)
    norm, reference = LayerNorm(16, device=CPU), nn.LayerNorm(16)
    nn.init.normal_(reference.weight)
    nn.init.normal_(reference.bias)
    norm.load_state_dict(reference.state_dict())
    x = torch.randn(5, 2, 16)
    assert_close(norm(x), reference(x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_bfloat16_is_rounded_once_from_an_fp32_result(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    torch.manual_seed(0)
    norm = kind(512, device=CPU, dtype=torch.bfloat16)
    x = (3 * torch.randn(64, 512) + 1).bfloat16()
    exact = kind(512, device=CPU, dtype=torch.float64)(x.double())
    one_rounding = 2.0**-8
    assert_close(norm(x).double(), exact, rtol=1.01 * one_rounding, atol=1e-6)


@pytest.mark.parametrize("partial", [False, True])
def test_gradients_are_marked_partial_where_ranks_see_other_tokens(partial: bool) -> None:
    norm = LayerNorm(8, partial=partial, device=CPU)
    for param in norm.parameters():
        (box,) = sharding_of(param).boxes
        assert box.replicated == ("tp",)
        assert box.partial == (("tp",) if partial else ())
    assert norm.bias.abs().sum() == 0
    assert norm.weight.sum() == 8
