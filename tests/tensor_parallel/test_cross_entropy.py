"""Vocabulary-parallel cross entropy against ``torch.nn.functional.cross_entropy`` on full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel import cross_entropy as module
from lightning_megatron.tensor_parallel import gather_logits, padded_vocab_size, vocab_parallel_cross_entropy
from lightning_megatron.testing import run_distributed

S, B = 5, 3
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-12}
TERMS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.2, "z_loss": 1e-2},
    {"label_smoothing": 1.0},
]
# At tp=4: no padding; one column of padding; 2 columns a rank, so that rank 2 is half and rank 3 all padding.
VOCABULARIES = [(12, 4), (11, 4), (5, 8)]


def mesh_of(tp: int) -> Mesh:
    return Mesh.create(Parallelism(tp=tp), device=CPU)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_labels(vocab_size: int, *, ignore_index: int = -100) -> Tensor:
    labels = torch.randint(vocab_size, (S, B), generator=torch.Generator().manual_seed(1))
    labels[1, 2] = labels[4, 0] = ignore_index
    return labels


def reference(
    logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100, **terms: Any
) -> tuple[Tensor, Tensor]:
    """Losses ``[S, B]`` and the gradient of their weighted sum in full logits ``[S, B, V]``."""
    logits = logits.clone().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=ignore_index, **terms)
    losses = losses.view(S, B) + z_loss * torch.logsumexp(logits, -1).square() * (labels != ignore_index)
    (losses * random(S, B, seed=3)).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


def padded(logits: Tensor, multiple: int, tp: int, fill: float) -> Tensor:
    size = padded_vocab_size(logits.shape[-1], multiple, tp)
    return F.pad(logits, (0, size - logits.shape[-1]), value=fill)


def losses_and_grad(logits: Tensor, labels: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf, labels, **kwargs)
    (losses * random(S, B, seed=3)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == leaf.dtype
    return losses.detach(), leaf.grad


def run(tp: int, full: Tensor, labels: Tensor, multiple: int, settings: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor]]:
    """For each setting: losses, which all ranks must have alike, and the gradient in full padded logits."""

    def rank_main() -> list[tuple[Tensor, Tensor]]:
        mesh = mesh_of(tp)
        # Padding columns hold a large number, to show that it does not matter.
        local = padded(full, multiple, tp, fill=50.0).chunk(tp, dim=-1)[mesh.tp.rank].contiguous()
        return [losses_and_grad(local, labels, tp=mesh.tp, vocab_size=full.shape[-1], **terms) for terms in settings]

    by_setting = list(zip(*run_distributed(rank_main, tp), strict=True))
    for ranks in by_setting:
        assert all(torch.equal(losses, ranks[0][0]) for losses, _ in ranks)
    return [(ranks[0][0], torch.cat([grad for _, grad in ranks], dim=-1)) for ranks in by_setting]


@pytest.mark.parametrize(("vocab_size", "multiple"), VOCABULARIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_losses_and_gradients_equal_those_on_full_logits(tp: int, vocab_size: int, multiple: int) -> None:
    full, labels = 4.0 * random(S, B, vocab_size, seed=2), random_labels(vocab_size)
    for terms, (losses, grad) in zip(TERMS, run(tp, full, labels, multiple, TERMS), strict=True):
        expected, expected_grad = reference(full, labels, **terms)
        torch.testing.assert_close(losses, expected, **EXACT)
        torch.testing.assert_close(grad[..., :vocab_size], expected_grad, **EXACT)
        assert not grad[..., vocab_size:].any()


def test_ignored_labels_give_exactly_zero() -> None:
    for ignore_index in (-100, 0, 10**6):
        full, labels = random(S, B, 11, seed=2), random_labels(11, ignore_index=ignore_index)
        terms = {"label_smoothing": 0.1, "z_loss": 0.1, "ignore_index": ignore_index}
        ((losses, grad),) = run(2, full, labels, 4, [terms])
        ignored = labels == ignore_index
        assert not losses[ignored].any()
        assert not grad[ignored].any()
        expected, expected_grad = reference(full, labels, **terms)
        torch.testing.assert_close(losses, expected, **EXACT)
        torch.testing.assert_close(grad[..., :11], expected_grad, **EXACT)


def test_all_labels_ignored_is_zero_and_not_nan() -> None:
    ((losses, grad),) = run(2, random(S, B, 11, seed=2), torch.full((S, B), -100), 4, [{"z_loss": 0.1}])
    assert not losses.any()
    assert not grad.any()


def test_large_and_minus_infinite_logits_are_as_on_one_rank() -> None:
    full, labels = 1e4 * random(S, B, 8, seed=2), torch.full((S, B), 3)
    full[..., 4:] = -torch.inf  # all that the second of two ranks has
    full[0, 0, 0] = -torch.inf
    ((losses, grad),) = run(2, full, labels, 8, [{}])
    expected, expected_grad = reference(full, labels)
    torch.testing.assert_close(losses, expected, **EXACT)
    torch.testing.assert_close(grad, expected_grad, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_computed_in_fp32_and_get_gradients_of_their_dtype(dtype: torch.dtype) -> None:
    full, labels = (4.0 * random(S, B, 11, seed=2)).to(dtype), random_labels(11)
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    ((losses, grad),) = run(2, full, labels, 4, [terms])
    assert (losses.dtype, grad.dtype) == (torch.float32, dtype)
    expected, expected_grad = reference(full.double(), labels, **terms)
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=2e-6)  # fp32 arithmetic
    # The gradient is rounded once, to the dtype of the logits.
    torch.testing.assert_close(grad[..., :11].double(), expected_grad, rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_blocks_of_rows_give_the_same_bits_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    full, labels = random(S, B, 11, seed=2), random_labels(11)
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    (one,) = run(1, full, labels, 4, [terms])
    monkeypatch.setattr(module, "_BLOCK_NUMEL", 24)  # two rows a block, eight blocks, the last a short one
    (many,) = run(1, full, labels, 4, [terms])
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1], many[1])


def test_inputs_are_left_as_they_were_and_a_graph_can_be_used_twice() -> None:
    logits, labels = random(S, B, 11, seed=2).requires_grad_(), random_labels(11)
    before, labels_before = logits.detach().clone(), labels.clone()
    losses = vocab_parallel_cross_entropy(logits, labels, tp=Axis("tp"), vocab_size=11, label_smoothing=0.1)
    first = torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0]
    second = torch.autograd.grad(losses.sum(), logits)[0]
    assert torch.equal(first, second)
    assert torch.equal(logits, before)
    assert torch.equal(labels, labels_before)


def test_transposed_logits_and_other_leading_shapes_are_accepted() -> None:
    full, labels = random(S, B, 11, seed=2), random_labels(11)
    expected = vocab_parallel_cross_entropy(full, labels, tp=Axis("tp"), vocab_size=11)
    swapped = vocab_parallel_cross_entropy(full.transpose(0, 1), labels.t(), tp=Axis("tp"), vocab_size=11)
    flat = vocab_parallel_cross_entropy(full.flatten(0, 1), labels.flatten(), tp=Axis("tp"), vocab_size=11)
    assert torch.equal(swapped.t(), expected)
    assert torch.equal(flat.view(S, B), expected)
    assert vocab_parallel_cross_entropy(full[:0], labels[:0], tp=Axis("tp"), vocab_size=11).shape == (0, B)


def test_only_the_logits_and_a_few_numbers_a_token_are_kept_for_backward() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    logits = random(S, B, 64, seed=2).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vocab_parallel_cross_entropy(logits, random_labels(64), tp=Axis("tp"), vocab_size=64)
    large = [tensor for tensor in saved if tensor.numel() > S * B]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_autocast_and_recomputing_change_nothing() -> None:
    full, labels = random(S, B, 11, seed=2).float(), random_labels(11)

    def rank_main() -> None:
        mesh = mesh_of(2)
        local = padded(full, 4, 2, fill=0.0).chunk(2, dim=-1)[mesh.tp.rank].contiguous()
        plain = losses_and_grad(local, labels, tp=mesh.tp, vocab_size=11, label_smoothing=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = losses_and_grad(local, labels, tp=mesh.tp, vocab_size=11, label_smoothing=0.1)
        leaf = local.clone().requires_grad_()
        losses = checkpoint(
            lambda x: vocab_parallel_cross_entropy(x, labels, tp=mesh.tp, vocab_size=11, label_smoothing=0.1),
            leaf,
            use_reentrant=False,
        )
        (losses * random(S, B, seed=3)).sum().backward()
        assert leaf.grad is not None
        for other in (cast, (losses.detach(), leaf.grad)):
            assert torch.equal(plain[0], other[0])
            assert torch.equal(plain[1], other[1])

    run_distributed(rank_main, 2)


def test_wrong_arguments_are_refused_with_the_numbers() -> None:
    logits, labels, tp = torch.zeros(2, 8), torch.tensor([0, 5]), Axis("tp")
    with pytest.raises(ValueError, match=r"labels \(2,\), got \(1,\)"):
        vocab_parallel_cross_entropy(logits, labels[:1], tp=tp, vocab_size=6)
    with pytest.raises(ValueError, match=r"8 columns on each of tp=1 ranks .* vocab_size=9"):
        vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=9)
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5"):
        vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=6, label_smoothing=1.5)
    for vocab_size, label in ((5, 5), (6, -1), (6, 7)):
        with pytest.raises(RuntimeError, match="neither in"):
            vocab_parallel_cross_entropy(logits, torch.tensor([0, label]), tp=tp, vocab_size=vocab_size)


@pytest.mark.parametrize(("vocab_size", "multiple"), VOCABULARIES)
def test_gathered_logits_are_the_real_ones_and_differentiable(vocab_size: int, multiple: int) -> None:
    full = random(S, B, vocab_size, seed=2)

    def rank_main() -> tuple[Tensor, Tensor]:
        mesh = mesh_of(4)
        leaf = padded(full, multiple, 4, fill=50.0).chunk(4, dim=-1)[mesh.tp.rank].clone().requires_grad_()
        logits = gather_logits(leaf, tp=mesh.tp, vocab_size=vocab_size)
        logits.backward(random(B, S, vocab_size, seed=4))
        assert leaf.grad is not None
        return logits.detach(), leaf.grad

    results = run_distributed(rank_main, 4)
    assert all(torch.equal(logits, full.transpose(0, 1)) for logits, _ in results)
    grad = torch.cat([grad for _, grad in results], dim=-1)
    assert torch.equal(grad[..., :vocab_size], random(B, S, vocab_size, seed=4).transpose(0, 1))
    assert not grad[..., vocab_size:].any()
