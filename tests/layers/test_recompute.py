"""What is recomputed is not kept, and what comes out is the same bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.utils.checkpoint wants it
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_megatron.layers.recompute import Recompute, recompute, undo
from lightning_megatron.layers.te_backend import Fp8Options, PlainOperations, TeBackend
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.pipeline.model import PipelineModel

B, S, H, F, HEADS = 2, 32, 64, 112, 4
SIZES: dict[str, Any] = {"hidden_size": H, "ffn_hidden_size": F, "num_heads": HEADS, "vocab_size": 61, "max_seq_len": S}
LLAMA = GPTConfig(**SIZES, num_layers=2, init_std=0.2)
GPT2 = replace(LLAMA, position="learned", norm="layernorm", activation="gelu", bias=True, tied_embeddings=True)


class Live(TorchDispatchMode):
    """Bytes of the tensors made inside the block that are still alive; a model's parameters do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._parameters = {param.untyped_storage()._cdata for param in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    @property
    def num_bytes(self) -> int:
        alive = {key: size for key, (storage, size) in self._storages.items() if not storage.expired()}
        return sum(size for key, size in alive.items() if key not in self._parameters)


def tokens() -> Tensor:
    return torch.randint(61, (B, S), generator=torch.Generator().manual_seed(3))


def kept_by(model: nn.Module, *inputs: Any, **named: Any) -> int:
    """Bytes that a forward keeps for its backward."""
    with Live(model) as live:
        loss = model(*inputs, **named).float().mean()
        size = live.num_bytes
    del loss
    return size


def kept_in_a_layer(config: GPTConfig, way: Any, backend: Callable[[], TeBackend] | None = None) -> float:
    """Bytes for each token of each layer, by the difference between models of four layers and of two."""
    sizes = []
    for num_layers in (2, 4):
        model = GPT(replace(config, num_layers=num_layers), seed=0, dtype=torch.bfloat16, backend=backend and backend())
        recompute(model, Recompute.of(way))
        sizes.append(kept_by(model, tokens(), labels=tokens()))
    return (sizes[1] - sizes[0]) / (2 * B * S)


def plain(recipe: Any = None) -> TeBackend:
    fp8 = None if recipe is None else Fp8Options(recipe=recipe)
    return TeBackend(PlainOperations(fp8), fp8)


def outcome(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, Tensor]:
    """The output and all gradients of a forward and backward under fixed random numbers."""
    torch.manual_seed(5)
    model.zero_grad()
    output = model(*inputs, **named)
    output.float().square().mean().backward()
    return {"output": output.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], way: Any = None) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not different, f"{way}: {different}"


# Memory


KEPT = 2 * (8 * H + 3 * F) + 4 * (2 + HEADS)
"""docs/memory.md: x, its norm, q, k and v, attention, x, its norm; gate and up, activation; statistics in fp32."""


@pytest.mark.parametrize(
    ("way", "kept"),
    [
        (None, KEPT),
        ("selective", KEPT - 2 * (2 * H + F)),
        (["norm"], KEPT - 2 * 2 * H),
        (["mlp_act"], KEPT - 2 * F),
        (["mlp"], KEPT - 2 * 3 * F),
        (["attention_core"], KEPT - 4 * HEADS),
        ("full", 2 * H),
    ],
    ids=str,
)
def test_a_llama_layer_keeps_what_the_document_says(way: Any, kept: int) -> None:
    assert kept_in_a_layer(LLAMA, way) == kept


def test_attention_that_keeps_its_scores_is_worth_recomputing() -> None:
    config = replace(LLAMA, attention_dropout=0.1)
    scores = HEADS * S * 2  # bytes for each token of one [S, S] for each head
    assert kept_in_a_layer(config, None) - kept_in_a_layer(config, ["attention_core"]) > 2 * scores


