"""Tiles, in the forms that fused kernels take, hold each pair of query and key once and no other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lightning_megatron.context_parallel.layout import SequenceLayout, document_of
from lightning_megatron.context_parallel.parts import Part, num_places, take
from lightning_megatron.context_parallel.tiles import Pattern, Run, Tile, band
from lightning_megatron.context_parallel.tiling import Tiling

CPU = torch.device("cpu")
S, B = 64, 2
PACKED = torch.tensor([[0, 8, 8, 32, S], [0, S, S, S, S]])
# Of documents of 8, 0, 24, 32 and 64 tokens: one of a single token, and one that is padding altogether.
REAL = torch.tensor([[1, 0, 19, 0], [62, 0, 0, 0]])
ROWS: dict[str, tuple[int, Tensor | None, Tensor | None]] = {
    "whole": (S, None, None),
    "padded": (S - 5, None, None),
    "packed": (S, PACKED, None),
    "packed, padded": (S, PACKED, REAL),
}
WINDOWS = (None, 1, 5, 9, 17, 40, 63, 100)


def places(index: Tensor, part: Part) -> Tensor:
    """Natural indexes of a part of the tokens that are at hand, ``[B, n]``."""
    return take(index.expand(B, -1).t(), part).t()


def is_real(layout: SequenceLayout) -> Tensor:
    """Which tokens do not pad a document, ``[B, S]``."""
    if layout.cu_seqlens is None or layout.real_lengths is None:
        return torch.ones(B, S, dtype=torch.bool)
    documents = document_of(layout.cu_seqlens, torch.arange(S)[None])
    return torch.arange(S) - layout.cu_seqlens.gather(1, documents) < layout.real_lengths.gather(1, documents)


def wanted(pattern: Pattern, layout: SequenceLayout) -> Tensor:
    """Which pairs there are, ``[B, S, S]``."""
    tokens = torch.arange(S)
    distance = tokens[:, None] - tokens[None]
    documents = (tokens >= layout.num_real).long().expand(B, -1)
    if layout.cu_seqlens is not None:
        documents = document_of(layout.cu_seqlens, tokens[None])
        documents = documents if pattern.causal else 2 * documents + is_real(layout)
    pairs = (documents[:, :, None] == documents[:, None]) | (pattern.causal and layout.cu_seqlens is None)
    pairs = pairs & (distance >= 0) if pattern.causal else pairs
    return pairs if pattern.window is None else pairs & (distance.abs() < pattern.window)


def count(pairs: Tensor, tile: Tile, q_index: Tensor, k_index: Tensor) -> None:
    """Add the pairs of a tile to ``[B, S, S]``."""
    q, k = places(q_index, tile.q), places(k_index, tile.k)
    mask = tile.mask(q.shape[1], k.shape[1], num_rows=B, device=CPU)
    seen = torch.ones(B, q.shape[1], k.shape[1], dtype=torch.bool) if mask is None else mask.expand(B, -1, -1)
    for row in range(B):
        pairs[row].index_put_((q[row][:, None], k[row][None]), seen[row].int(), accumulate=True)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tiles_hold_each_pair_once(size: int, causal: bool, rows: str) -> None:
    num_real, borders, real = ROWS[rows]
    for window in WINDOWS:
        pattern = Pattern(causal, window)
        ring, gathered = (torch.zeros(B, S, S, dtype=torch.int32) for _ in range(2))
        for rank in range(size):
            layout = SequenceLayout(S, num_real, size, rank, borders, real_lengths=real)
            tiling, own = Tiling(layout, pattern, CPU), layout.own_index(CPU)
            for source in range(size):
                for tile in tiling.ring(source):
                    count(ring, tile, own, layout.index(source, CPU))
            for tile in tiling.gathered():
                count(gathered, tile, own, torch.arange(S)[None])
        expected = wanted(pattern, layout).int()
        compared = is_real(layout)[:, :, None] | pattern.causal
        for name, found in (("ring", ring), ("gathered", gathered)):
            assert torch.equal(found * compared, expected * compared), f"{name}, {pattern}"
            assert bool((found <= expected).all()), f"{name}, {pattern}: padding sees what is real, or twice"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_first_tile_of_a_query_shows_it_a_key(causal: bool, rows: str) -> None:
    """What is merged begins with a finite log-sum-exp."""
    num_real, borders, real = ROWS[rows]
    for window in WINDOWS:
        for rank in range(4):
            layout = SequenceLayout(S, num_real, 4, rank, borders, real_lengths=real)
            tiling = Tiling(layout, Pattern(causal, window), CPU)
            met = torch.zeros(B, S // 4, dtype=torch.bool)
            for tile in tiling.ring(rank):
                q = places(torch.arange(S // 4)[None], tile.q)
                num_k = num_places(tile.k, torch.empty(S // 4))
                mask = tile.mask(q.shape[1], num_k, num_rows=B, device=CPU)
                sees = torch.ones_like(q, dtype=torch.bool) if mask is None else mask.any(dim=2).expand(B, -1)
                assert bool((sees | met.gather(1, q)).all())
                met = met.scatter(1, q, sees | met.gather(1, q))
            assert bool(met.all())


def test_a_window_over_a_ring_leaves_out_tiles_that_it_does_not_reach() -> None:
    for source in range(8):
        tiles = Tiling(SequenceLayout(S, S, 8, 3), Pattern(window=3), CPU).ring(source)
        assert [tile.form for tile in tiles] == (["band"] * 2 if source == 3 else ["band"] if source in (2, 4) else [])


def test_a_window_as_long_as_the_longest_document_is_none() -> None:
    layout = SequenceLayout(S, S, 2, 0, PACKED, max_document=32)
    assert [tile.form for tile in Tiling(layout, Pattern(window=32), CPU).ring(0)] == ["causal"]
    assert "band" in [tile.form for tile in Tiling(layout, Pattern(window=31), CPU).ring(0)]


def test_the_band_of_two_runs_holds_the_pairs_of_the_window_and_only_rows_that_see_something() -> None:
    generator = random.Random(0)
    for _ in range(300):
        queries, keys = (Run(generator.randint(0, 9), generator.randint(0, 30), generator.randint(1, 12)) for _ in range(2))
        left, right = generator.randint(0, 40), generator.choice([0, 0, 3, 40])
        tile = band(queries, keys, left=left, right=right)
        near = [
            (i, j)
            for i in range(queries.length)
            for j in range(keys.length)
            if -right <= queries.start + i - keys.start - j <= left
        ]
        if tile is None:
            assert not near
            continue
        assert isinstance(tile.q, slice)
        assert isinstance(tile.k, slice)
        num_q, num_k = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
        mask = tile.mask(num_q, num_k, num_rows=1, device=CPU)
        mask = torch.ones(1, num_q, num_k, dtype=torch.bool) if mask is None else mask
        first_q, first_k = tile.q.start - queries.place, tile.k.start - keys.place
        assert [(first_q + i, first_k + j) for _, i, j in mask.nonzero().tolist()] == near
        assert bool(mask.any(dim=2).all())
        assert bool(mask.any(dim=1).all())
