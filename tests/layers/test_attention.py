from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_megatron.layers.attention import check_heads, qkv_parts
from lightning_megatron.layers.sequence import SequenceContext
from lightning_megatron.layers.torch_backend import CausalAttention
from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.tensor_parallel.linear import ColumnParallelLinear
from lightning_megatron.testing import run_distributed

CPU = torch.device("cpu")


def test_grouped_causal_attention_equals_explicit_softmax_with_gradients() -> None:
    torch.manual_seed(0)
    q = torch.randn(7, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(7, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    wide_k, wide_v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, wide_k) / 2
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), float("-inf"))
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), wide_v).flatten(2)
    attended = CausalAttention(dropout=0.0, mesh=Mesh())(q, k, v, SequenceContext(7, 7))
    assert attended.shape == (7, 2, 24)
    assert_close(attended, expected)
    weights = torch.randn_like(attended)
    ours = torch.autograd.grad((attended * weights).sum(), (q, k, v))
    assert_close(ours, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


def test_grouped_attention_in_bfloat16_is_near_that_in_fp32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, 2, heads, 8) for heads in (6, 3, 3))
    core = CausalAttention(dropout=0.0, mesh=Mesh())
    context = SequenceContext(16, 16)
    rounded = core(q.bfloat16(), k.bfloat16(), v.bfloat16(), context).float()
    assert_close(rounded, core(q, k, v, context), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 2, 4), (8, 1, 4), (8, 2, 2), (8, 8, 4), (12, 2, 4)])
def test_each_rank_holds_the_key_and_value_heads_that_its_query_heads_use(heads: int, kv_heads: int, tp: int) -> None:
    def rows() -> tuple[Tensor, tuple[int, ...]]:
        mesh = Mesh.create(Parallelism(tp=tp), device=CPU)
        linear = ColumnParallelLinear(1, qkv_parts(heads, kv_heads, head_dim=1, tp=tp), mesh=mesh, device=CPU)
        boxes = linear.weight._lightning_megatron_sharding.boxes  # type: ignore[attr-defined]
        return torch.tensor([[box.offset[0], box.size[0]] for box in boxes]), linear.part_sizes

    for held, sizes in run_distributed(rows, tp):
        (q_start, q_size), (k_start, k_size), (v_start, v_size) = held.tolist()
        assert sizes == (q_size, k_size, v_size)
        assert k_start - heads == v_start - heads - kv_heads
        used = [head * kv_heads // heads for head in range(q_start, q_start + q_size)]
        local_group = q_size // k_size
        assert used == [k_start - heads + i // local_group for i in range(q_size)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "message"),
    [
        (6, 4, 1, "num_heads=6 does not divide by num_kv_heads=4"),
        (6, 6, 4, "num_heads=6 does not divide by tp=4"),
        (24, 6, 4, "num_kv_heads=6 and tp=4: one must divide the other"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_numbers(heads: int, kv_heads: int, tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_heads(heads, kv_heads, tp)


def test_attention_dropout_differs_between_tp_ranks_and_stops_in_evaluation() -> None:
    def attended() -> tuple[Tensor, Tensor, Tensor]:
        core = CausalAttention(dropout=0.5, mesh=Mesh.create(Parallelism(tp=2), device=CPU))
        q, context = torch.ones(16, 1, 2, 4), SequenceContext(16, 16)
        dropped = core(q, q, q, context)
        state = torch.get_rng_state()
        return dropped, state, core.eval()(q, q, q, context)

    (first, first_state, evaluated), (second, second_state, _) = run_distributed(attended, 2)
    assert not torch.equal(first, second)
    assert torch.equal(first_state, second_state)
    assert_close(evaluated, torch.ones_like(evaluated))
