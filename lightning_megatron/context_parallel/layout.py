"""How sequences lie over context-parallel ranks. Index arithmetic alone: no rank is asked for anything.

Note [Zig-zag]
Under a causal mask a later token attends to more keys, so a plain cut would leave the first rank idle. Each document (a
whole row, where nothing is packed) is cut into ``2 * size`` chunks; rank r holds chunks r and ``2 * size - 1 - r``, in this
order, document by document. Every rank then attends to equally many pairs, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Where each token of a micro-batch is. Indexes count tokens of a row ``[S]`` in their natural order.

    Args:
        length: S, tokens of a row with all padding.
        num_real: tokens of a row as the batch had it; those after it were added to make the length divide.
        size: ranks that share the row.
        rank: which of them this is.
        cu_seqlens: int64 ``[B, n + 1]``, borders of the documents in each row, from 0 to S; repeated borders are empty
            documents. ``None``: each row is one document.
        max_document: length of the longest document, or an upper bound.
        blocks: where neighbouring ranks share a part of a wider row, the number of ranks and the tokens of each such part, in
            order; all of the above then says how this rank's part lies.
        real_lengths: int64 ``[B, n]``, tokens of each document before the padding that ends it. ``None``: all of them.
    """

    length: int
    num_real: int
    size: int = 1
    rank: int = 0
    cu_seqlens: Tensor | None = None
    max_document: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    real_lengths: Tensor | None = None

    @property
    def local_length(self) -> int:
        """Tokens of a row on one rank: ``S / size``."""
        return self.length // self.size

    @property
    def longest(self) -> int:
        """An upper bound of the length of a document."""
        return self.length if self.max_document is None else min(self.max_document, self.length)

    def over(self, size: int, rank: int) -> SequenceLayout:
        """The same rows over another number of ranks."""
        if (size, rank) not in self._others:
            self._others[size, rank] = replace(self, size=size, rank=rank)
        return self._others[size, rank]

    @cached_property
    def _others(self) -> dict[tuple[int, int], SequenceLayout]:
        return {}

    def borders(self, device: torch.device) -> Tensor:
        """``cu_seqlens``, made up where each row is one document: int64 ``[1 or B, n + 1]``."""
        return torch.arange(2, device=device)[None] * self.length if self.cu_seqlens is None else self.cu_seqlens

    def index(self, rank: int, device: torch.device) -> Tensor:
        """Natural indexes of the tokens that a rank holds, in the order it holds them: ``[1 or B, S / size]``."""
        if self.size == 1:
            return torch.arange(self.length, device=device)[None]
        borders = self.borders(device)
        document, offset = scaled(borders, self.length, 1, self.size)
        start, chunk = _starts(borders, document), _chunks(borders, document, 2 * self.size)
        late = offset >= chunk
        return start + torch.where(late, (2 * self.size - 2 - rank) * chunk + offset, rank * chunk + offset)

    def own_index(self, device: torch.device) -> Tensor:
        """``index`` of this rank."""
        return self.index(self.rank, device)

    def half(self, which: int, device: torch.device) -> Tensor:
        """Places, among a rank's tokens, of its earlier (0) or later (1) chunks: ``[1 or B, S / (2 * size)]``."""
        borders = self.borders(device)
        document, offset = scaled(borders, self.length, 1, 2 * self.size)
        start = _starts(borders, document) // self.size
        return start + offset + which * _chunks(borders, document, 2 * self.size)

    def chunks(self, first: int, number: int, device: torch.device) -> Tensor:
        """Natural indexes of ``number`` chunks of every document from ``first`` on: ``[1 or B, S * number / (2 * size)]``."""
        borders = self.borders(device)
        document, offset = scaled(borders, self.length, number, 2 * self.size)
        return _starts(borders, document) + first * _chunks(borders, document, 2 * self.size) + offset

    def gathered(self, inner: int, device: torch.device) -> Tensor:
        """From the tokens of ``inner`` neighbouring ranks, one after the other, to one rank's of ``size / inner``.

        Entry t is the place, in that row of ``inner * S / size`` tokens, of the t-th token as ``over(size / inner, ..)``
        has it: in the natural order where ``inner`` is ``size``. ``[1 or B, inner * S / size]``.
        """
        borders = self.borders(device)
        document, offset = scaled(borders, self.length, inner, self.size)
        chunk = _chunks(borders, document, 2 * self.size).clamp(min=1)
        number, within = offset // chunk, offset % chunk
        late = number >= inner
        rank = torch.where(late, 2 * inner - 1 - number, number)
        return rank * self.local_length + _starts(borders, document) // self.size + late * chunk + within

    def positions(self, index: Tensor) -> Tensor:
        """Position of each natural index in its document: ``[1 or B, n]``, same shape out (B rows where packed)."""
        if self.cu_seqlens is None:
            return index
        return index - _starts(self.cu_seqlens, document_of(self.cu_seqlens, index))

    @cached_property
    def cache(self) -> dict[object, Any]:
        """Index tensors and tiles that all layers of a micro-batch use, by what they are."""
        return {}


def end_borders(cu_seqlens: Tensor, num_rows: int, length: int) -> Tensor:
    """``cu_seqlens`` as a layout takes it: int64 ``[B, n + 1]``, the last border at S.

    What comes after the last given border is a document of its own.

    Raises:
        ValueError: the shape does not fit the rows.
    """
    borders = cu_seqlens[None] if cu_seqlens.dim() == 1 and num_rows == 1 else cu_seqlens
    if borders.dim() != 2 or borders.shape[0] != num_rows:
        raise ValueError(
            f"cu_seqlens have shape {tuple(cu_seqlens.shape)} for {num_rows} rows of {length} tokens; give the borders of "
            f"each row, [B, n + 1] from 0 to S, repeating S where a row has fewer documents."
        )
    return torch.nn.functional.pad(borders.long(), (0, 1), value=length)


def scaled(borders: Tensor, length: int, numerator: int, denominator: int) -> tuple[Tensor, Tensor]:
    """For rows whose documents are all ``numerator / denominator`` as long: each token's document, and its offset there."""
    small = borders * numerator // denominator
    tokens = torch.arange(length * numerator // denominator, device=borders.device).expand(len(borders), -1)
    document = document_of(small, tokens)
    return document, tokens - _starts(small, document)


def document_of(borders: Tensor, index: Tensor) -> Tensor:
    """Number of the document of each index: borders ``[B, n + 1]``, index ``[1 or B, m]``, to ``[B, m]``."""
    inner = borders[:, 1:].contiguous()
    return torch.searchsorted(inner, index.expand(len(borders), -1).contiguous(), right=True).clamp_(max=inner.shape[1] - 1)


def _starts(borders: Tensor, document: Tensor) -> Tensor:
    return borders.gather(1, document)


def _chunks(borders: Tensor, document: Tensor, num_chunks: int) -> Tensor:
    return borders.diff(dim=1).gather(1, document) // num_chunks


def inverse(index: Tensor) -> Tensor:
    """The permutation that undoes a permutation, row by row: ``[B, n] -> [B, n]``."""
    places = torch.arange(index.shape[1], device=index.device).expand_as(index)
    return torch.empty_like(index).scatter_(1, index, places)
