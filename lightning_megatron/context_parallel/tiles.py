"""Which queries meet which keys: attention over a cut sequence as a few tiles, each of a form that a fused kernel knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.context_parallel.parts import WHOLE, Part, take


@dataclass(frozen=True)
class Pattern:
    """Which tokens of a document a query sees.

    Args:
        causal: itself and those before it; otherwise all.
        window: only those fewer than this many tokens away (itself included); ``None`` for any distance.
    """

    causal: bool = True
    window: int | None = None


@dataclass(frozen=True)
class Lengths:
    """Documents of a tile with its rows laid end to end: int32 borders ``[B * (n + 1)]`` and the longest, for q and k."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class Tile:
    """Some of the queries against some of the keys that a rank has at hand.

    Args:
        q, k: the parts of the tensors at hand.
        form: ``full``: all pairs of a document; ``causal``: those on or below the diagonal that ends in the lower right
            corner of each document's block, no further from it than ``window``; ``masked``: only ``mask()`` tells.
        mask: makes the mask of pairs, bool ``[1 or B, n_q, n_k]``, or ``None`` where all are in. Any form has it.
        window: of form ``causal``.
        lengths: documents, where rows are packed.
    """

    q: Part
    k: Part
    form: Literal["full", "causal", "masked"]
    mask: Callable[[], Tensor | None]
    window: int | None = None
    lengths: Lengths | None = None


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

    def ring(self, source: int) -> Tile:
        """This rank's queries against keys of rank ``source``: about half of all pairs, and never more than half a block.

        With keys of an earlier rank all queries meet the keys' earlier chunks; with those of a later rank the later
        chunks of queries meet all keys; see layout: Note [Zig-zag].
        """
        layout, rank = self.layout, self.layout.rank
        own, theirs = self._index(rank), self._index(source)
        if not self.pattern.causal or layout.size == 1:
            return self._tile(WHOLE, WHOLE, own, theirs, is_diagonal=layout.size == 1, scales=(2, 2))
        if source == rank:
            whole = self.pattern.window is None  # the two chunks are not neighbours: no window fits a kernel
            return self._tile(WHOLE, WHOLE, own, theirs, is_diagonal=True, scales=(2, 2), is_exact=whole)
        if source < rank:
            return self._tile(WHOLE, self._half(0), own, theirs, is_diagonal=False, scales=(2, 1))
        return self._tile(self._half(1), WHOLE, own, theirs, is_diagonal=False, scales=(1, 2))

    def gathered(self) -> list[Tile]:
        """This rank's queries against all keys in natural order: each half of the queries meets the keys up to its end."""
        layout, rank = self.layout, self.layout.rank
        every = torch.arange(layout.length, device=self.device)[None]
        own = self._index(rank)
        if not self.pattern.causal or layout.size == 1:
            return [self._tile(WHOLE, WHOLE, own, every, is_diagonal=layout.size == 1, scales=(2, 2 * layout.size))]
        tiles = []
        for which, num_chunks in ((0, rank + 1), (1, 2 * layout.size - rank)):
            keys = self._prefix(num_chunks)
            tiles.append(self._tile(self._half(which), keys, own, every, is_diagonal=True, scales=(1, num_chunks)))
        return tiles

    def _tile(
        self,
        q: Part,
        k: Part,
        q_index: Tensor,
        k_index: Tensor,
        *,
        is_diagonal: bool,
        scales: tuple[int, int],
        is_exact: bool = True,
    ) -> Tile:
        """``scales``: how many chunks of each document the queries and the keys of the tile are."""
        causal, window = self.pattern.causal, self.pattern.window
        is_padded = self.layout.cu_seqlens is None and self.layout.num_real < self.layout.length
        if is_diagonal and causal:
            form: Literal["full", "causal", "masked"] = "causal" if is_exact else "masked"
        else:
            form = "full" if window is None and (causal or not is_padded) else "masked"

        def mask() -> Tensor | None:
            return self._mask(take(q_index.t(), q).t(), take(k_index.t(), k).t())

        if not isinstance(q, slice) or not isinstance(k, slice):
            assert self.layout.cu_seqlens is not None
        return Tile(q, k, form, mask, window, self._lengths(*scales))

    def _mask(self, q_index: Tensor, k_index: Tensor) -> Tensor | None:
        distance = q_index[:, :, None] - k_index[:, None, :]
        allowed = distance >= 0 if self.pattern.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.pattern.window is not None:
            allowed = allowed & (distance.abs() < self.pattern.window)
        q_documents, k_documents = self.layout.documents(q_index), self.layout.documents(k_index)
        if q_documents is not None and k_documents is not None:
            allowed = allowed & (q_documents[:, :, None] == k_documents[:, None, :])
        return allowed

    def _index(self, rank: int) -> Tensor:
        return self._cached(("index", rank), lambda: self.layout.index(rank, self.device))

    def _half(self, which: int) -> Part:
        if self.layout.cu_seqlens is None:
            size = self.layout.local_length // 2
            return slice(which * size, (which + 1) * size)
        return self._cached(("half", which), lambda: self.layout.half(which, self.device))

    def _prefix(self, num_chunks: int) -> Part:
        layout = self.layout
        if layout.cu_seqlens is not None:
            return self._cached(("prefix", num_chunks), lambda: layout.prefix(num_chunks, self.device))
        chunk = layout.length // (2 * layout.size)
        stop = num_chunks * chunk
        # The window of the first query of the last chunk reaches no further back.
        start = 0 if self.pattern.window is None else max(0, stop - chunk - self.pattern.window + 1)
        return slice(start, stop)

    def _lengths(self, q_scale: int, k_scale: int) -> Lengths | None:
        layout = self.layout
        if layout.cu_seqlens is None:
            return None
        parts = 2 * layout.size

        def borders(scale: int) -> Tensor:
            return self._cached(("borders", scale), lambda: _end_to_end(layout, scale, parts))

        # Kernels turn a single query around, with another form of result; one more is as good a bound.
        max_q, max_k = (max(2, -(-layout.longest * scale // parts)) for scale in (q_scale, k_scale))
        return Lengths(borders(q_scale), borders(k_scale), max_q, max_k)

    def _cached(self, key: tuple[str, int], make: Callable[[], Tensor]) -> Tensor:
        cache, full_key = self.layout.cache, (self.layout.size, *key)
        if full_key not in cache:
            cache[full_key] = make()
        return cache[full_key]


def _end_to_end(layout: SequenceLayout, numerator: int, denominator: int) -> Tensor:
    """Borders of rows laid end to end, each document ``numerator / denominator`` as long: int32 ``[B * (n + 1)]``."""
    assert layout.cu_seqlens is not None
    small = layout.cu_seqlens * numerator // denominator
    row = layout.length * numerator // denominator
    starts = torch.arange(len(small), device=small.device)[:, None] * row
    return (small + starts).flatten().int()
