"""A block's last product adds the residual where that can be had, and what comes out is the same; elsewhere nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.initialize import materialize
from lightning_megatron.kernels.products import TorchProducts, set_products
from lightning_megatron.layers.mlp import GatedMLP
from lightning_megatron.layers.recompute import Recompute, recompute
from lightning_megatron.layers.residual import into_residual
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.mesh import Mesh, use_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import open_sum
from tests.layers.test_graphs import WARM_UP, assert_same, backward, opened
from tests.layers.test_offload import moving
from tests.layers.test_recompute import GPT2, LLAMA, assert_same_bits, kept_in_a_layer, outcome, plain, tokens
from tests.parity.harness import LLAMA_GQA
from tests.test_products import Library, tuned

BLOCKS = 2 * LLAMA.num_layers


class Adding(TorchProducts):
    """Adds in the product, as cuBLASLt does."""

    def __init__(self) -> None:
        self.num_taken = self.num_added = 0

    def adds_to(self, added: Tensor, weight: Tensor) -> bool:
        takes = added.is_contiguous() and added.dtype == weight.dtype
        self.num_taken += takes
        return takes

    def forward_added(self, x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
        self.num_added += 1
        flat = torch.addmm(added.view(-1, added.shape[-1]), x.reshape(-1, x.shape[-1]), weight.t())
        return flat.view(added.shape)


@pytest.fixture
def adding() -> Iterator[Callable[[], Adding]]:
    """Adds from when it is called."""

    def start() -> Adding:
        made = Adding()
        set_products(made)
        return made

    yield start
    set_products(TorchProducts())


def of(model: nn.Module) -> dict[str, Tensor]:
    return outcome(model, tokens(), labels=tokens())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda says, name=name: f"{name}: {says}")


def te_model(config: GPTConfig, recipe: Any = None, **options: Any) -> tuple[GPT, TeBackend]:
    fp8 = None if recipe is None else Fp8Options(recipe=recipe, **options)
    backend = TeBackend(PlainOperations(fp8), fp8)
    return GPT(config, seed=0, backend=backend), backend


# The same


@pytest.mark.parametrize("backend", [None, plain], ids=["torch", "te"])
@pytest.mark.parametrize(
    ("way", "forwards"),
    [(None, 2), ("full", 4), ("selective", 2), (["norm"], 2), (["layers.*.attn"], 1), (["mlp"], 1)],
    ids=str,
)
def test_outputs_and_gradients_are_the_same(way: Any, forwards: int, backend: Any, adding: Callable[[], Adding]) -> None:
    config = replace(LLAMA, num_layers=2)
    model = GPT(config, seed=0, backend=backend and backend())
    expected = of(model)
    recompute(model, Recompute.of(way))
    products = adding()
    assert_close(of(model), expected)
    assert products.num_taken == forwards * 2  # two layers; a checkpointed block adds nothing itself
    assert products.num_added == (products.num_taken if backend is None else 0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(), labels=tokens()), expected["output"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("way", [None, "full", "selective"], ids=str)
def test_steps_in_8_bits_are_the_same_bit_by_bit(way: Any, attention: bool, recipe: Any, adding: Callable[[], Adding]) -> None:
    def steps() -> list[dict[str, Tensor]]:
        model, backend = te_model(LLAMA, recipe, attention=attention)
        recompute(model, Recompute.of(way))
        found = []
        for _ in range(3):
            found.append(of(model))
            assert backend.scales is not None
            backend.scales.advance(lambda numbers: numbers)
        return found

    before = steps()
    adding()
    for actual, expected in zip(steps(), before, strict=True):  # the plain form adds in fp32, which is the model's dtype
        assert_same_bits(actual, expected)


def test_gradients_go_into_sums_and_wait_in_a_split_backward(adding: Callable[[], Adding]) -> None:
    model = GPT(LLAMA, seed=0)
    expected = of(model)
    adding()
    model.zero_grad()
    for param in model.parameters():
        open_sum(param, torch.full_like(param, float("nan")))
    output = model(tokens(), labels=tokens())
    split = SplitBackward([(torch.autograd.graph.get_gradient_edge(output.square().mean()), torch.ones(()))], [])
    split.run_input_part()
    assert split.num_late >= 2 * BLOCKS
    assert model.layers[0].mlp.down.weight.grad is None
    split.run_weight_part()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert_close({"output": output.detach(), **grads}, expected)


def test_graphs_and_offload_are_the_same(adding: Callable[[], Adding]) -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    products = adding()
    for step in range(2 * WARM_UP):
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == WARM_UP
    assert products.num_taken
    model = GPT(LLAMA, seed=0, dtype=torch.bfloat16)
    expected = of(model)
    assert moving(model).log is not None
    assert_same_bits(of(model), expected)


# Nothing more is kept or computed


class Additions(TorchDispatchMode):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.num = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        adds = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        self.num += int(adds and isinstance(out, Tensor) and out.numel() == self.size)
        return out


def additions(model: nn.Module, hidden: int) -> tuple[int, int]:
    """Elementwise additions of hidden states, forward and backward."""
    model.zero_grad()  # whose sums may be as large
    with Additions(tokens().numel() * hidden) as forward:
        loss = model(tokens(), labels=tokens()).mean()
    with Additions(tokens().numel() * hidden) as backward:
        loss.backward()
    return forward.num, backward.num


@pytest.mark.parametrize("backend", [None, plain], ids=["torch", "te"])
def test_the_addition_of_each_block_is_gone_and_the_backward_has_none_more(backend: Any, adding: Callable[[], Adding]) -> None:
    model = GPT(LLAMA, seed=0, backend=backend and backend())
    before = additions(model, LLAMA.hidden_size)
    adding()
    after = additions(model, LLAMA.hidden_size)
    assert (before[0] - after[0], before[1] - after[1]) == (BLOCKS if backend is None else 0, 0)


@pytest.mark.parametrize("way", [None, "selective", "full", ["mlp"]], ids=str)
def test_no_more_is_kept(way: Any, adding: Callable[[], Adding]) -> None:
    for backend in (None, plain, partial(plain, "current")):
        set_products(TorchProducts())
        before = kept_in_a_layer(LLAMA, way, backend)
        adding()
        assert kept_in_a_layer(LLAMA, way, backend) == before


# Where it cannot be had


@pytest.mark.parametrize("backend", [None, plain], ids=["torch", "te"])
@pytest.mark.parametrize("config", [GPT2, replace(LLAMA, hidden_dropout=0.3)], ids=["biases", "dropout"])
def test_biases_and_dropout_keep_the_addition_apart(config: GPTConfig, backend: Any, adding: Callable[[], Adding]) -> None:
    model = GPT(config, seed=0, backend=backend and backend())
    expected = of(model)
    products = adding()
    assert_same_bits(of(model), expected)
    assert products.num_taken == 0


def test_dropout_does_not_matter_in_evaluation(adding: Callable[[], Adding]) -> None:
    model = GPT(replace(LLAMA, hidden_dropout=0.3), seed=0).eval()
    expected = of(model)
    products = adding()
    assert_close(of(model), expected)
    assert products.num_taken == BLOCKS


class Adapted(nn.Module):
    """As adapters wrap a linear: it takes an input and nothing else."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.low = linear, nn.Linear(linear.in_features, linear.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.low(x)