def test_every_second_layer_keeps_the_mean() -> None:
    half = kept_in_a_layer(LLAMA, Recompute("full", every=2))
    assert half == (kept_in_a_layer(LLAMA, "full") + kept_in_a_layer(LLAMA, None)) / 2


@pytest.mark.parametrize("way", ["selective", ["norm"], ["mlp_act"]], ids=str)
def test_transformer_engine_layers_drop_as_much(way: Any) -> None:
    dropped = {"selective": 2 * (2 * H + F), "norm": 2 * 2 * H, "mlp_act": 2 * F}[way if isinstance(way, str) else way[0]]
    assert kept_in_a_layer(LLAMA, None, plain) - kept_in_a_layer(LLAMA, way, plain) == dropped


def test_activations_in_8_bits_are_dropped_too() -> None:
    kept = [kept_in_a_layer(LLAMA, way, partial(plain, "current")) for way in (None, ["mlp_act"])]
    assert F <= kept[0] - kept[1] < F + 1  # one byte an element, and a factor


# Bits


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("way", ["full", "selective", ["mlp"], ["layers.*.attn", "norm"]], ids=str)
def test_steps_in_8_bits_are_the_same(way: Any, recipe: Any) -> None:
    config = replace(LLAMA, hidden_dropout=0.2)

    def steps(way: Any) -> list[dict[str, Tensor]]:
        backend = plain(recipe)
        model = GPT(config, seed=0, dtype=torch.bfloat16, backend=backend)
        recompute(model, Recompute.of(way))
        found = []
        for _ in range(3):  # from the second on, a norm hands over in 8 bits
            found.append(outcome(model, tokens(), labels=tokens()))
            backend.scales.advance(lambda numbers: numbers)  # type: ignore[union-attr]
        return found

    for actual, expected in zip(steps(way), steps(None), strict=True):
        assert_same_bits(actual, expected, way)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        normed = self.norm(hidden)
        added = self.down(self.act(self.up(normed))) + normed * normed
        return hidden + self.dropout(added if scale is None else added * scale)


