"""Which queries meet which keys: attention over a cut sequence as a few tiles.

Note [Padding of documents]
Packed documents end in padding. Only a causal mask keeps it from real tokens; without one, what is real of a document and its
padding are two blocks. Of any run of its chunks the real tokens come first, and a chunk before one that has any is all real;
so blocks of real tokens have the diagonals that whole chunks would have. Padding sees itself, and some of the other padding.
"""

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
Chunks = tuple[tuple[int, int], ...]
"""Runs of a document's ``2 * size`` chunks, one behind the other: (first, number) each."""


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
            return [self._tile(WHOLE, WHOLE, self._held(rank), self._held(rank), right=0)]
        if source < rank:
            return [self._tile(WHOLE, self._half(0), self._held(rank), self._held(source)[:1])]
        return [self._tile(self._half(1), WHOLE, self._held(rank)[1:], self._held(source))]

    def _gathered(self) -> list[Tile]:
        layout = self.layout
        if not self._is_packed:
            return self._runs(self._own_runs(layout.rank), self._split([Run(0, 0, layout.length)]))
        near = None if self.window is None else self.window - 1
        right = 0 if self.pattern.causal else near
        if layout.size == 1 or right is None:
            return [self._tile(WHOLE, WHOLE, self._held(layout.rank), ((0, 2 * layout.size),), left=near, right=right)]
        tiles = []
        for which, chunk in enumerate(self._chunks(layout.rank)):
            before, after = (0, chunk + 1), (chunk + 1, 2 * layout.size - 1 - chunk)
            keys = self._chunks_of(*before)
            tiles.append(self._tile(self._half(which), keys, ((chunk, 1),), (before,), left=near, right=right))
            if right and after[1]:
                tiles += self._cornered(self._half(which), self._chunks_of(*after), chunk, after)
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
        near, rank = None if self.window is None else self.window - 1, self.layout.rank
        right = 0 if self.pattern.causal else near
        if near is None or self.layout.size == 1:
            return [self._tile(WHOLE, WHOLE, self._held(rank), self._held(source), left=near, right=right)]
        tiles = []
        if source == rank:
            blocks = [part for chunk in self._chunks(rank) for part in self._parts(((chunk, 1),))]
            tiles.append(Tile(WHOLE, WHOLE, near, right, self._blocks(blocks, blocks, 1)))
        for (which, own), (other, theirs) in product(*(enumerate(self._chunks(ranks)) for ranks in (rank, source))):
            if own > theirs or (own < theirs and not self.pattern.causal):
                tiles += self._cornered(self._half(which), self._half(other), own, (theirs, 1))
        return tiles

    def _cornered(self, q: Part, k: Part, own: int, theirs: tuple[int, int]) -> list[Tile]:
        """A chunk of queries and a run of chunks of keys, all before or all after it, in each document."""
        assert self.window is not None
        chunk, is_before = self._sizes() // (2 * self.layout.size), own > theirs[0]
        (real_q, *padded_q), (real_k, *padded_k) = self._parts(((own, 1),)), self._parts((theirs,))
        corner = (upper_corner if is_before else lower_corner)(real_q, real_k, chunk * abs(own - theirs[0]) - self.window + 1)
        none = torch.zeros_like(chunk)
        # What is on neither side of a corner gets a block without a partner, and so does padding.
        alone_q, alone_k = [*padded_q, *[none] * len(padded_k)], [*[none] * len(padded_q), *padded_k]
        first = self._blocks(
            [corner.q, real_q - corner.q, none, *alone_q], [corner.k, none, real_k - corner.k, *alone_k], theirs[1]
        )
        second = self._blocks(
            [real_q - corner.full_q, corner.full_q, *alone_q], [real_k - corner.full_k, corner.full_k, *alone_k], theirs[1]
        )
        return [Tile(q, k, 0 if is_before else None, None if is_before else 0, first), Tile(q, k, lengths=second)]

    def _blocks(self, q: list[Tensor], k: list[Tensor], num_chunks: int) -> Lengths:
        # Kernels bound a window by the longest keys: see block: Note [Windows of flash].
        longest = self._longest(num_chunks)
        return Lengths(end_to_end(q), end_to_end(k), longest, longest)

    def _tile(
        self, q: Part, k: Part, q_chunks: Chunks, k_chunks: Chunks, *, left: int | None = None, right: int | None = None
    ) -> Tile:
        """Chunks say which of each document the queries and the keys of the tile are."""
        if not self._is_packed:
            return Tile(q, k, left, right)
        borders = [self._borders(chunks) for chunks in (q_chunks, k_chunks)]
        longest = [self._longest(_number(chunks)) for chunks in (q_chunks, k_chunks)]
        return Tile(q, k, left, right, Lengths(borders[0], borders[1], longest[0], longest[1]))

    def _held(self, rank: int) -> Chunks:
        """The chunks of each document on a rank."""
        if self.layout.size == 1:
            return ((0, 2),)  # of any length, so not two
        early, late = self._chunks(rank)
        return ((early, 1), (late, 1))

    @property
    def _tells_padding(self) -> bool:
        return not self.pattern.causal and self.layout.real_lengths is not None

    def _parts(self, chunks: Chunks) -> list[Tensor]:
        """Lengths of the blocks that chunks of each document are; see Note [Padding of documents]."""
        whole = self._sizes() * _number(chunks) // (2 * self.layout.size)
        if not self._tells_padding:
            return [whole]
        assert self.layout.real_lengths is not None
        chunk, real = self._sizes() // (2 * self.layout.size), torch.zeros_like(whole)
        for first, number in chunks:
            most = self._sizes() * number // (2 * self.layout.size)
            real += torch.minimum((self.layout.real_lengths - first * chunk).clamp(min=0), most)
        return [real, whole - real]

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

    def _borders(self, chunks: Chunks) -> Tensor:
        """Borders of the blocks where these chunks of each document are there."""
        key = chunks if self._tells_padding else _number(chunks)
        return self._cached(("borders", key), lambda: end_to_end(self._parts(chunks)))

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


def _number(chunks: Chunks) -> int:
    return sum(number for _, number in chunks)