class Halved(GatedMLP):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) / 2


def wrap(layer: Any) -> None:
    layer.attn.out = Adapted(layer.attn.out)


def subclass(layer: Any) -> None:
    layer.mlp.__class__ = Halved


def replace_forward(layer: Any) -> None:
    inner = layer.mlp.forward
    layer.mlp.forward = lambda hidden: inner(hidden) * 2


def hook_linear(layer: Any) -> None:
    layer.attn.out.register_forward_hook(lambda module, args, out: out * 2)


def hook_block(layer: Any) -> None:
    layer.attn.register_forward_hook(lambda module, args, out: out * 2)


def hook_dropout(layer: Any) -> None:
    layer.mlp_dropout.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


CHANGES = [wrap, subclass, replace_forward, hook_linear, hook_block, hook_dropout]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whoever_looks_at_a_blocks_result_sees_it_alone(change: Callable[[Any], None], adding: Callable[[], Adding]) -> None:
    torch.manual_seed(0)
    model = GPT(LLAMA, seed=0)
    change(model.layers[1])
    expected = of(model)
    products = adding()
    assert_close(of(model), expected)
    assert products.num_taken == BLOCKS - 1


def test_what_is_not_contiguous_or_of_another_dtype_is_added_apart(adding: Callable[[], Adding]) -> None:
    layer = GPT(LLAMA, seed=0).layers[0]
    normed = torch.randn(8, 2, LLAMA.hidden_size)
    adding()
    for residual in (torch.randn(2, 8, LLAMA.hidden_size).transpose(0, 1), torch.randn(normed.shape).double()):
        summed, added = into_residual(layer.mlp, residual, normed, dropout=layer.mlp_dropout)
        assert summed is residual
        torch.testing.assert_close(added, layer.mlp(normed))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_under_tensor_parallelism_the_addition_stays_apart(sequence_parallel: bool) -> None:
    run_distributed(_two_ranks, 2, sequence_parallel)


