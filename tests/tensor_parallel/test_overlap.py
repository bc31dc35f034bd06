"""The order in which the column linear launches collectives and GEMMs, and that layers can be copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel import ColumnParallelLinear
from lightning_megatron.testing import run_distributed

NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce", "mm": "gemm"}


class Recorder(TorchDispatchMode):
    """Lists collectives and GEMMs in the order in which they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in NAMES:
            self.launched.append(NAMES[name])
        return func(*args, **(kwargs or {}))


def launched_in_backward(sequence_parallel: bool, prepare: Callable[[ColumnParallelLinear, Tensor], Any]) -> list[str]:
    def rank_main() -> list[str]:
        mesh = Mesh.create(Parallelism(tp=2, sequence_parallel=sequence_parallel), device=torch.device("cpu"))
        layer = ColumnParallelLinear(4, 8, mesh=mesh, device="cpu")
        x = torch.ones(2, 3, 4, requires_grad=True)
        prepare(layer, x)
        y = layer(x)
        with Recorder() as recorder:
            y.backward(torch.ones_like(y))
        return recorder.launched

    return run_distributed(rank_main, 2)[0]


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"), [(True, ["gather", "gemm", "scatter", "gemm"]), (False, ["gemm", "reduce", "gemm"])]
)
def test_each_collective_is_launched_before_the_gemm_that_it_overlaps(sequence_parallel: bool, expected: list[str]) -> None:
    assert launched_in_backward(sequence_parallel, lambda layer, x: None) == expected


def test_what_needs_no_gradient_costs_no_collective_and_no_gemm() -> None:
    def freeze_weight(layer: ColumnParallelLinear, x: Tensor) -> None:
        layer.weight.requires_grad_(False)

    def freeze_input(layer: ColumnParallelLinear, x: Tensor) -> None:
        x.requires_grad_(False)

    assert launched_in_backward(True, freeze_weight) == ["gemm", "scatter"]
    assert launched_in_backward(False, freeze_weight) == ["gemm", "reduce"]
    assert launched_in_backward(True, freeze_input) == ["gather", "gemm"]
    assert launched_in_backward(False, freeze_input) == ["gemm"]


def test_a_layer_can_be_deep_copied_in_a_running_job() -> None:
    def rank_main() -> bool:
        mesh = Mesh.create(Parallelism(tp=2), device=torch.device("cpu"))
        layer = ColumnParallelLinear(4, 8, mesh=mesh, device="cpu")
        x = torch.ones(2, 3, 4)
        return torch.equal(copy.deepcopy(layer)(x), layer(x))

    assert run_distributed(rank_main, 2) == [True, True]
