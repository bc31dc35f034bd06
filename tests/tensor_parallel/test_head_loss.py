"""Head and loss in one function against ``torch.nn.functional`` on one rank: losses, gradients, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.models import gpt as gpt_module
from lightning_megatron.optim.guard import ForwardWait
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.tensor_parallel import chunked_loss
from lightning_megatron.tensor_parallel.chunked_loss import head_cross_entropy
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import open_sum

S, B, H, V, ROWS = 8, 3, 6, 21, 24
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-10, "atol": 1e-12}
TERMS: list[dict[str, float]] = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def given(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    """Hidden states, the head's weight with padding rows, labels of which some do not count, and unlike upstream factors."""
    labels = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(2))
    labels[1, 2] = labels[5] = labels[7, 0] = -100
    factors = random(S, B, seed=3).float()
    factors[2] = 0.0
    factors[6] *= 1e-6
    return random(S, B, H, seed=0, dtype=dtype), nn.Parameter(random(ROWS, H, seed=1, dtype=dtype)), labels, factors


def reference(dtype: torch.dtype = torch.float64, **terms: float) -> list[Tensor]:
    """Losses and gradients of hidden states and weight, in fp64."""
    hidden, weight, labels, factors = given(dtype)
    hidden, rows = hidden.double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = F.linear(hidden, rows[:V])
    smoothing = terms.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=smoothing).view(S, B)
    losses = losses + terms.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (labels != -100)
    grads = torch.autograd.grad((losses * factors).sum(), (hidden, rows))
    return [losses.detach(), *grads]


def compute(tp: int, sequence_parallel: bool, has_sum: bool, terms: dict[str, float]) -> list[Tensor]:
    """The same of this rank: losses, own hidden states' gradient, own rows' gradient."""
    mesh = Mesh.create(Parallelism(tp=tp, sequence_parallel=sequence_parallel), device=CPU)
    hidden, weight, labels, factors = given()
    hidden = hidden.chunk(tp if sequence_parallel else 1)[mesh.tp.rank if sequence_parallel else 0].clone().requires_grad_()
    weight = nn.Parameter(weight.detach().chunk(tp)[mesh.tp.rank].clone())
    total = torch.full_like(weight, 7.0, dtype=torch.float64)
    if has_sum:
        open_sum(weight, total)  # empty, whatever it holds: the first gradient is written over it
    for _ in range(2):
        losses = head_cross_entropy(hidden, weight, labels, mesh=mesh, vocab_size=V, **terms)
        (losses * factors / 2).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (weight.grad is total) == has_sum
    return [losses.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, True), (2, True), (2, False), (4, True)])
def test_losses_and_gradients_equal_those_of_torch_on_one_rank(tp: int, sequence_parallel: bool) -> None:
    for terms in TERMS:
        losses, of_hidden, of_weight = reference(**terms)
        for has_sum in (False, True):
            found = run_distributed(compute, tp, tp, sequence_parallel, has_sum, terms)
            for rank in found:
                torch.testing.assert_close(rank[0], losses, **EXACT)
            parts = [rank[1] for rank in found]
            whole = torch.cat(parts) if sequence_parallel else parts[-1]
            torch.testing.assert_close(whole, of_hidden, **EXACT)
            torch.testing.assert_close(torch.cat([rank[2] for rank in found]), of_weight, **EXACT)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_gradients_lie_near_exact_ones_whatever_the_factors(dtype: torch.dtype, relative: float) -> None:
    hidden, weight, labels, factors = given(dtype)
    hidden.requires_grad_()
    losses = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    assert losses.dtype == torch.float32
    (losses * factors).sum().backward()
    _, of_hidden, of_weight = reference(dtype)
    for found, expected in ((hidden.grad, of_hidden), (weight.grad, of_weight)):
        assert found is not None
        assert found.dtype == dtype
        assert float((found.double() - expected).norm()) <= relative * float(expected.norm())
    assert hidden.grad is not None
    assert not hidden.grad[2].any()
    assert not hidden.grad[5].any()
    if dtype != torch.float16:  # which cannot hold the factors of the sixth position
        error = (hidden.grad.double() - of_hidden).norm(dim=-1)
        assert bool((error <= 2 * relative * of_hidden.norm(dim=-1)).all()), "each token's error is small beside its own"


