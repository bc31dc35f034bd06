"""Packing keeps every document whole, once, in as few rows as first-fit decreasing needs."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_megatron.data.packing import DynamicPackingCollator, PackingCollator, first_fit_decreasing
from lightning_megatron.models.gpt import shift_labels


def test_first_fit_decreasing_fills_bins_and_loses_nothing() -> None:
    generator = random.Random(0)
    for _ in range(100):
        lengths = [generator.randint(1, 100) for _ in range(60)]
        bins = first_fit_decreasing(lengths, 100)
        assert sorted(item for items in bins for item in items) == list(range(60))
        assert all(sum(lengths[i] for i in items) <= 100 for items in bins)
        assert len(bins) <= 11 / 9 * -(-sum(lengths) // 100) + 1 + 3  # the least number may be above the total's share
        assert bins == sorted(sorted(items) for items in bins)


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has 12 tokens, padding included, which do not fit 1 <= length <= 10"):
        first_fit_decreasing([3, 12], 10)


def documents() -> list[Tensor]:
    return [torch.arange(start, start + length) for start, length in ((100, 5), (200, 9), (300, 1), (400, 7), (500, 4))]


def test_rows_hold_the_documents_padded_with_labels_shifted_inside_each() -> None:
    batch = PackingCollator(16, multiple_of=4, pad_token=7)(documents())
    rows, sizes = batch["tokens"], batch["cu_seqlens"].diff(dim=1)
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"][:, 0].eq(0).all()
    assert batch["cu_seqlens"][:, -1].eq(16).all()
    assert bool((sizes % 4 == 0).all())
    assert batch["max_seqlen"] == int(sizes.max())
    found = []
    for row, labels, borders in zip(rows, batch["labels"], batch["cu_seqlens"].tolist(), strict=True):
        for start, stop in zip(borders, borders[1:], strict=False):  # noqa: RUF007
            part = row[start:stop]
            real = part[part != 7]
            found += [real.tolist()] if len(real) else []
            expected = torch.full((stop - start,), -100)
            expected[: max(0, len(real) - 1)] = real[1:]
            assert torch.equal(labels[start:stop], expected)
    assert sorted(found) == [document.tolist() for document in documents()]


def test_labels_that_are_given_are_kept() -> None:
    given = [{"tokens": torch.tensor([1, 2, 3]), "labels": torch.tensor([-100, 5, 6])}]
    assert PackingCollator(4)(given)["labels"].tolist() == [[-100, 5, 6, -100]]


def test_batches_of_different_documents_have_few_different_shapes() -> None:
    generator, shapes = random.Random(0), set()
    for _ in range(50):
        batch = PackingCollator(64, num_rows=8)([torch.ones(generator.randint(1, 30)) for _ in range(16)])
        shapes.add(tuple(batch["cu_seqlens"].shape))
    assert shapes <= {(8, 8), (8, 16)}


def test_more_documents_than_the_rows_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="2 documents of 16 tokens, padding included, need 2 rows of 12, but num_rows=1"):
        PackingCollator(12, multiple_of=4, num_rows=1)([torch.ones(7), torch.ones(8)])
    with pytest.raises(ValueError, match="seq_len=10 is no multiple of multiple_of=4"):
        PackingCollator(10, multiple_of=4)


def test_shifted_labels_stop_at_the_borders_of_documents() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    borders = torch.tensor([[0, 2, 5, 6], [0, 6, 6, 6]])
    expected = [[2, -100, 4, 5, -100, -100], [2, 3, 4, 5, 6, -100]]
    assert shift_labels(tokens, cu_seqlens=borders).tolist() == expected


def test_dynamic_packing_cuts_documents_over_as_few_ranks_as_they_need() -> None:
    generator = random.Random(3)
    lengths = [generator.choice([3, 9, 17, 30, 50, 100]) for _ in range(80)]
    documents = [torch.full((n,), i + 1) for i, n in enumerate(lengths)]
    seen: list[int] = []
    for part in DynamicPackingCollator(128, 4, round_to=2)(documents):
        assert part["cu_seqlens"][0, 0] == 0
        assert part["cu_seqlens"][0, -1] == part["tokens"].shape[1] == sum(tokens for _, tokens in part["cp_blocks"])
        assert sum(ranks for ranks, _ in part["cp_blocks"]) == 4
        for (ranks, tokens), row in zip(
            part["cp_blocks"], part["tokens"][0].split([tokens for _, tokens in part["cp_blocks"]]), strict=True
        ):
            held = [int(token) for token in row.unique() if token]
            assert tokens <= 32 * ranks
            assert ranks == 1 or any(lengths[i - 1] > 32 * ranks // 2 for i in held)
            seen += held
    assert sorted(seen) == list(range(1, 81))


def test_replicas_that_plan_together_share_the_documents_and_have_as_many_micro_batches() -> None:
    generator = random.Random(4)
    lengths = [generator.choice([3, 9, 17, 30, 50, 100]) for _ in range(60)]
    documents = [torch.full((n,), i + 1) for i, n in enumerate(lengths)]
    parts = [DynamicPackingCollator(128, 4, round_to=2, num_replicas=3, replica=i)(documents) for i in range(3)]
    assert len({len(part) for part in parts}) == 1
    rows = [row["tokens"][0].split([tokens for _, tokens in row["cp_blocks"]]) for part in parts for row in part]
    held = [int(token) for row in rows for block in row for token in block.unique() if token]
    assert sorted(held) == list(range(1, 61))


def test_dynamic_packing_gives_ranks_about_as_much_to_do() -> None:
    generator = random.Random(1)
    for _ in range(20):
        lengths = [min(4096, int(generator.lognormvariate(6.0, 1.2)) + 1) for _ in range(128)]
        busy = [0.0] * 4
        for wave in DynamicPackingCollator(8192, 4).plan(lengths):
            for block in wave:
                for rank in block.ranks:
                    busy[rank] += block.cost
        assert max(busy) <= 1.1 * sum(busy) / 4


def test_dynamic_packing_of_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_len=24 does not divide by 2 \* cp \* cp = 32"):
        DynamicPackingCollator(24, 4)
