from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tp_ranks_share_a_mask_exactly_where_they_hold_the_same_states(sequence_parallel: bool) -> None:
    def masks() -> tuple[Tensor, Tensor]:
        mesh = Mesh.create(Parallelism(tp=4, sequence_parallel=sequence_parallel), device=torch.device("cpu"))
        dropout = Dropout(0.5, mesh=mesh)
        return dropout(torch.ones(64)), dropout(torch.ones(64))

    results = run_distributed(masks, 4)
    for i in range(4):
        assert not torch.equal(results[i][0], results[i][1]), "each call draws a new mask"
        for j in range(i):
            assert torch.equal(results[i][0], results[j][0]) is not sequence_parallel


def test_dropout_scales_what_it_keeps_and_does_nothing_in_evaluation() -> None:
    torch.manual_seed(0)
    dropout, ones = Dropout(0.25, mesh=Mesh()), torch.ones(4000)
    dropped = dropout(ones)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert dropout.eval()(ones) is ones
