"""Which queries meet which keys: attention over a cut sequence as a few tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.parts import WHOLE, Part
from lightning_megatron.context_parallel.tiles import (
    Lengths,
    Pattern,
    Run,
    Tile,
    band,
    end_to_end,
    lower_corner,
    upper_corner,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Tiling:
    """Makes the tiles of one micro-batch under one pattern.

    Args:
        layout: over the ranks that exchange keys and values.
        pattern: what a query sees.
        device: where the tensors are.
    """

    layout: SequenceLayout
    pattern: Pattern
    device: torch.device

    @property
    def window(self) -> int | None:
        """That of the pattern, if a document is longer."""
        window = self.pattern.window
        return None if window is None or window >= self.layout.longest else window

    def ring(self, source: int) -> list[Tile]:
        """This rank's queries against keys of rank ``source``: about half of all pairs, and never more than half a block.

        With keys of an earlier rank all queries meet the keys' earlier chunks; with those of a later rank the later
        chunks of queries meet all keys; see layout: Note [Zig-zag]. With own keys, the first tile of a query shows it a key.
        """
        return self._cached(("ring", source, self.pattern), lambda: self._ring(source))

    def gathered(self) -> list[Tile]:
        """This rank's queries against all keys in natural order: each half of the queries meets the keys up to its end."""
        return self._cached(("gathered", self.layout.rank, self.pattern), self._gathered)

    def _ring(self, source: int) -> list[Tile]:
        layout, rank = self.layout, self.layout.rank
        if self.window is not None or not self.pattern.causal or layout.size == 1:
            return self._packed_ring(source) if self._is_packed else self._runs(self._own_runs(rank), self._own_runs(source))
        if source == rank:
            return [self._tile(WHOLE, WHOLE, scales=(2, 2), right=0)]
        if source < rank:
            return [self._tile(WHOLE, self._half(0), scales=(2, 1))]
        return [self._tile(self._half(1), WHOLE, scales=(1, 2))]

    def _gathered(self) -> list[Tile]:
        layout = self.layout
        if not self._is_packed:
            return self._runs(self._own_runs(layout.rank), self._split([Run(0, 0, layout.length)]))
        near = None if self.window is None else self.window - 1
        right = 0 if self.pattern.causal else near
        if layout.size == 1 or right is None:
            return [self._tile(WHOLE, WHOLE, scales=(2, 2 * layout.size), left=near, right=right)]
        tiles = []
        for which, chunk in enumerate(self._chunks(layout.rank)):
            keys = self._chunks_of(0, chunk + 1)
            tiles.append(self._tile(self._half(which), keys, scales=(1, chunk + 1), left=near, right=right))
            rest = 2 * layout.size - 1 - chunk
            if right and rest:
                tiles += self._cornered(self._half(which), self._chunks_of(chunk + 1, rest), -1, num_chunks=rest)
        return tiles

    @property
    def _is_packed(self) -> bool:
        return self.layout.cu_seqlens is not None

    # Whole rows: runs of tokens.

    def _own_runs(self, rank: int) -> list[Run]:
        if self.layout.size == 1:
            return self._split([Run(0, 0, self.layout.length)])
        size = self.layout.local_length // 2
        return self._split([Run(which * size, chunk * size, size) for which, chunk in enumerate(self._chunks(rank))])

    def _split(self, runs: list[Run]) -> list[Run]:
        """Real tokens apart from padding, which only a causal mask keeps them from seeing."""
        return runs if self.pattern.causal else [part for run in runs for part in run.split(self.layout.num_real)]

    def _runs(self, queries: list[Run], keys: list[Run]) -> list[Tile]:
        if self.window is None and not self.pattern.causal:
            return self._documents(queries, keys)
        far = self.layout.length
        left = far if self.window is None else self.window - 1
        right = 0 if self.pattern.causal else left
        # A run with itself first: there each query sees a key.
        pairs = sorted(((q, k) for q in queries for k in keys), key=lambda pair: pair[0].start != pair[1].start)
        tiles = [band(q, k, left=left, right=right) for q, k in pairs if self._is_padding(q) == self._is_padding(k)]
        return [tile for tile in tiles if tile is not None]

    def _documents(self, queries: list[Run], keys: list[Run]) -> list[Tile]:
        """All real tokens see each other, wherever they are; and so does padding."""
        if self.layout.num_real == self.layout.length:
            return [Tile(WHOLE, WHOLE)]
        tiles = []
        for is_padding in (False, True):
            spans = [[run for run in runs if self._is_padding(run) is is_padding] for runs in (queries, keys)]
            if all(spans):
                q, k = (slice(runs[0].place, runs[-1].place + runs[-1].length) for runs in spans)
                tiles.append(Tile(q, k))
        return tiles

    def _is_padding(self, run: Run) -> bool:
        return not self.pattern.causal and run.start >= self.layout.num_real

    def _chunks(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.layout.size - 1 - rank

    # Packed rows: whole chunks of each document.

    def _packed_ring(self, source: int) -> list[Tile]:
        near = None if self.window is None else self.window - 1
        right = 0 if self.pattern.causal else near
        if near is None or self.layout.size == 1:
            return [self._tile(WHOLE, WHOLE, scales=(2, 2), left=near, right=right)]
        tiles = []
        if source == self.layout.rank:
            chunk = self._sizes() // (2 * self.layout.size)
            tiles.append(Tile(WHOLE, WHOLE, near, right, self._blocks([chunk, chunk], [chunk, chunk], 1)))
        for (which, own), (other, theirs) in product(*(enumerate(self._chunks(rank)) for rank in (self.layout.rank, source))):
            if own > theirs or (own < theirs and not self.pattern.causal):
                tiles += self._cornered(self._half(which), self._half(other), own - theirs)
        return tiles

    def _cornered(self, q: Part, k: Part, distance: int, *, num_chunks: int = 1) -> list[Tile]:
        """Chunks of queries that stand ``distance`` chunks after the first chunk of keys, in each document."""
        assert self.window is not None
        chunk, is_before = self._sizes() // (2 * self.layout.size), distance > 0
        corner = (upper_corner if is_before else lower_corner)(
            chunk, chunk * num_chunks, chunk * abs(distance) - self.window + 1
        )
        none, rest_q, rest_k = torch.zeros_like(chunk), chunk - corner.q, chunk * num_chunks - corner.k
        # What is on neither side of a corner gets a block without a partner.
        first = self._blocks([corner.q, rest_q, none], [corner.k, none, rest_k], num_chunks)
        second = self._blocks(
            [chunk - corner.full_q, corner.full_q], [chunk * num_chunks - corner.full_k, corner.full_k], num_chunks
        )
        return [Tile(q, k, 0 if is_before else None, None if is_before else 0, first), Tile(q, k, lengths=second)]

    def _blocks(self, q: list[Tensor], k: list[Tensor], num_chunks: int) -> Lengths:
        # Kernels bound a window by the longest keys: see block: Note [Windows of flash].
        longest = self._longest(num_chunks)
        return Lengths(end_to_end(q), end_to_end(k), longest, longest)

    def _tile(self, q: Part, k: Part, *, scales: tuple[int, int], left: int | None = None, right: int | None = None) -> Tile:
        """``scales``: how many chunks of each document the queries and the keys of the tile are."""
        if not self._is_packed:
            return Tile(q, k, left, right)
        borders = [self._borders(scale) for scale in scales]
        return Tile(q, k, left, right, Lengths(borders[0], borders[1], self._longest(scales[0]), self._longest(scales[1])))

    def _longest(self, scale: int) -> int:
        # Kernels turn a single query around, with another form of result; one more is as good a bound.
        return max(2, -(-self.layout.longest * scale // (2 * self.layout.size)))

    def _half(self, which: int) -> Part:
        if not self._is_packed:
            size = self.layout.local_length // 2
            return slice(which * size, (which + 1) * size)
        return self._cached(("half", which), lambda: self.layout.half(which, self.device))

    def _chunks_of(self, first: int, number: int) -> Part:
        return self._cached(("chunks", first, number), lambda: self.layout.chunks(first, number, self.device))

    def _borders(self, scale: int) -> Tensor:
        """Borders of documents of which ``scale`` chunks are there."""
        sizes = self._sizes()
        return self._cached(("borders", scale), lambda: end_to_end([sizes * scale // (2 * self.layout.size)]))

    def _sizes(self) -> Tensor:
        """Lengths of the documents, ``[B, n]``."""
        assert self.layout.cu_seqlens is not None
        return self.layout.cu_seqlens.diff(dim=1)

    def _cached(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        cache, full_key = self.layout.cache, (self.layout.size, self.device, *key)
        if full_key not in cache:
            cache[full_key] = make()
        found: T = cache[full_key]
        return found