def _two_ranks(sequence_parallel: bool) -> None:
    layout = Parallelism(tp=2, sequence_parallel=sequence_parallel)
    mesh = Mesh.create(layout, device=torch.device("cpu"))
    with use_mesh(mesh):
        models = [GPT(LLAMA, backend=backend) for backend in (None, plain())]
    for model in models:
        materialize(model, device=mesh.device, seed=5)
        set_products(TorchProducts())
        expected = of(model)
        products = Adding()
        set_products(products)
        assert_same_bits(of(model), expected)
        assert products.num_taken == 0
        down: Any = model.layers[0].mlp.down  # given one all the same, it adds it once
        x = torch.randn(8, 2, down.weight.shape[1])
        y = down(x)
        torch.testing.assert_close(down(x, residual=torch.ones_like(y)), y + 1)


def test_a_sequence_that_must_be_padded_for_8_bits_is_right_too(adding: Callable[[], Adding]) -> None:
    (model, _), products = te_model(LLAMA, "current"), adding()
    layer = model.layers[0]
    normed = residual = torch.randn(3, 1, LLAMA.hidden_size)
    summed, added = into_residual(layer.mlp, residual, normed, dropout=layer.mlp_dropout)
    assert added is not None
    torch.testing.assert_close(layer.mlp(normed, residual=residual), summed + added)
    assert products.num_taken == 0


def test_a_tuned_product_is_given_what_is_added_and_times_by_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, bool, bool]] = []

    class Noted(Library):
        def Product(self, *args: Any, **kwargs: Any) -> Any:
            made = super().Product(*args, **kwargs)

            def run(*args: Any, algorithm: int, accumulate: bool, added: Tensor | None, **kwargs: Any) -> None:
                given.append((algorithm, accumulate, added is beside))
                made.run(*args, algorithm=algorithm, accumulate=accumulate, **kwargs)

            return SimpleNamespace(num_algorithms=made.num_algorithms, run=run)

    products = tuned(Noted(), None, monkeypatch)
    a, b, out, beside = torch.empty(32, 16), torch.empty(48, 16), torch.empty(32, 48), torch.empty(32, 48)
    products.multiply(a, b, out, transpose_b=True, added=beside)
    assert given[-1] == (2, False, True)
    num_runs = len(given)
    assert num_runs > 1  # it has been timed
    products.multiply(a, b, out, transpose_b=True)
    products.multiply(a, b, out, transpose_b=True, added=beside)
    assert given[num_runs:] == [(2, False, False), (2, False, True)]