class Stack(PipelineModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

    def first(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def last(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


INPUT = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
WAYS: list[Any] = ["full", "selective", ["norm"], ["mlp_act"], ["layers.*.down"], ["layers.[01].norm"], Recompute("layer", 2)]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_model_of_plain_modules_trains_the_same(way: Any, autocast: bool) -> None:
    model = made(Stack)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = outcome(model, INPUT)
        before = kept_by(model, INPUT)
        recompute(model, Recompute.of(way))
        after = kept_by(model, INPUT)
        assert_same_bits(outcome(model, INPUT), expected, way)
    assert after < before or way in (["layers.*.down"], ["norm"], ["layers.[01].norm"])  # a linear keeps its input anyway


def test_what_lies_in_a_recomputed_module_runs_twice_and_not_more_often() -> None:
    class Counting(nn.Linear):
        num_forwards = 0

        def forward(self, hidden: Tensor) -> Tensor:
            self.num_forwards += 1
            return super().forward(hidden)

    model = made(Stack)
    for layer in model.layers:
        layer.up = Counting(8, 16)
    recompute(model, Recompute.of(["full", "layers.*.up", "norm"]))
    outcome(model, INPUT)
    assert [layer.up.num_forwards for layer in model.layers] == [2, 2, 2]


def test_a_module_without_layers_is_named_by_pattern() -> None:
    model = made(Plain)
    expected = outcome(model, INPUT)
    before = kept_by(model, INPUT)
    recompute(model, Recompute(["encoder"]))
    assert kept_by(model, INPUT) < before
    assert_same_bits(outcome(model, INPUT), expected)


@pytest.mark.parametrize("way", ["full", "selective", ["norm", "layers.*.up"]], ids=str)
def test_a_split_backward_is_the_same_and_products_behind_dropped_outputs_wait(way: Any) -> None:
    model = made(Stack)
    expected = outcome(model, INPUT)
    recompute(model, Recompute.of(way))
    torch.manual_seed(5)
    model.zero_grad()
    output = model(INPUT)
    loss = output.float().square().mean()
    split = SplitBackward([(get_gradient_edge(loss), torch.ones(()))], [])
    split.run_input_part()
    # embed and head; and in each layer that is not checkpointed as a whole: up (if it is not itself) and down.
    assert split.num_late == {"full": 2, "selective": 8}.get(str(way), 5)
    split.run_weight_part()
    actual = {name: p.grad for name, p in model.named_parameters()}
    assert_same_bits({"output": output.detach(), **actual}, expected)


# What stays as it was


def test_running_statistics_move_once() -> None:
    class WithStatistics(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    plain, model = made(WithStatistics), made(WithStatistics)
    recompute(model, Recompute(["encoder"]))
    for _ in range(2):
        assert_same_bits(outcome(model, INPUT), outcome(plain, INPUT))
    assert_same_bits(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_names_signatures_and_evaluation_do_not_change() -> None:
    model = made(Stack)
    names = list(model.state_dict())
    recompute(model, Recompute.of("selective"))
    recompute(model, Recompute.of("full"))  # instead of what was before
    assert list(model.state_dict()) == names
    assert type(model.layers[0]) is Block
    scaled = outcome(model, INPUT, scale=torch.full((), 2.0))  # only layers take it
    model.eval()
    with torch.no_grad():
        plain = model(INPUT)
    undo(model)
    assert "forward" not in model.layers[0].__dict__
    with torch.no_grad():
        assert torch.equal(model(INPUT), plain)
    model.train()
    assert_same_bits(outcome(model, INPUT, scale=torch.full((), 2.0)), scaled)


@pytest.mark.parametrize("way", ["full", "selective"])
def test_a_copy_of_a_model_computes_with_its_own_parameters(way: str) -> None:
    model = made(Stack)
    recompute(model, Recompute.of(way))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert float(outcome(copied, INPUT)["output"].detach().abs().sum()) == 0.0
    assert float(outcome(model, INPUT)["output"].detach().abs().sum()) > 0.0


def test_a_change_in_place_is_found() -> None:
    class Careless(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Changing()])

    class Changing(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            up = self.up(self.norm(hidden))
            result = self.down(self.act(up))
            up.zero_()
            return result

    model = made(Careless)
    recompute(model, Recompute.of("selective"))
    with pytest.raises(RuntimeError, match="changed in place since: it is at version 1 instead of 0"):
        outcome(model, INPUT)


def test_selective_takes_what_there_is_of_it() -> None:
    class OnlyNorm(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

    class WithoutActivation(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([OnlyNorm()])

    model = made(WithoutActivation)
    expected = outcome(model, INPUT)
    recompute(model, Recompute.of("selective"))
    assert_same_bits(outcome(model, INPUT), expected)
    with pytest.raises(ValueError, match="'selective' fits no module of Plain"):
        recompute(made(Plain), Recompute.of("selective"))


@pytest.mark.parametrize(
    ("module", "way", "parts"),
    [
        (Stack, ["attention_core"], ["'attention_core' fits no module of Stack", "layers.0", "norm, up"]),
        (Stack, ["layers.*.mlp"], ["'layers.*.mlp' fits no module of Stack", "norm, up"]),
        (Plain, "full", ["'full' fits no module of Plain", "no layers", "'encoder'"]),
    ],
    ids=str,
)
def test_a_name_that_no_module_has_is_refused(module: type[nn.Module], way: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="recompute=") as caught:
        recompute(made(module), Recompute.of(way))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("modules", [True, 3, "", [], ["norm", ""], ["norm", 2]], ids=str)
def test_what_names_no_module_is_refused(modules: Any) -> None:
    with pytest.raises(ValueError, match="names no module; use full, selective, layer"):
        Recompute.of(modules)


def test_every_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"every=0\) must be 1"):
        Recompute("full", every=0)
