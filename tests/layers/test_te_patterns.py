"""Every pattern of attention on the backend of Transformer Engine, in plain torch, against the torch backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.models import GPT, GPTConfig

LLAMA = GPTConfig(
    num_layers=2,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=64,
    vocab_size=96,
    max_seq_len=32,
    init_std=0.1,
)
TOKENS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(3))
BORDERS = torch.tensor([[0, 5, 16, 16], [0, 9, 12, 16]])
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "norms of queries and keys": ({"qk_norm": True}, {}),
    "one key head": ({"num_kv_heads": 1}, {}),
    "wide heads": ({"head_dim": 16}, {}),
    "window": ({"sliding_window": 5}, {}),
    "not causal": ({"causal": False}, {}),
    "documents": ({}, {"cu_seqlens": BORDERS}),
    "documents and window": ({"sliding_window": 3}, {"cu_seqlens": BORDERS}),
}


def outcome(config: GPTConfig, named: dict[str, Tensor], fp8: Fp8Options | None = None) -> dict[str, Tensor]:
    model = GPT(config, seed=5, backend=TeBackend(PlainOperations(fp8), fp8))
    losses = model(TOKENS, labels=TOKENS.flip(1), **named)
    losses.mean().backward()
    return {"losses": losses.detach(), **{name: param.grad for name, param in model.named_parameters()}}  # type: ignore[dict-item]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_torch_backend(case: str) -> None:
    options, named = CASES[case]
    config = replace(LLAMA, **options)
    model = GPT(config, seed=5)
    losses = model(TOKENS, labels=TOKENS.flip(1), **named)
    losses.mean().backward()
    plain, wide, narrow = GPT(LLAMA, seed=5), outcome(config, named), outcome(config, named, Fp8Options(recipe="current"))
    if case not in ("norms of queries and keys", "one key head", "wide heads"):
        assert float((plain(TOKENS, labels=TOKENS.flip(1)) - losses).detach().abs().max()) > 0.1  # the pattern matters
    expected = {"losses": losses.detach(), **{name: param.grad for name, param in model.named_parameters()}}
    assert wide.keys() == narrow.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(wide[name], value, rtol=1e-4, atol=1e-6, msg=name)
    together = [torch.cat([found[name].flatten() for name in expected]) for found in (narrow, expected)]
    assert torch.linalg.vector_norm(together[0] - together[1]) < 0.15 * torch.linalg.vector_norm(together[1])
