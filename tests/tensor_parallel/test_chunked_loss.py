"""Head and cross entropy by chunks of tokens against both on all tokens at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPT, GPTConfig
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel import cross_entropy as module
from lightning_megatron.tensor_parallel import vocab_parallel_cross_entropy
from lightning_megatron.tensor_parallel.chunked_loss import head_cross_entropy
from lightning_megatron.tensor_parallel.embedding import vocab_logits
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import open_sum

S, B, H, V, ROWS = 8, 3, 6, 21, 24
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compute(tp: int, sequence_parallel: bool, num_chunks: int, has_sum: bool, terms: dict[str, float]) -> list[Tensor]:
    """Losses and gradients of this rank's hidden states and weight."""
    mesh = Mesh.create(Parallelism(tp=tp, sequence_parallel=sequence_parallel), device=torch.device("cpu"))
    hidden = random(S, B, H, seed=0).chunk(tp if sequence_parallel else 1)[mesh.tp.rank if sequence_parallel else 0]
    hidden = hidden.clone().requires_grad_()
    weight = nn.Parameter(random(ROWS, H, seed=1).chunk(tp)[mesh.tp.rank].clone())
    labels = torch.randint(V, (S, B), generator=torch.Generator().manual_seed(2))
    labels[1, 2] = labels[7, 0] = -100
    if has_sum:
        weight.grad = torch.ones_like(weight)
        open_sum(weight, weight.grad)
    if num_chunks:
        losses = head_cross_entropy(hidden, weight, labels, mesh=mesh, vocab_size=V, num_chunks=num_chunks, **terms)
    else:
        losses = vocab_parallel_cross_entropy(vocab_logits(hidden, weight, mesh), labels, tp=mesh.tp, vocab_size=V, **terms)
    (losses * random(S, B, seed=3)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [losses.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, True), (2, True), (2, False), (4, True)])
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 100])
def test_chunks_give_the_losses_and_gradients_of_all_tokens_at_once(tp: int, sequence_parallel: bool, num_chunks: int) -> None:
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2}
    for has_sum in (False, True):
        found = run_distributed(compute, tp, tp, sequence_parallel, num_chunks, has_sum, terms)
        expected = run_distributed(compute, tp, tp, sequence_parallel, 0, has_sum, terms)
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, **EXACT)


def test_a_model_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = module._local_stats

    def counting(flat: Tensor, *args: Any) -> Tensor:
        rows.append(flat.shape[0])
        return original(flat, *args)

    monkeypatch.setattr(module, "_local_stats", counting)
    results = []
    for chunks in (1, 4):
        config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=40, max_seq_len=8, loss_chunks=chunks)
        model = GPT(config, seed=0, dtype=torch.float64)
        tokens = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(1))
        losses = model(tokens, labels=tokens.roll(-1, 1))
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
    assert rows == [16, 4, 4, 4, 4]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_fewer_than_one_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="loss_chunks=0"):
        GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=40, max_seq_len=8, loss_chunks=0)
