"""Models whose products do SwiGLU beside themselves compute the same, and leave it apart where somebody looks in between."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.offload import offload
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.models import GPT
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.weight_gradients import open_sum
from tests.layers.test_graphs import WARM_UP, assert_same, backward, opened
from tests.layers.test_offload import moving
from tests.layers.test_recompute import LLAMA, assert_same_bits, kept_in_a_layer, outcome, tokens
from tests.layers.test_residual import Adding, assert_close
from tests.parity.harness import LLAMA_GQA
from tests.tensor_parallel.gating import Gating

LAYERS = LLAMA.num_layers
ONCE = ["forward"] * LAYERS + ["gradient"] * LAYERS


class GatingAndAdding(Gating, Adding):
    """Both, as tuned products on Hopper."""

    def __init__(self) -> None:
        Gating.__init__(self)
        Adding.__init__(self)


def of(model: nn.Module) -> dict[str, Tensor]:
    return outcome(model, tokens(), labels=tokens())


# The same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("way", "forwards"),
    [(None, 1), (["norm"], 1), (["attention_core"], 1), (["mlp"], 2), (["layer"], 2), (["layers.*.mlp"], 2)],
    ids=str,
)
@pytest.mark.parametrize("moves", [False, True], ids=["", "offload"])
def test_loss_and_gradients_are_the_same_bit_by_bit(
    moves: bool, way: Any, forwards: int, dtype: torch.dtype, gating: Callable[[], Gating]
) -> None:
    model = GPT(LLAMA, seed=0, dtype=dtype)
    expected = of(model)
    log = moving(model, way).log if moves else recompute(model, Recompute.of(way))
    products = gating()
    assert_same_bits(of(model), expected, way)
    assert (products.calls.count("forward"), products.calls.count("gradient")) == (forwards * LAYERS, LAYERS)
    assert not moves or log


def test_what_is_offloaded_and_kept_is_the_same(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0, dtype=torch.bfloat16)

    def num_moved() -> int:
        transfer = moving(model)
        of(model)
        offload(model, None)
        return len(transfer.of("out"))

    before = num_moved()
    products = gating()
    assert num_moved() == before
    assert products.calls == ONCE


@pytest.mark.parametrize("way", [None, "selective", "full", ["mlp"], ["norm"]], ids=str)
def test_no_more_is_kept(way: Any, gating: Callable[[], Gating]) -> None:
    before = kept_in_a_layer(LLAMA, way)
    gating()
    assert kept_in_a_layer(LLAMA, way) == before


def test_the_residual_is_added_in_the_second_product_too(gating: Callable[..., Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    expected = of(model)
    products = gating(GatingAndAdding())
    assert_close(of(model), expected)
    assert products.calls == ONCE
    assert products.num_added == 2 * LAYERS


@pytest.mark.parametrize("adds", [False, True])
def test_under_autocast_it_is_the_same_bit_by_bit(adds: bool, gating: Callable[..., Gating]) -> None:
    def mixed() -> dict[str, Tensor]:
        model = GPT(LLAMA, seed=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return of(model)

    expected = mixed()
    products = gating(GatingAndAdding() if adds else None)
    assert_same_bits(mixed(), expected)
    assert products.calls == ONCE  # layers cast once, and compute outside of autocast


def test_without_gradients_it_is_the_same(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0).eval()
    expected = model(tokens()).detach()
    products = gating()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(model(tokens()).clone(), expected)
    assert products.calls == ["forward"] * 2 * LAYERS


def test_gradients_go_into_sums_and_wait_in_a_split_backward(gating: Callable[[], Gating]) -> None:
    model = GPT(LLAMA, seed=0)
    expected = of(model)
    products = gating()
    model.zero_grad()
    for param in model.parameters():
        open_sum(param, torch.full_like(param, float("nan")))
    output = model(tokens(), labels=tokens())
    split = SplitBackward([(torch.autograd.graph.get_gradient_edge(output.square().mean()), torch.ones(()))], [])
    split.run_input_part()
    assert products.calls == ONCE
    assert split.num_late >= 4 * LAYERS
    assert all(layer.mlp.gate_up.weight.grad is layer.mlp.down.weight.grad is None for layer in model.layers)
    split.run_weight_part()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert_close({"output": output.detach(), **grads}, expected)


def test_layers_that_are_replayed_are_the_same(gating: Callable[[], Gating]) -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(2 * WARM_UP):
        products = gating()
        loss = backward(graphed, step)
        assert "forward" in products.calls
        assert "gradient" in products.calls
        set_products(TorchProducts())
        assert loss == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == WARM_UP


def test_copies_compute_with_their_own_parameters(gating: Callable[[], Gating]) -> None:
    mlp = GPT(LLAMA, seed=0).layers[0].mlp
    hidden = torch.randn(8, 2, LLAMA.hidden_size)
    products = gating()
    for again in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        with torch.no_grad():
            again.down.weight.mul_(2)
            again.gate_up.weight.mul_(1)
        products.calls.clear()
        torch.testing.assert_close(again(hidden), 2 * mlp(hidden))
        assert products.calls == ["forward"] * 2
