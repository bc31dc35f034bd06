"""Vocabulary-parallel embedding and head against their unsharded counterparts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.initialize import load_unsharded, materialize
from lightning_megatron.mesh import Axis, Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.sharding import sharding_of
from lightning_megatron.tensor_parallel import (
    VocabParallelEmbedding,
    VocabParallelHead,
    gather_logits,
    padded_vocab_size,
    vocab_logits,
    vocab_parallel_cross_entropy,
)
from lightning_megatron.testing import run_distributed

S, B, H = 8, 3, 6
CPU = torch.device("cpu")
EXACT = {"rtol": 1e-9, "atol": 1e-12}
LAYOUTS = [(1, True), (2, True), (2, False), (4, True), (4, False)]
# At tp=4: one row of padding on the last rank; and 2 rows a rank, so that rank 2 is half and rank 3 all padding.
VOCABULARIES = [(11, 4), (5, 8)]


def mesh_of(tp: int, sequence_parallel: bool) -> Mesh:
    return Mesh.create(Parallelism(tp=tp, sequence_parallel=sequence_parallel), device=CPU)


def mesh_without_groups(tp: int, rank: int) -> Mesh:
    return Mesh(Parallelism(tp=tp), rank, tp, axes={"tp": Axis("tp", tuple(range(tp)), rank)})


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_tokens(vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (B, S), generator=torch.Generator().manual_seed(seed))


def own(full: Tensor, mesh: Mesh) -> Tensor:
    return full.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else full


def whole(parts: list[Tensor], *, cut: bool) -> Tensor:
    if cut:
        return torch.cat(parts)
    for part in parts[1:]:
        assert torch.equal(part, parts[0])
    return parts[0]


def full_weight_grad(grads: list[Tensor], vocab_size: int) -> Tensor:
    """Rows of all ranks without the padding, whose gradient must be zero."""
    stacked = torch.cat(grads)
    assert not stacked[vocab_size:].any()
    return stacked[:vocab_size]


@pytest.mark.parametrize(("vocab_size", "multiple"), VOCABULARIES)
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_embedding_equals_the_unsharded_embedding(tp: int, sequence_parallel: bool, vocab_size: int, multiple: int) -> None:
    tokens = random_tokens(vocab_size, seed=1)

    def rank_main() -> tuple[Tensor, Tensor]:
        mesh = mesh_of(tp, sequence_parallel)
        layer = VocabParallelEmbedding(vocab_size, H, mesh=mesh, vocab_multiple=multiple, device="cpu", dtype=torch.float64)
        load_unsharded(layer, {"weight": random(vocab_size, H, seed=2)})
        hidden = layer(tokens)
        hidden.backward(own(random(S, B, H, seed=3), mesh))
        assert layer.weight.grad is not None
        return hidden.detach(), layer.weight.grad

    results = run_distributed(rank_main, tp)
    weight = random(vocab_size, H, seed=2).requires_grad_()
    expected = F.embedding(tokens, weight).transpose(0, 1)
    expected.backward(random(S, B, H, seed=3))
    hidden = whole([hidden for hidden, _ in results], cut=sequence_parallel and tp > 1)
    assert torch.equal(hidden, expected.detach())
    torch.testing.assert_close(full_weight_grad([grad for _, grad in results], vocab_size), weight.grad, **EXACT)


@pytest.mark.parametrize(("vocab_size", "multiple"), VOCABULARIES)
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_head_and_gathered_logits_equal_the_unsharded_head(
    tp: int, sequence_parallel: bool, vocab_size: int, multiple: int
) -> None:
    def rank_main() -> tuple[Tensor, Tensor, Tensor]:
        mesh = mesh_of(tp, sequence_parallel)
        head = VocabParallelHead(vocab_size, H, mesh=mesh, vocab_multiple=multiple, device="cpu", dtype=torch.float64)
        load_unsharded(head, {"weight": random(vocab_size, H, seed=2)})
        hidden = own(random(S, B, H, seed=3), mesh).clone().requires_grad_()
        logits = gather_logits(head(hidden), tp=mesh.tp, vocab_size=vocab_size)
        assert logits.is_contiguous()
        logits.backward(random(B, S, vocab_size, seed=4))
        assert hidden.grad is not None
        assert head.weight.grad is not None
        return logits.detach(), hidden.grad, head.weight.grad

    results = run_distributed(rank_main, tp)
    hidden, weight = random(S, B, H, seed=3).requires_grad_(), random(vocab_size, H, seed=2).requires_grad_()
    expected = F.linear(hidden, weight).transpose(0, 1)
    expected.backward(random(B, S, vocab_size, seed=4))
    torch.testing.assert_close(whole([logits for logits, _, _ in results], cut=False), expected.detach(), **EXACT)
    grad_hidden = whole([grad for _, grad, _ in results], cut=sequence_parallel and tp > 1)
    torch.testing.assert_close(grad_hidden, hidden.grad, **EXACT)
    torch.testing.assert_close(full_weight_grad([grad for _, _, grad in results], vocab_size), weight.grad, **EXACT)


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_a_tied_language_model_trains_as_on_one_rank(tp: int, sequence_parallel: bool) -> None:
    vocab_size = 11
    tokens, labels = random_tokens(vocab_size, seed=1), random_tokens(vocab_size, seed=5)

    def rank_main() -> tuple[Tensor, Tensor]:
        mesh = mesh_of(tp, sequence_parallel)
        embedding = VocabParallelEmbedding(vocab_size, H, mesh=mesh, vocab_multiple=8, device="cpu", dtype=torch.float64)
        load_unsharded(embedding, {"weight": random(vocab_size, H, seed=2)})
        logits = vocab_logits(torch.tanh(embedding(tokens)), embedding.weight, mesh)
        loss = vocab_parallel_cross_entropy(logits, labels.t(), tp=mesh.tp, vocab_size=vocab_size).mean()
        loss.backward()
        assert embedding.weight.grad is not None
        return loss.detach(), embedding.weight.grad

    results = run_distributed(rank_main, tp)
    weight = random(vocab_size, H, seed=2).requires_grad_()
    logits = F.linear(torch.tanh(F.embedding(tokens, weight)), weight)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    torch.testing.assert_close(whole([value for value, _ in results], cut=False), loss.detach(), **EXACT)
    torch.testing.assert_close(full_weight_grad([grad for _, grad in results], vocab_size), weight.grad, **EXACT)


def test_bf16_embedding_keeps_the_bits_of_the_rows() -> None:
    tokens = random_tokens(11, seed=1)

    def rank_main() -> Tensor:
        mesh = mesh_of(2, True)
        layer = VocabParallelEmbedding(11, H, mesh=mesh, vocab_multiple=4, device="cpu", dtype=torch.bfloat16)
        load_unsharded(layer, {"weight": random(11, H, seed=2)})
        return layer(tokens).detach()

    expected = F.embedding(tokens, random(11, H, seed=2).bfloat16()).transpose(0, 1)
    assert torch.equal(torch.cat(run_distributed(rank_main, 2)), expected)


def test_tokens_outside_the_vocabulary_are_refused_even_where_padding_has_a_row_for_them() -> None:
    layer = VocabParallelEmbedding(5, H, mesh=Mesh(), vocab_multiple=8, device="cpu")
    for token in (-1, 5, 8):
        with pytest.raises(RuntimeError, match="outside the vocabulary of 5"):
            layer(torch.tensor([[0, token]]))


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    def rank_main() -> str:
        layer = VocabParallelEmbedding(5, H, mesh=mesh_of(2, True), device="cpu")
        with pytest.raises(ValueError, match="pad it to a multiple of 2") as caught:
            layer(torch.zeros(1, 5, dtype=torch.long))
        return str(caught.value)

    assert "2 ranks" in run_distributed(rank_main, 2)[0]


# ------------------------------------------------------------------------------------------------ layout, pure tests


def test_the_padded_vocabulary_is_the_smallest_multiple_of_both() -> None:
    assert padded_vocab_size(50257, 128, 1) == 50304
    assert padded_vocab_size(50257, 128, 8) == 50304
    assert padded_vocab_size(128, 128, 2) == 128
    assert padded_vocab_size(100, 8, 3) == 120
    assert padded_vocab_size(1, 1, 4) == 4
    with pytest.raises(ValueError, match="vocab_size=0"):
        padded_vocab_size(0, 128, 1)


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, VocabParallelHead])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("vocab_size", "multiple"), [*VOCABULARIES, (16, 8), (1, 8)])
def test_boxes_tile_the_real_vocabulary_and_padding_rows_are_zero(
    kind: type[nn.Module], tp: int, vocab_size: int, multiple: int
) -> None:
    reference = kind(vocab_size, H, mesh=Mesh(), vocab_multiple=multiple, device="meta")
    materialize(reference, device=CPU, seed=3)
    rows: list[int] = []
    for rank in range(tp):
        layer = kind(vocab_size, H, mesh=mesh_without_groups(tp, rank), vocab_multiple=multiple, device="meta")
        materialize(layer, device=CPU, seed=3)
        weight = layer.get_parameter("weight")
        (box,) = sharding_of(weight).boxes
        assert weight.shape[0] == padded_vocab_size(vocab_size, multiple, tp) // tp
        assert layer.vocab_start == rank * weight.shape[0]
        assert box.size[0] == 0 or box.offset == (layer.vocab_start, 0)
        rows += range(box.offset[0], box.offset[0] + box.size[0])
        assert torch.equal(weight[: box.size[0]], reference.get_parameter("weight")[box.offset[0] :][: box.size[0]])
        assert not weight[box.size[0] :].any()
    assert rows == list(range(vocab_size))
