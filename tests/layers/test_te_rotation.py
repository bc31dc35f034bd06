"""Gradients of queries, keys and values on their way back through the rotation, in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.layers.te_backend.modules import FusedColumnLinear
from lightning_megatron.models import GPT
from tests.layers.test_te_backend import LLAMA, gradients, step, tokens


class Turning(PlainOperations):
    num_turned = 0

    def turned_back_quantized(self, *args: Any) -> Any:
        self.num_turned += 1
        return super().turned_back_quantized(*args)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_gradient_rotated_back_is_handed_over_in_8_bits_as_the_projection_would_round_it(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for hands_over in (True, False):
        if not hands_over:
            monkeypatch.setattr(FusedColumnLinear, "rotated", None)
        fp8 = Fp8Options(recipe=recipe)
        operations = Turning(fp8)
        backend = TeBackend(operations, fp8)
        model = GPT(LLAMA, seed=5, backend=backend)
        step(model, backend, tokens())
        step(model, backend, tokens())
        found.append(gradients(model, tokens(length=25)))
        assert operations.num_turned == (3 * 2 if hands_over else 0)
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
    assert all(bool(value.isfinite().all()) for value in found[0].values())
