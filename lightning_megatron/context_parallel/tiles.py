"""Tiles of attention: some queries against some keys, in a form that a fused kernel knows.

Note [Bands]
Fused kernels know blocks of pairs that are bounded by two diagonals: a query sees keys from ``left`` places before to
``right`` places after the diagonal that ends in the block's lower right corner. Where rows hold several documents, each has
a block of its own, and the numbers are the same for all. Any window over any runs of tokens is such a band, with numbers
that tell how far apart the runs are (``band``). The chunks of packed documents lie apart by another distance in each
document; there the block's lower right corner is moved instead (``upper_corner``, ``lower_corner``), and what is outside of
the block, all of it seen or none of it, goes to a second tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.context_parallel.parts import Part


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
    """Blocks of a tile with its rows laid end to end: int32 borders and the longest, or an upper bound, for q and k."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True)
class Tile:
    """Some of the queries against some of the keys that a rank has at hand. See Note [Bands].

    Args:
        q, k: the parts of the tensors at hand.
        left, right: how far a query sees before and after the diagonal, 0 or more; ``None``: any distance.
        lengths: blocks, where rows hold several; otherwise each row is one.
    """

    q: Part
    k: Part
    left: int | None = None
    right: int | None = None
    lengths: Lengths | None = None

    @property
    def form(self) -> Literal["full", "causal", "band"]:
        """``full``: all pairs of a block; ``causal``: those on or below the diagonal; ``band``: by ``left`` and ``right``."""
        if self.left is not None or self.right not in (None, 0):
            return "band"
        return "full" if self.right is None else "causal"

    def mask(
        self, num_q: int, num_k: int, *, num_rows: int, device: torch.device, queries: slice = slice(None)
    ) -> Tensor | None:
        """Pairs that are in, bool ``[1 or num_rows, num_q, num_k]``; ``None`` where all are. Of some ``queries`` only."""
        if self.lengths is None and self.form == "full":
            return None
        rows = 1 if self.lengths is None else num_rows
        of_q = self._blocks(num_q, rows, None if self.lengths is None else self.lengths.cu_q, device)
        q_block, q_left = (numbers[:, queries] for numbers in of_q)
        k_block, k_left = self._blocks(num_k, rows, None if self.lengths is None else self.lengths.cu_k, device)
        # A key stands as far before the diagonal as it has more tokens left. A number for each pair would be 8 masks.
        allowed = q_block[:, :, None] == k_block[:, None, :]
        if self.left is not None:
            allowed &= k_left[:, None, :] <= (q_left + self.left)[:, :, None]
        if self.right is not None:
            allowed &= k_left[:, None, :] >= (q_left - self.right)[:, :, None]
        return allowed

    @staticmethod
    def _blocks(number: int, rows: int, borders: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Each token's block, and how many tokens of the block are left from it on: ``[rows, number]``."""
        places = torch.arange(rows * number, device=device)
        stops = (torch.arange(rows, device=device) + 1) * number if borders is None else borders[1:].long()
        block = torch.searchsorted(stops, places, right=True)
        return block.view(rows, number), (stops[block] - places).view(rows, number)


class Run(NamedTuple):
    """Tokens that follow one another: from ``place`` among those at hand, from ``start`` in their natural order."""

    place: int
    start: int
    length: int

    def split(self, border: int) -> list[Run]:
        """In two at a natural index, if it is inside."""
        first = min(max(border - self.start, 0), self.length)
        parts = (Run(self.place, self.start, first), Run(self.place + first, self.start + first, self.length - first))
        return [part for part in parts if part.length]


def band(queries: Run, keys: Run, *, left: int, right: int) -> Tile | None:
    """The tile of two runs where a query sees keys from ``left`` tokens before to ``right`` after it; ``None``: no pair."""
    q_stop = min(queries.start + queries.length, keys.start + keys.length + left)
    q_start = max(queries.start, keys.start - right)
    k_stop = min(keys.start + keys.length, q_stop + right)
    k_start = max(keys.start, q_start - left)
    if q_start >= q_stop or k_start >= k_stop:
        return None
    before, after = left + k_stop - q_stop, right - k_stop + q_stop
    return Tile(
        slice(queries.place + q_start - queries.start, queries.place + q_stop - queries.start),
        slice(keys.place + k_start - keys.start, keys.place + k_stop - keys.start),
        None if before >= k_stop - k_start - 1 else before,
        None if after >= q_stop - q_start - 1 else after,
    )


class Corner(NamedTuple):
    """Block by block: lengths of queries and keys up to a corner, and those (queries, keys) of which all pairs are in.

    The latter stand at the end of the block's queries or keys. int64 ``[B, n]``.
    """

    q: Tensor
    k: Tensor
    full_q: Tensor
    full_k: Tensor


def upper_corner(num_q: Tensor, num_k: Tensor, shift: Tensor) -> Corner:
    """Query i sees keys j >= i + shift: by ``left = 0`` up to the corner; keys after it are seen by all queries."""
    q, k = torch.minimum(num_q, num_k - shift).clamp(min=0), torch.minimum(num_k, num_q + shift).clamp(min=0)
    return Corner(q, k, num_q, num_k - k)


def lower_corner(num_q: Tensor, num_k: Tensor, shift: Tensor) -> Corner:
    """Query i sees keys j <= i - shift: by ``right = 0`` up to the corner; queries after it see all keys."""
    q = torch.minimum(num_q, num_k + shift).clamp(min=0)
    return Corner(q, (torch.minimum(num_q, num_k + shift) - shift).clamp(min=0), num_q - q, num_k)


def end_to_end(parts: list[Tensor]) -> Tensor:
    """Borders of rows laid end to end, m parts of each document, of lengths ``[B, n]``: int32 ``[B * n * m + 1]``."""
    flat = torch.stack(parts, dim=2).flatten()
    return torch.nn.functional.pad(flat.cumsum(0), (1, 0)).int()
