"""Where tokens are: every layout is a partition, and its maps are inverses of each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_megatron.context_parallel.layout import SequenceLayout, end_borders, inverse
from lightning_megatron.parallelism import Parallelism

CPU = torch.device("cpu")
PACKED = torch.tensor([[0, 8, 8, 32, 64], [0, 64, 64, 64, 64], [0, 16, 24, 40, 64]])
DOCUMENTS: dict[str, Tensor | None] = {"whole rows": None, "packed": PACKED}


def layout_of(size: int, rank: int, documents: str) -> SequenceLayout:
    return SequenceLayout(64, 64, size, rank, DOCUMENTS[documents])


def expected_index(borders: list[int], size: int, rank: int) -> list[int]:
    """Note [Zig-zag], word by word."""
    held = []
    for start, stop in pairwise(borders):
        chunk = (stop - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            held += range(start + number * chunk, start + (number + 1) * chunk)
    return held


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_chunks_r_and_2cp_minus_1_minus_r_of_each_document(size: int, documents: str) -> None:
    borders = [[0, 64]] if DOCUMENTS[documents] is None else PACKED.tolist()
    for rank in range(size):
        index = layout_of(size, rank, documents).own_index(CPU)
        assert index.tolist() == [expected_index(row, size, rank) for row in borders]


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("size", "inner"), [(2, 2), (4, 2), (4, 4)])
def test_gathered_tokens_are_in_the_order_of_fewer_ranks(size: int, inner: int, documents: str) -> None:
    for outer in range(size // inner):
        parts = [layout_of(size, outer * inner + i, documents).own_index(CPU) for i in range(inner)]
        tokens = torch.cat(parts, dim=1)
        order = layout_of(size, 0, documents).gathered(inner, CPU)
        fewer = layout_of(size, 0, documents).over(size // inner, outer)
        wanted = fewer.own_index(CPU).expand(len(tokens), -1)
        assert torch.equal(tokens.gather(1, order), wanted)
        assert torch.equal(wanted.gather(1, inverse(order)), tokens)


def test_positions_start_anew_in_each_document() -> None:
    layout = layout_of(1, 0, "packed")
    positions = layout.positions(layout.own_index(CPU))
    for row, borders in zip(positions.tolist(), PACKED.tolist(), strict=True):
        assert row == [i for start, stop in pairwise(borders) for i in range(stop - start)]


def test_halves_and_runs_of_chunks_select_whole_chunks_of_each_document() -> None:
    layout = layout_of(4, 1, "packed")
    own = layout.own_index(CPU)
    for which, number in ((0, 1), (1, 6)):
        chunk = layout.half(which, CPU)
        everywhere, after = layout.chunks(0, number + 1, CPU), layout.chunks(number + 1, 7 - number, CPU)
        for row, borders in enumerate(PACKED.tolist()):
            spans = [(start, (stop - start) // 8) for start, stop in pairwise(borders)]
            held = [i for start, size in spans for i in range(start + number * size, start + (number + 1) * size)]
            assert own[row][chunk[row]].tolist() == held
            seen = [i for start, size in spans for i in range(start, start + (number + 1) * size)]
            assert everywhere[row].tolist() == seen
            rest = [i for start, size in spans for i in range(start + (number + 1) * size, start + 8 * size)]
            assert after[row].tolist() == rest


def test_borders_of_another_number_of_rows_are_refused() -> None:
    assert end_borders(torch.tensor([0, 3]), 1, 8).tolist() == [[0, 3, 8]]
    with pytest.raises(ValueError, match=r"cu_seqlens have shape \(2,\) for 2 rows of 8 tokens"):
        end_borders(torch.tensor([0, 8]), 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp": 2, "cp_comm": "ring"}, "cp_comm='ring' is unknown; use one of p2p, all_gather, a2a, a2a"),
        ({"cp": 4, "cp_a2a": 2}, "cp_a2a=2 is for cp_comm='a2a.p2p', but cp_comm='p2p'"),
        ({"cp": 3, "cp_comm": "a2a+p2p"}, "cp=3: cp must be a product of two numbers of 2 or more"),
        ({"cp": 8, "cp_comm": "a2a+p2p", "cp_a2a": 3}, r"cp=8 and cp_a2a=3.*cp_a2a is one \(2, 4\)"),
    ],
)
def test_cp_ranks_that_cannot_be_divided_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallelism(**options)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"cp": 4}, 1),
        ({"cp": 4, "cp_comm": "a2a"}, 4),
        ({"cp": 16, "tp": 2, "cp_comm": "a2a+p2p"}, 4),
        ({"cp": 16, "tp": 8, "cp_comm": "a2a+p2p"}, 2),
        ({"cp": 16, "cp_comm": "a2a+p2p", "cp_a2a": 8}, 8),
    ],
)
def test_ranks_that_exchange_heads_stay_on_a_machine_of_eight(options: dict[str, int], number: int) -> None:
    assert Parallelism(**options).num_exchanging == number
