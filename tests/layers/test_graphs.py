"""Layers that are replayed do what they do without graphs, bit by bit; here a replay runs the recorded function again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import MegatronStrategy
from lightning_megatron.layers.graphs import WARM_UP, LayerGraphs, graph_layers, graphs_of, release_graphs
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend, scales_of
from lightning_megatron.mesh import Mesh, current_mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.strategy import prepare
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import arrivals_of, open_sum
from tests.parity.harness import GPT2_TIED, LLAMA_GQA, SEQUENCE, Outcome, strategy_run


class Again:
    """Stands for CUDA graphs: what it records leaves no trace, and a replay calls it again, into the same tensors."""

    def __init__(self, parameters: Callable[[], list[nn.Parameter]]) -> None:
        self._parameters = parameters

    @contextmanager
    def recording(self) -> Iterator[None]:
        sums = [param._lightning_megatron_sum.total for param in self._parameters()]
        before, rng = [total.clone() for total in sums], torch.get_rng_state()
        yield
        torch.set_rng_state(rng)
        with torch.no_grad():
            for total, value in zip(sums, before, strict=True):
                total.copy_(value)

    def record(self, body: Callable[[], Tensor | None]) -> tuple[Tensor | None, Callable[[], None]]:
        result = body()

        def replay() -> None:
            with arrivals_of(self._parameters()), torch.enable_grad():
                again = body()
            if result is not None and again is not None:
                result.data.copy_(again.detach())

        return result, replay


def opened(config: GPTConfig, *, graphs: bool, fp8: Fp8Options | None = None) -> tuple[GPT, list[LayerGraphs]]:
    """A model whose gradients have sums, as an optimizer of ours keeps them."""
    dtype = torch.float32 if fp8 is None else torch.bfloat16
    model = GPT(config, seed=0, dtype=dtype, backend=None if fp8 is None else TeBackend(PlainOperations(fp8), fp8))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        open_sum(param, param.grad)
    if not graphs:
        return model, []
    return model, graph_layers(nn.ModuleDict({"model": model}), current_mesh(), recorder=Again(lambda: layer_params(model)))


def layer_params(model: GPT) -> list[nn.Parameter]:
    return [param for param in model.layers.parameters() if param.requires_grad]


def backward(model: GPT, seed: int, length: int = SEQUENCE) -> float:
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    loss = model(tokens, labels=tokens).mean()
    loss.backward()
    return float(loss.detach())


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def assert_same(one: GPT, other: GPT) -> None:
    expected, found = gradients(other), gradients(one)
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


CONFIGS = {"llama": LLAMA_GQA, "gpt2": replace(GPT2_TIED, tied_embeddings=False)}


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_layers_give_the_same_losses_and_gradients(name: str) -> None:
    config = CONFIGS[name]
    (eager, _), (graphed, (graphs,)) = opened(config, graphs=False), opened(config, graphs=True)
    for step in range(2 * WARM_UP):
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == WARM_UP


def test_sums_that_count_as_zero_are_written_over_and_others_added_to() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP):
        assert backward(graphed, step) == backward(eager, step)
    for step in range(3):
        for model in (eager, graphed):
            for param in model.layers.parameters():
                param.grad.fill_(torch.nan)
                param.grad = None
        for part in range(2):
            assert backward(graphed, 10 * step + part) == backward(eager, 10 * step + part)
        assert_same(graphed, eager)
    assert graphs.num_replayed == 6


@pytest.mark.parametrize("options", [{}, {"recipe": "current"}, {"attention": True}], ids=str)
def test_factors_and_weights_in_8_bits_follow_the_steps(options: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 64, "num_layers": 2}
    config, fp8 = replace(LLAMA_GQA, **sizes), Fp8Options(**options)
    (eager, _), (graphed, (graphs,)) = opened(config, graphs=False, fp8=fp8), opened(config, graphs=True, fp8=fp8)
    for step in range(5):
        for part in range(2):
            assert backward(graphed, 2 * step + part) == backward(eager, 2 * step + part)
        assert_same(graphed, eager)
        for model in (eager, graphed):
            (scales,) = scales_of(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.1)
            scales.advance(lambda numbers: numbers)
    assert graphs.num_replayed == 10 - WARM_UP - (2 if fp8.recipe == "delayed" or fp8.attention else 0)


def test_a_gradient_from_elsewhere_stays_in_its_sum() -> None:
    (eager, _), (graphed, _) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 2):
        for model in (eager, graphed):
            for param in model.layers.parameters():
                param._lightning_megatron_sum.total.fill_(3.0)
                param.grad = None
            weight = model.layers[1].mlp.down.weight
            weight.grad = weight._lightning_megatron_sum.total
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)


def test_a_gradient_that_autograd_put_beside_its_sum_is_brought_back() -> None:
    config = CONFIGS["gpt2"]
    (eager, _), (graphed, (graphs,)) = opened(config, graphs=False), opened(config, graphs=True)
    for step in range(WARM_UP + 3):
        for param in (param for model in (eager, graphed) for param in model.layers.parameters() if param.dim() == 1):
            param.grad = param.grad.clone()
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == 3


def test_other_shapes_and_evaluation_run_without_graphs() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        assert backward(graphed, step) == backward(eager, step)
    assert backward(graphed, 50, length=7) == backward(eager, 50, length=7)
    tokens = torch.arange(SEQUENCE)[None]
    with torch.no_grad():
        assert torch.equal(graphed(tokens), eager(tokens))
    assert graphs.num_replayed == 1
    assert backward(graphed, 51) == backward(eager, 51)
    assert graphs.num_replayed == 2
    assert_same(graphed, eager)


def test_packed_rows_run_without_graphs() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        assert backward(graphed, step) == backward(eager, step)
    tokens = torch.arange(SEQUENCE)[None]
    packed = {"labels": tokens, "cu_seqlens": torch.tensor([[0, SEQUENCE // 2, SEQUENCE]])}
    expected = eager(tokens, **packed)
    with pytest.warns(UserWarning, match="rows hold several documents"):
        losses = graphed(tokens, **packed)
    assert torch.equal(losses, expected)
    assert graphs.num_replayed == 1


def test_a_second_forward_before_the_backward_runs_without_graphs() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        assert backward(graphed, step) == backward(eager, step)
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    for model in (eager, graphed):
        first = model(tokens, labels=tokens).sum()
        (first + model(tokens.flip(0), labels=tokens).square().sum()).backward()
    assert_same(graphed, eager)
    assert graphs.num_replayed == 2
    loss = graphed(tokens, labels=tokens).sum()
    del loss  # a forward that never had a backward gives the graphs back
    assert backward(graphed, 60) == backward(eager, 60)
    assert graphs.num_replayed == 4


def test_moved_gradients_are_captured_anew() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        assert backward(graphed, step) == backward(eager, step)
    for model in (eager, graphed):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            open_sum(param, param.grad)
    for step in range(WARM_UP + 2):
        assert backward(graphed, step) == backward(eager, step)
    assert_same(graphed, eager)
    assert graphs.num_replayed == 1 + 2


def test_frozen_parameters_and_a_frozen_embedding_are_replayed() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for model in (eager, graphed):
        frozen = [model.embedding, model.layers[0], model.layers[2].attn]
        for param in (param for module in frozen for param in module.parameters()):
            param.requires_grad_(False)
    for step in range(2 * WARM_UP):
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == WARM_UP


def test_hooks_on_gradients_run_after_each_replay() -> None:
    model, (graphs,) = opened(LLAMA_GQA, graphs=True)
    arrived: list[Tensor] = []
    for param in model.layers.parameters():
        param.register_post_accumulate_grad_hook(arrived.append)
    for step in range(WARM_UP + 2):
        arrived.clear()
        backward(model, step)
        assert {id(param) for param in arrived} == {id(param) for param in model.layers.parameters()}
        assert len(arrived) == len(layer_params(model))
    assert graphs.num_replayed == 2


def test_a_replay_does_not_ask_for_parameters_that_are_on_their_way() -> None:
    model, (graphs,) = opened(LLAMA_GQA, graphs=True)
    asked: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(arg is param for arg in args for param in layer_params(model)):
                asked.append(func.__name__)
            return func(*args, **(kwargs or {}))

    for step in range(WARM_UP + 1):
        backward(model, step)
    hidden, context = torch.zeros(SEQUENCE, 2, 32, requires_grad=True), model.context(torch.zeros(2, SEQUENCE, dtype=int))
    with Watch():
        graphs._begin((hidden, *context), {})
    assert graphs.num_replayed == 2
    assert set(asked) <= {"__get__"}  # of gradients


def test_what_cannot_be_replayed_says_so() -> None:
    model, (graphs,) = opened(LLAMA_GQA, graphs=True)
    model.layers[1].mlp.register_forward_hook(lambda *_: None)
    for step in range(WARM_UP):
        backward(model, step)
    with pytest.warns(UserWarning, match=r"without graphs: mlp has hooks of its own"):
        backward(model, WARM_UP)
    backward(model, WARM_UP + 1)
    assert graphs.num_replayed == 0


def test_gradients_of_single_tensors_and_second_backwards_are_refused() -> None:
    model, _ = opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        backward(model, step)
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad reached layers"):
        torch.autograd.grad(model(tokens, labels=tokens).sum(), model.embedding.weight)
    loss = model(tokens, labels=tokens).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward"):
        loss.backward()


def test_a_copy_of_the_model_runs_without_graphs() -> None:
    model, (graphs,) = opened(LLAMA_GQA, graphs=True)
    for step in range(WARM_UP + 1):
        backward(model, step)
    copy = deepcopy(model)
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    assert torch.equal(copy(tokens), model(tokens))
    assert [one.num_replayed for one in graphs_of(copy)] == [0]
    assert graphs_of(model) == [graphs]


def test_a_hook_that_comes_after_the_capture_is_run() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    seen: list[nn.Module] = []
    for step in range(WARM_UP + 3):
        if step == WARM_UP + 1:
            handle = graphed.layers[0].mlp.down.register_forward_hook(lambda module, args, result: seen.append(module))
        if step == WARM_UP + 2:
            handle.remove()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert backward(graphed, step) == backward(eager, step)
        assert bool(said) == (step == WARM_UP + 1)
        assert_same(graphed, eager)
    assert len(seen) == 1
    assert graphs.num_replayed == 2


def test_graphs_that_are_let_go_are_gone_and_made_again() -> None:
    (eager, _), (graphed, (graphs,)) = opened(LLAMA_GQA, graphs=False), opened(LLAMA_GQA, graphs=True)
    for step in range(2 * WARM_UP + 2):
        if step == WARM_UP + 1:
            assert graphs.num_replayed == 1
            captured = ref(graphs._captured)
            release_graphs(graphed)
            assert captured() is None  # at once, not when garbage is next collected
        assert backward(graphed, step) == backward(eager, step)
        assert_same(graphed, eager)
    assert graphs.num_replayed == 2


@pytest.mark.parametrize(
    ("world_size", "layout", "accumulate", "dropout"),
    [(1, {"micro_batch_size": 2}, 3, 0.2), (2, {"micro_batch_size": 3}, 1, 0.2), (2, {"tp": 2, "micro_batch_size": 3}, 1, 0.0)],
    ids=["accumulation 3", "dp2", "tp2"],
)
def test_training_is_the_same_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, world_size: int, layout: dict[str, Any], accumulate: int, dropout: float
) -> None:
    config = replace(LLAMA_GQA, hidden_dropout=dropout, attention_dropout=dropout)

    def graphed(module: nn.Module, mesh: Mesh) -> list[LayerGraphs]:
        return graph_layers(module, mesh, recorder=Again(lambda: layer_params(module.model)))

    def run() -> list[tuple[Outcome, int]]:
        found: list[LayerGraphs] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "graph_layers", lambda *args: found.extend(graphed(*args)))
            options: dict[str, Any] = {"optimizer": "adamw", "precision": "bf16-mixed", "steps": 4, "accumulate": accumulate}
            runs = [strategy_run(config, layout | {"cuda_graphs": graphs}, **options) for graphs in (False, True)]
        assert [graphs._captured for graphs in found] == [None]  # a finished fit holds no graphs
        return [(one, sum(graphs.num_replayed for graphs in found)) for one in runs]

    for (expected, _), (outcome, num_replayed) in run_distributed(run, world_size):
        assert num_replayed > 0
        assert outcome.losses == expected.losses
        assert outcome.norms == expected.norms
        assert all(torch.equal(outcome.final[name], value) for name, value in expected.final.items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pp": 2}, "pp=2"),
        ({"cp": 2}, "cp=2"),
        ({"recompute": "full"}, "recompute='full'"),
        ({"offload_activations": True}, "offload_activations=True"),
    ],
    ids=str,
)
def test_options_that_graphs_do_not_go_with_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"cuda_graphs=True does not go with {says}"):
        MegatronStrategy(**options, cuda_graphs=True)


def test_models_and_devices_that_graphs_do_not_go_with_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, but the model runs on cpu"):
        graph_layers(GPT(LLAMA_GQA), current_mesh())
    other = nn.Module()
    other.layers = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"layers\.0 is a Linear"):
        graph_layers(other, current_mesh(), recorder=Again(list))
    warnings.simplefilter("error")
    assert partial(graph_layers, GPT(LLAMA_GQA), current_mesh(), recorder=Again(list))()
