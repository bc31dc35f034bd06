"""Ranks compute equally much attention; dynamic plans hold every document once and keep ranks busy."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from lightning_megatron.context_parallel.balance import attention_pairs, imbalance, plain_pairs, zigzag_pairs
from lightning_megatron.context_parallel.dynamic import Cost, degrees, plan_step, simulate_step, waves
from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.data.packing import first_fit_decreasing
from lightning_megatron.models import GPTConfig


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_counted_one_by_one(causal: bool, window: int | None) -> None:
    for length in (1, 2, 7, 20):
        pairs = [(i, j) for i in range(length) for j in range(length) if j <= i or not causal]
        counted = sum(window is None or abs(i - j) < window for i, j in pairs)
        assert attention_pairs(length, causal=causal, window=window) == counted


@pytest.mark.parametrize("cp", [2, 4, 8, 64])
@pytest.mark.parametrize("length", [128, 4096, 131072, 1048576])
def test_with_zigzag_the_slowest_rank_is_within_one_percent_of_the_mean(length: int, cp: int) -> None:
    pairs = zigzag_pairs([length], cp)
    assert sum(pairs) == attention_pairs(length)
    assert imbalance(pairs) <= 0.01
    assert imbalance(plain_pairs([length], cp)) > 0.45


@pytest.mark.parametrize("cp", [2, 8])
def test_with_a_window_the_slowest_rank_is_within_one_percent_of_the_mean(cp: int) -> None:
    pairs = zigzag_pairs([65536], cp, window=1024)
    assert sum(pairs) == attention_pairs(65536, window=1024)
    assert imbalance(pairs) <= 0.01


def test_over_a_thousand_random_packs_the_slowest_rank_is_within_five_percent_of_the_mean() -> None:
    generator = random.Random(0)
    for _ in range(1000):
        cp, seq_len = generator.choice([2, 4, 8]), 8192
        lengths = [min(seq_len, int(generator.lognormvariate(6.0, 1.2)) + 1) for _ in range(40)]
        padded = [length + -length % (2 * cp) for length in lengths]
        for row in first_fit_decreasing(padded, seq_len):
            documents = [padded[i] for i in row]
            pairs = zigzag_pairs([*documents, seq_len - sum(documents)], cp)
            assert imbalance(pairs) <= 0.05


@pytest.mark.parametrize("window", [None, 7])
def test_pairs_that_are_counted_are_those_of_the_tokens_that_ranks_hold(window: int | None) -> None:
    for documents, cp in (([64], 2), ([8, 24, 16, 0, 80], 4), ([12, 36], 6)):
        borders = torch.tensor([0, *documents]).cumsum(0)[None]
        length, counted = sum(documents), []
        for rank in range(cp):
            layout = SequenceLayout(length, length, cp, rank, borders)
            seen = layout.positions(layout.own_index(torch.device("cpu"))) + 1
            counted.append(int(seen.clamp(max=window or length).sum()))
        assert counted == zigzag_pairs(documents, cp, window=window)


def random_lengths(generator: random.Random) -> list[int]:
    lengths = [min(131072, max(64, int(generator.lognormvariate(7.5, 1.3)))) for _ in range(256)]
    return [generator.randint(32768, 131072), *lengths]


COST = Cost(token=1.0, pair=4e-4, exchange=0.1, microbatch=300.0)


def test_the_cost_of_a_model_is_its_flops() -> None:
    config = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=8000)
    cost = Cost.of_flops(config.flops_per_token)
    for length in (1000, 8000):
        assert cost.of_document(length) == pytest.approx(length * config.flops_per_token(length), rel=1e-3)


def test_dynamic_plans_hold_each_document_once_and_never_more_than_fits() -> None:
    generator = random.Random(1)
    for _ in range(50):
        lengths = random_lengths(generator)
        plan = plan_step(lengths, num_ranks=8, tokens_per_rank=16384, cost=COST)
        assert sorted(i for microbatch in plan for i in microbatch.documents) == list(range(len(lengths)))
        for microbatch in plan:
            assert sum(lengths[i] for i in microbatch.documents) <= microbatch.degree * 16384
            assert microbatch.first_rank % microbatch.degree == 0


def test_dynamic_plans_keep_ranks_busy_and_beat_static_ones() -> None:
    generator = random.Random(2)
    gains = []
    for _ in range(50):
        lengths = random_lengths(generator)
        dynamic = simulate_step(plan_step(lengths, num_ranks=8, tokens_per_rank=16384, cost=COST), 8)
        static = simulate_step(plan_step(lengths, num_ranks=8, tokens_per_rank=16384, cost=COST, min_degree=8), 8)
        assert dynamic.efficiency > 0.9
        gains.append(static.makespan / dynamic.makespan)
    assert min(gains) > 1.0
    assert sum(gains) / len(gains) > 1.05


def test_a_plan_of_equal_short_documents_uses_no_block_of_ranks() -> None:
    plan = plan_step([1000] * 64, num_ranks=4, tokens_per_rank=4000, cost=Cost())
    assert {microbatch.degree for microbatch in plan} == {1}
    assert simulate_step(plan, 4).efficiency == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "message"),
    [([90], 8, "a document of 90 tokens does not fit 8 ranks of 10 tokens")],
)
def test_plans_that_cannot_be_are_refused_with_the_numbers(lengths: list[int], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, num_ranks=num_ranks, tokens_per_rank=10)
    with pytest.raises(ValueError, match=r"min_degree=4 and max_degree=6 of 6 ranks: .* min_degree be one of \[1, 2, 6\]"):
        plan_step([1], num_ranks=6, tokens_per_rank=10, min_degree=4)
    with pytest.raises(ValueError, match=r"max_degree=4 of 6 ranks"):
        plan_step([1], num_ranks=6, tokens_per_rank=10, max_degree=4)


@pytest.mark.parametrize("num_ranks", [1, 4, 6, 8, 12])
def test_waves_are_whole_blocks_side_by_side_in_the_order_of_each_rank(num_ranks: int) -> None:
    assert all(not larger % smaller for smaller, larger in pairwise(degrees(num_ranks)))
    generator = random.Random(3)
    for _ in range(20):
        lengths = [generator.choice([10, 100, 500, 1000]) for _ in range(30)]
        plan = plan_step(lengths, num_ranks=num_ranks, tokens_per_rank=1000 // num_ranks + 1)
        found = waves(plan, num_ranks)
        for wave in found:
            assert [rank for block in wave for rank in block.ranks] == list(range(num_ranks))
            assert all(block.first_rank % block.degree == 0 for block in wave)
        for rank in range(num_ranks):
            own = [block for wave in found for block in wave if rank in block.ranks and block.documents]
            assert own == [block for block in plan if rank in block.ranks]
