"""Layers of Transformer Engine's backend whose products and communication run in pieces compute what they compute without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_megatron.comm import all_reduce
from lightning_megatron.initialize import materialize
from lightning_megatron.layers.backend import NormSpec
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed
from tests.layers.test_te_backend import train
from tests.tensor_parallel.test_pieces import Order

CPU = torch.device("cpu")
HIDDEN, BATCH = 48, 2
RECIPES = ("bf16", "fp32", "delayed", "current")


class Block(nn.Module):
    """Norm, column layer, activation in the row layer; biases on both."""

    def __init__(self, recipe: str, layout: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        fp8 = None if recipe in ("bf16", "fp32") else Fp8Options(recipe=recipe)  # type: ignore[arg-type]
        self.backend = TeBackend(PlainOperations(fp8), fp8)
        self.mesh = mesh = Mesh.create(Parallelism(**layout), device=CPU)
        shared: dict[str, Any] = {
            "mesh": mesh,
            "bias": True,
            "device": CPU,
            "dtype": torch.bfloat16 if recipe == "bf16" else torch.float32,
        }
        self.norm, self.up = self.backend.norm_column_linear(HIDDEN, 16 * 12, norm=NormSpec("rmsnorm", 1e-5), **shared)
        self.down = self.backend.row_linear(16 * 12, HIDDEN, **shared)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(self.norm(x)), "gelu")
        return result

    def outcome(self, x: Tensor) -> dict[str, Tensor]:
        """Output, gradients and what is remembered of magnitudes, on all ranks together."""
        self.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = self(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        assert x.grad is not None
        grads = {name: param.grad.clone() for name, param in self.named_parameters() if param.grad is not None}
        found = {"y": y.detach(), "x": x.grad, **grads}
        if (scales := self.backend.scales) is not None:
            scales.advance(partial(all_reduce, axis=self.mesh.world, op=ReduceOp.MAX))
            if scales.keeps_history:
                found["factors"] = torch.cat(scales.tensors[0])
        return found


def outcomes(tp: int, sequence_parallel: bool, recipe: str, pieces: int, length: int = 96) -> list[dict[str, Tensor]]:
    """Of two steps, the second with warm factors."""
    block = Block(recipe, {"tp": tp, "sequence_parallel": sequence_parallel, "tp_overlap": pieces})
    rows = length // tp if sequence_parallel else length
    generator = torch.Generator().manual_seed(block.mesh.tp.rank if sequence_parallel else 9)
    x = torch.randn(rows, BATCH, HIDDEN, generator=generator) * (1 + block.mesh.tp.rank * sequence_parallel)
    return [block.outcome(x.to(block.down.weight.dtype)) for _ in range(2)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 3])
def test_pieces_change_neither_outputs_nor_gradients(tp: int, sequence_parallel: bool, recipe: str) -> None:
    def run() -> list[list[dict[str, Tensor]]]:
        return [outcomes(tp, sequence_parallel, recipe, pieces) for pieces in (1, 2, 4)]

    tolerance = 2e-2 if recipe == "bf16" else 2e-6
    for expected, *found in run_distributed(run, tp):
        for one in found:
            for step, of_step in zip(one, expected, strict=True):
                assert step.keys() == of_step.keys()
                for name, value in of_step.items():
                    error = float((step[name] - value).norm() / value.norm())
                    assert error <= (0.0 if name == "factors" else tolerance), (name, error)


def launched(recipe: str, *, sequence_parallel: bool = True, length: int = 96, pieces: int = 2) -> dict[str, list[str]]:
    """The order of collectives and products, with warm factors."""
    block = Block(recipe, {"tp": 2, "sequence_parallel": sequence_parallel, "tp_overlap": pieces})
    x = torch.ones(length // 2 if sequence_parallel else length, BATCH, HIDDEN)
    block.outcome(x)
    found = {}
    with Order() as order:
        hidden = block.up(x)
    found["column"] = order.launched
    with Order() as order:
        y = block.down(hidden)
    found["row"] = order.launched
    with Order() as order:
        torch.autograd.grad(y, (hidden, block.down.weight), torch.ones_like(y))
    found["row backward"] = order.launched
    return found


def test_each_piece_is_on_its_way_before_the_product_beside_it() -> None:
    (wide, _), (delayed, _), (current, _) = (run_distributed(launched, 2, recipe) for recipe in ("fp32", "delayed", "current"))
    assert wide == delayed
    assert wide["column"] == ["gather", "gemm", "gemm"]
    assert wide["row"] == ["gemm", "gemm", "scatter", "gemm", "gemm", "scatter"]
    assert wide["row backward"] == ["gather", "gemm", "gemm", "gemm"]
    assert current["column"] == ["reduce", "gather", "gemm", "gemm"]  # one number: the largest magnitude
    assert current["row backward"] == ["reduce", "gather", "gemm", "gemm", "gemm"]
    whole = run_distributed(partial(launched, sequence_parallel=False), 2, "delayed")[0]
    assert whole["column"] == ["gemm"]
    assert whole["row"] == ["gemm", "reduce", "gemm", "reduce"]


def test_parts_that_8_bits_cannot_multiply_are_gathered_first() -> None:
    found = run_distributed(partial(launched, length=24), 2, "delayed")[0]  # 24 tokens a rank, of which 16 and 8
    assert found == {"column": ["gather", "gemm"], "row": ["gemm", "scatter"], "row backward": ["gather", "gemm", "gemm"]}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_bytes_and_factor_are_those_of_a_matrix_that_is_gathered_first(recipe: Any) -> None:
    def run(pieces: int) -> list[tuple[str, Tensor]]:
        block = Block(recipe, {"tp": 2, "tp_overlap": pieces})
        x = torch.randn(48, BATCH, HIDDEN, generator=torch.Generator().manual_seed(block.mesh.tp.rank)) * 3.0
        block.outcome(x)
        up: Any = block.up
        y = up(x)
        kept = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]
        return [(str(tensor.dtype), tensor.float()) for tensor in kept]

    for one, other in zip(run_distributed(run, 2, 1), run_distributed(run, 2, 3), strict=True):
        assert "torch.float8_e4m3fn" in [dtype for dtype, _ in one]
        for (dtype, tensor), (other_dtype, expected) in zip(one, other, strict=True):
            assert dtype == other_dtype
            assert torch.equal(tensor, expected)


LLAMA = GPTConfig(
    num_layers=3,
    hidden_size=64,
    num_heads=8,
    ffn_hidden_size=64,
    vocab_size=96,
    num_kv_heads=4,
    max_seq_len=32,
    init_std=0.1,
)


def model_outcome(pieces: int, fp8: Fp8Options, recomputed: str | None, *, sequence_parallel: bool) -> dict[str, Tensor]:
    """Loss and gradients of the second step."""
    mesh = Mesh.create(Parallelism(tp=2, sequence_parallel=sequence_parallel, tp_overlap=pieces), device=CPU)
    backend = TeBackend(PlainOperations(fp8), fp8)
    with use_mesh(mesh):
        model = GPT(LLAMA, backend=backend)
    materialize(model, device=CPU, seed=5)
    recompute(model, Recompute.of(recomputed))
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model.zero_grad()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]).mean()
        loss.backward()
        assert backend.scales is not None
        backend.scales.advance(partial(all_reduce, axis=mesh.world, op=ReduceOp.MAX))
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach(), **grads}


CASES: dict[str, tuple[Fp8Options, str | None]] = {
    "handed over everywhere": (Fp8Options(head=True, attention=True), None),
    "current, recomputed": (Fp8Options(recipe="current"), "full"),
    "layers in bf16, recomputed in part": (Fp8Options(first_layers_bf16=1, last_layers_bf16=1), "mlp"),
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_models_in_8_bits_are_the_same_in_pieces(case: str, sequence_parallel: bool) -> None:
    def run() -> list[dict[str, Tensor]]:
        return [model_outcome(pieces, *CASES[case], sequence_parallel=sequence_parallel) for pieces in (1, 2, 3)]

    for expected, *found in run_distributed(run, 2):
        for one in found:
            assert one.keys() == expected.keys()
            for name, value in expected.items():
                assert float((one[name] - value).norm() / value.norm()) < 1e-5, name


def test_training_in_pieces_is_the_same_in_fp8() -> None:
    layout = {"tp": 2, "micro_batch_size": 2}
    runs = [run_distributed(train, 2, {**layout, "tp_overlap": pieces}, "delayed")[0] for pieces in (1, 2)]
    (losses, state, factors), (of_losses, of_state, of_factors) = runs
    assert of_losses == pytest.approx(losses, rel=1e-3)
    assert of_factors == factors
    for name, value in state.items():
        assert float((of_state[name] - value).norm() / value.norm()) < 1e-2, name