@contextmanager
def packed() -> Iterator[list[Tensor]]:
    """What is saved for a backward."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def test_one_tensor_of_the_size_of_logits_is_kept_and_none_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    original = chunked_loss.losses_with_gradient
    monkeypatch.setattr(chunked_loss, "losses_with_gradient", lambda *a, **k: made.append(True) or original(*a, **k))
    hidden, weight, labels, _ = given()
    hidden.requires_grad_()
    with packed() as saved:
        losses = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    assert sorted(tensor.numel() for tensor in saved) == sorted([S * B * ROWS, S * B * H, ROWS * H])
    assert made == [True]
    with packed() as saved, torch.no_grad():
        again = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    with torch.inference_mode():
        head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    frozen = head_cross_entropy(hidden.detach(), weight.detach(), labels, mesh=Mesh(), vocab_size=V)
    assert saved == []
    assert made == [True]
    assert not frozen.requires_grad
    torch.testing.assert_close(again, losses.detach(), **EXACT)


def test_a_backward_can_run_twice_and_leaves_its_inputs_alone() -> None:
    hidden, weight, labels, factors = given()
    hidden.requires_grad_()
    before = [tensor.detach().clone() for tensor in (hidden, weight, labels, factors)]
    losses = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    first = torch.autograd.grad(losses, (hidden, weight), factors.double(), retain_graph=True)
    other = torch.autograd.grad(losses, (hidden, weight), torch.ones_like(losses), retain_graph=True)
    second = torch.autograd.grad(losses, (hidden, weight), factors.double())
    for a, b, c in zip(first, second, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    for tensor, kept in zip((hidden, weight, labels, factors), before, strict=True):
        assert torch.equal(tensor, kept)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradients_that_are_wanted_are_made_and_only_their_factors_kept(frozen: str) -> None:
    hidden, weight, labels, factors = given()
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    with packed() as saved:
        losses = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    assert len(saved) == 2
    (losses * factors).sum().backward()
    _, of_hidden, of_weight = reference()
    for tensor, expected, name in ((hidden, of_hidden, "hidden"), (weight, of_weight, "weight")):
        if name == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected, **EXACT)


def test_recomputing_and_autocast_give_the_same_bits() -> None:
    results = []
    for way in ("plain", "checkpoint", "autocast"):
        hidden, weight, labels, factors = given(torch.float32)
        hidden.requires_grad_()

        def run(x: Tensor, weight: nn.Parameter = weight, labels: Tensor = labels) -> Tensor:
            return head_cross_entropy(x, weight, labels, mesh=Mesh(), vocab_size=V)

        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            losses: Any = checkpoint(run, hidden, use_reentrant=False) if way == "checkpoint" else run(hidden)
            (losses * factors).sum().backward()
        results.append([losses.detach(), hidden.grad, weight.grad])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("widest", "num_late"), [(S * B * ROWS, 1), (S * B * ROWS - 1, 0)])
def test_the_weight_waits_in_a_split_backward_unless_that_keeps_too_much(widest: int, num_late: int) -> None:
    hidden, weight, labels, factors = given()
    hidden.requires_grad_()
    losses = head_cross_entropy(hidden, weight, labels, mesh=Mesh(), vocab_size=V)
    split = SplitBackward([(get_gradient_edge(losses), factors.double())], [hidden], widest=widest)
    split.run_input_part()
    assert split.num_late == num_late
    assert (weight.grad is None) == bool(num_late)
    split.run_weight_part()
    _, of_hidden, of_weight = reference()
    torch.testing.assert_close(hidden.grad, of_hidden, **EXACT)
    torch.testing.assert_close(weight.grad, of_weight, **EXACT)


def test_a_head_that_someone_watches_or_has_changed_makes_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = gpt_module.head_cross_entropy
    monkeypatch.setattr(gpt_module, "head_cross_entropy", lambda *a, **k: calls.append("together") or original(*a, **k))
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=40, max_seq_len=8)
    tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))
    results = []
    for way in ("plain", "watched", "subclass"):
        model = GPT(config, seed=0, dtype=torch.float64)
        assert model.head is not None
        if way == "watched":
            model.head.register_forward_hook(lambda module, args, output: calls.append("watched"))
        if way == "subclass":
            model.head.__class__ = type("Other", (type(model.head),), {})
        losses = model(tokens, labels=tokens.roll(-1, 1))
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    assert calls == ["together", "watched"]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


class Gathering:
    """A bucket of parameters that are on their way."""

    def __init__(self) -> None:
        self.is_gathering, self.params = True, ()

    def wait_gather(self) -> None:
        self.is_gathering = False


@pytest.mark.parametrize(("tied", "chunks"), [(False, 1), (True, 1), (False, 2)])
def test_a_head_that_is_not_called_still_waits_for_its_weight(tied: bool, chunks: int) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "max_seq_len": 8, "loss_chunks": chunks}
    model = GPT(GPTConfig(**shape, tied_embeddings=tied), seed=0)  # type: ignore[arg-type]
    bucket, tokens = Gathering(), torch.zeros((1, 8), dtype=torch.long)
    (context,) = model.context(tokens)
    owner = model.embedding if model.head is None else model.head
    owner.register_forward_pre_hook(ForwardWait([bucket]))  # type: ignore[list-item]
    model.last(torch.zeros(8, 1, 16), context, tokens)  # as on a last stage, where the embedding has not been called
    assert not bucket.is_gathering
