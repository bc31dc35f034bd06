"""Attention over cut sequences equals attention over whole ones, gradients included: in fp64 to 1e-12."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.context_parallel import attention, block, exchange, ring
from lightning_megatron.context_parallel.attention import ContextParallelAttention, check_exchanged_heads
from lightning_megatron.context_parallel.block import BlockAttention
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.parts import take
from lightning_megatron.context_parallel.tiles import Pattern
from lightning_megatron.layers.core_attention import CoreAttention
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

CPU = torch.device("cpu")
S, B, HEADS, SIZE = 64, 2, 8, 4
PACKED = torch.tensor([[0, 8, 8, 32, S], [0, S, S, S, S]])
PATTERNS = {
    f"{'causal' if causal else 'full'}{'' if window is None else f' window {window}'}": Pattern(causal, window)
    for causal, window in product((True, False), (None, 5))
}


def inputs(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and the weights of the sum that is differentiated."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(S, B, heads, SIZE, generator=generator, dtype=dtype) for heads in (HEADS, kv_heads, kv_heads, HEADS)]


@cache
def token_by_token(pattern: Pattern, packed: bool, num_real: int) -> Tensor:
    """Which pairs there are, ``[B, S, S]``, each found out by itself."""
    borders = PACKED.tolist()
    mask = torch.zeros(B, S, S, dtype=torch.bool)
    for row, i, j in product(range(B), range(S), range(S)):
        documents = [sum(border <= x for border in borders[row][1:]) if packed else x >= num_real for x in (i, j)]
        near = pattern.window is None or abs(i - j) < pattern.window
        mask[row, i, j] = documents[0] == documents[1] and near and (j <= i or not pattern.causal)
    return mask


def explicit(tensors: list[Tensor], pattern: Pattern, *, packed: bool, num_real: int = S) -> list[Tensor]:
    """Softmax attention by a mask made token by token, and its gradients."""
    q, k, v, weights = (tensor.clone().requires_grad_() for tensor in tensors)
    mask = token_by_token(pattern, packed, num_real)
    wide = [tensor.repeat_interleave(HEADS // tensor.shape[2], dim=2) for tensor in (k, v)]
    scores = torch.einsum("sbhd,tbhd->bhst", q, wide[0]) / SIZE**0.5
    out = torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1), wide[1])
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def on_ranks(tensors: list[Tensor], pattern: Pattern, layout: SequenceLayout, parallelism: Parallelism) -> list[list[Tensor]]:
    """Output and gradients of each rank, put back in order."""

    def run() -> list[Tensor]:
        mesh = Mesh.create(parallelism, device=CPU)
        own = layout.over(mesh.cp.size, mesh.cp.rank)
        index = own.own_index(CPU)
        q, k, v, weights = (take(tensor, index).clone().requires_grad_() for tensor in tensors)
        out = ContextParallelAttention.of(mesh, BlockAttention())(q, k, v, layout=own, pattern=pattern)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v)), index]

    size = parallelism.cp
    whole = [torch.empty_like(tensor) for tensor in (tensors[0], *tensors[:3])]
    for *parts, index in run_distributed(run, size):
        rows = index.expand(B, -1)
        for tensor, part in zip(whole, parts, strict=True):
            tensor[rows.t(), torch.arange(B)] = part
    return whole


COMMS = [Parallelism(cp=2), *(Parallelism(cp=4, cp_comm=comm) for comm in ("p2p", "all_gather", "a2a", "a2a+p2p"))]


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("parallelism", COMMS, ids=lambda p: f"cp{p.cp} {p.cp_comm}")
def test_cut_attention_equals_whole_attention(parallelism: Parallelism, pattern: str, packed: bool) -> None:
    tensors = inputs(kv_heads=2)
    num_real = S if packed else S - 3
    layout = SequenceLayout(S, num_real, cu_seqlens=PACKED if packed else None)
    found = on_ranks(tensors, PATTERNS[pattern], layout, parallelism)
    expected = explicit(tensors, PATTERNS[pattern], packed=packed, num_real=num_real)
    if PATTERNS[pattern].causal and not packed:  # then nothing tells padding apart, and no real token sees it
        found[0][num_real:] = expected[0][num_real:] = 0.0
        return torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return None


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
@pytest.mark.parametrize("parallelism", COMMS[1:], ids=lambda p: f"cp{p.cp} {p.cp_comm}")
def test_any_number_of_key_and_value_heads_works(parallelism: Parallelism, kv_heads: int) -> None:
    tensors = inputs(kv_heads)
    found = on_ranks(tensors, Pattern(), SequenceLayout(S, S), parallelism)
    torch.testing.assert_close(found, explicit(tensors, Pattern(), packed=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_on_one_rank_follows_the_pattern_and_the_documents(pattern: str, packed: bool) -> None:
    tensors = inputs(kv_heads=2)
    layout = SequenceLayout(S, S, cu_seqlens=PACKED if packed else None)
    core = CoreAttention(CausalAttention(dropout=0.0, mesh=Mesh()), dropout=0.0, mesh=Mesh())
    q, k, v, weights = (tensor.clone().requires_grad_() for tensor in tensors)
    out = core(q, k, v, SequenceContext(S, S, layout=layout, pattern=PATTERNS[pattern]))
    grads = torch.autograd.grad((out.unflatten(2, (HEADS, SIZE)) * weights).sum(), (q, k, v))
    expected = explicit(tensors, PATTERNS[pattern], packed=packed)
    torch.testing.assert_close([out.unflatten(2, (HEADS, SIZE)), *grads], expected, rtol=1e-12, atol=1e-12)


def test_scores_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "_MAX_SCORES", 7 * B * HEADS * S)
    tensors = inputs(kv_heads=2)
    found = on_ranks(tensors, Pattern(), SequenceLayout(S, S), Parallelism(cp=2))
    torch.testing.assert_close(found, explicit(tensors, Pattern(), packed=False), rtol=1e-12, atol=1e-12)


def test_a_ring_in_bfloat16_is_as_near_to_fp64_as_one_rank() -> None:
    tensors = inputs(kv_heads=2, dtype=torch.bfloat16)
    expected = explicit([tensor.double() for tensor in tensors], Pattern(), packed=False)
    found = on_ranks(tensors, Pattern(), SequenceLayout(S, S), Parallelism(cp=4))
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a"])
def test_dropout_draws_own_masks_on_each_rank_and_repeats_them_in_the_backward(comm: str) -> None:
    """Values of one make an output the share of weights that were kept; the gradient of its sum by v must agree with it."""

    def run() -> tuple[Tensor, Tensor, Tensor]:
        mesh = Mesh.create(Parallelism(cp=2, cp_comm=comm), device=CPU)  # type: ignore[arg-type]
        torch.manual_seed(mesh.cp.rank)
        core = CoreAttention(CausalAttention(dropout=0.5, mesh=mesh), dropout=0.5, mesh=mesh)
        layout = SequenceLayout(S, S, 2, mesh.cp.rank)
        q, k, v = (torch.ones(S // 2, B, 4, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(3))
        context = SequenceContext(S // 2, S // 2, layout=layout, pattern=Pattern())
        out = core(q, k, v, context)
        (grad_v,) = torch.autograd.grad(out.sum(), v)
        total = torch.stack([out.detach().sum(), grad_v.sum()])
        dist.all_reduce(total)
        return out.detach(), total, core.eval()(q, k, v, context).detach()

    (first, total, evaluated), (second, _, _) = run_distributed(run, 2)
    assert not torch.equal(first, second)
    assert 0.9 < float(first.mean()) < 1.1
    torch.testing.assert_close(total[0], total[1])
    torch.testing.assert_close(evaluated, torch.ones_like(evaluated))


def test_dropout_gradients_are_those_of_the_masks_that_were_drawn() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        layout = SequenceLayout(8, 8)
        attention = ContextParallelAttention.of(Mesh(), BlockAttention(dropout=0.3))
        return attention(q, k, v, layout=layout, pattern=Pattern())

    torch.manual_seed(0)
    tensors = [torch.randn(8, 1, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed"])
@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_dropout_gradients_over_ranks_are_those_of_the_masks_that_were_drawn(comm: str, packed: bool) -> None:
    """By differences along one direction of all queries, keys and values."""
    tensors = inputs(kv_heads=2)
    directions = [torch.randn(t.shape, generator=torch.Generator().manual_seed(4), dtype=t.dtype) for t in tensors[:3]]

    def run() -> Tensor:
        mesh = Mesh.create(Parallelism(cp=4, cp_comm=comm), device=CPU)  # type: ignore[arg-type]
        layout = SequenceLayout(S, S, 4, mesh.cp.rank, PACKED if packed else None)
        *own, weights = (take(tensor, layout.own_index(CPU)) for tensor in tensors)
        along = [take(tensor, layout.own_index(CPU)) for tensor in directions]
        attention = ContextParallelAttention.of(mesh, BlockAttention(dropout=0.4))

        def total(inputs: list[Tensor]) -> Tensor:
            torch.manual_seed(mesh.cp.rank)
            return (attention(*inputs, layout=layout, pattern=Pattern()) * weights).sum()

        given = [tensor.clone().requires_grad_() for tensor in own]
        grads = torch.autograd.grad(total(given), given)
        slope = torch.stack([(grad * step).sum() for grad, step in zip(grads, along, strict=True)]).sum()
        sides = [total([tensor + sign * 1e-6 * step for tensor, step in zip(own, along, strict=True)]) for sign in (1, -1)]
        both = torch.stack([slope, (sides[0] - sides[1]) / 2e-6])
        dist.all_reduce(both)
        return both

    slope, difference = run_distributed(run, 4)[0]
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-6)


SENT = {"p2p": ["send 4"] * 3, "all_gather": ["gather 4"], "a2a": ["exchange 4"] * 2}
SENT["a2a+p2p"] = ["exchange 2", "send 2", "exchange 2"]


@pytest.mark.parametrize("comm", SENT)
def test_each_way_of_communicating_sends_what_it_says(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    for module, name, title in (
        (ring, "RingTransfer", "send"),
        (exchange, "_all_to_all", "exchange"),
        (attention, "all_gather_from", "gather"),
    ):
        own = getattr(module, name)
        record = lambda tensor, axis, *rest, own=own, title=title: (  # noqa: E731
            sent.append(f"{title} {axis.size}") or own(tensor, axis, *rest)
        )
        monkeypatch.setattr(module, name, record)

    def run() -> list[str]:
        mesh = Mesh.create(Parallelism(cp=4, cp_comm=comm), device=CPU)  # type: ignore[arg-type]
        layout = SequenceLayout(S, S, 4, mesh.cp.rank)
        q, k, v = (take(tensor, layout.own_index(CPU)) for tensor in inputs(kv_heads=4)[:3])
        ContextParallelAttention.of(mesh, BlockAttention())(q, k, v, layout=layout, pattern=Pattern())
        return sent

    assert run_distributed(run, 4) == [SENT[comm]] * 4


def test_a_ring_computes_while_keys_values_and_their_gradients_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that have been started and not waited for, at each tile: keys and values, and in the backward gradients too."""
    under_way: list[int] = []
    sent: list[int] = []
    seen: dict[str, list[int]] = {"forward": [], "backward": []}

    class Counted(exchange.RingTransfer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            under_way.append(1)
            sent.append(args[0].element_size())

        def wait(self) -> Tensor:
            under_way.pop()
            return super().wait()

    monkeypatch.setattr(ring, "RingTransfer", Counted)
    for name in seen:
        own = getattr(BlockAttention, name)
        record = lambda *args, own=own, name=name, **named: seen[name].append(len(under_way)) or own(*args, **named)  # noqa: E731
        monkeypatch.setattr(BlockAttention, name, record)

    def run() -> dict[str, list[int]]:
        mesh = Mesh.create(Parallelism(cp=4), device=CPU)
        layout = SequenceLayout(S, S, 4, mesh.cp.rank)
        q, k, v = (take(tensor, layout.own_index(CPU)).requires_grad_() for tensor in inputs(kv_heads=2)[:3])
        ContextParallelAttention.of(mesh, BlockAttention())(q, k, v, layout=layout, pattern=Pattern()).sum().backward()
        return seen | {"sent": sent}

    expected = {
        "forward": [1, 1, 1, 0],
        "backward": [1, 1, 2, 1, 1],
        "sent": [8] * (3 + 3 + 3),
    }  # what is a rank's own stays there
    assert run_distributed(run, 4) == [expected] * 4


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "message"),
    [
        (6, 6, 4, "6 query heads .* do not divide over the 4 context-parallel ranks"),
        (24, 6, 4, "6 key/value heads .* and 4 context-parallel ranks that exchange heads: one must divide the other"),
    ],
)
def test_heads_that_cannot_be_exchanged_are_refused(heads: int, kv_heads: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_exchanged_heads(heads, kv_heads, size)
