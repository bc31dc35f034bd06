"""Pack documents of any length into rows of one length, so that no attention reaches from one into another.

Note [Padded documents]
Under context parallelism each document is cut into ``2 * cp`` chunks, so its length is padded to a multiple of that. Padding
stands at a document's end, where causal attention lets no real token see it, and its labels do not count: the loss is that
of the documents one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel.balance import attention_pairs
from lightning_megatron.micro_batch import MicroBatches

IGNORE_INDEX = -100


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into as few bins as first-fit decreasing needs: at most 11/9 of the least number, and 1 (Dósa 2007).

    Args:
        lengths: sizes, each at least 1.
        capacity: size of a bin.

    Returns:
        Item numbers of each bin. Items of a bin are in the order in which they were given, and so are bins by first item.

    Raises:
        ValueError: an item is longer than a bin.
    """
    free: list[int] = []
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not 1 <= lengths[item] <= capacity:
            raise ValueError(
                f"document {item} has {lengths[item]} tokens, padding included, which do not fit 1 <= length <= {capacity}: "
                f"cut it before, or give longer rows."
            )
        place = next((i for i, left in enumerate(free) if left >= lengths[item]), len(free))
        if place == len(free):
            free.append(capacity)
            bins.append([])
        free[place] -= lengths[item]
        bins[place].append(item)
    return sorted(sorted(items) for items in bins)


class PackingCollator:
    """A collate function: documents to packed rows.

    A document is a tensor of tokens ``[n]``, or a dict with ``tokens`` and, optionally, ``labels`` ``[n]`` that are shifted
    already; without labels each token but the last of its document predicts the next. The batch is

    - ``tokens``, ``labels``: int64 ``[R, S]``, labels -100 at padding;
    - ``cu_seqlens``: int32 ``[R, n + 1]``, borders of the documents in each row, padding included; what is left of a row
      is a document of padding; rows with fewer documents repeat S;
    - ``max_seqlen``: length of the longest document, an int.

    R is as many rows as the documents need (no document is left out), unless ``num_rows`` says how many.

    Args:
        seq_len: S.
        multiple_of: what each document is padded to a multiple of: ``2 * cp``; see Note [Padded documents]. S must be one.
        num_rows: rows of each batch; those that documents do not fill are padding.
        pad_token: token that stands at padding.

    Raises:
        ValueError: S is no multiple of ``multiple_of``; in a call: a document is longer than S, or documents need more rows.
    """

    def __init__(self, seq_len: int, *, multiple_of: int = 1, num_rows: int | None = None, pad_token: int = 0) -> None:
        if seq_len < 1 or multiple_of < 1 or seq_len % multiple_of:
            raise ValueError(
                f"seq_len={seq_len} is no multiple of multiple_of={multiple_of}: documents are padded to multiples of it, and "
                f"what is left of a row must be one too."
            )
        self.seq_len, self.multiple_of, self.num_rows, self.pad_token = seq_len, multiple_of, num_rows, pad_token

    def __call__(self, documents: Sequence[Tensor | Mapping[str, Tensor]]) -> dict[str, Any]:
        """Pack one batch; see the class."""
        tokens = [document["tokens"] if isinstance(document, Mapping) else document for document in documents]
        labels = [self._labels(document, own) for document, own in zip(documents, tokens, strict=True)]
        sizes = [len(own) + -len(own) % self.multiple_of for own in tokens]
        rows = first_fit_decreasing(sizes, self.seq_len)
        if self.num_rows is not None:
            if len(rows) > self.num_rows:
                raise ValueError(
                    f"{len(documents)} documents of {sum(sizes)} tokens, padding included, need {len(rows)} rows of "
                    f"{self.seq_len}, but num_rows={self.num_rows}: give fewer documents a batch, or more rows."
                )
            rows += [[]] * (self.num_rows - len(rows))
        # Few different shapes: a pipeline exchanges the shapes of hidden states anew for each new shape of a batch.
        num_borders = -(-(max(len(row) for row in rows) + 1) // 8) * 8
        return {
            "tokens": torch.stack([self._row([tokens[i] for i in row], self.pad_token) for row in rows]),
            "labels": torch.stack([self._row([labels[i] for i in row], IGNORE_INDEX) for row in rows]),
            "cu_seqlens": torch.stack([self._borders([sizes[i] for i in row], num_borders) for row in rows]),
            "max_seqlen": max(max(sizes, default=1), max(self.seq_len - sum(sizes[i] for i in row) for row in rows)),
        }

    @staticmethod
    def _labels(document: Tensor | Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        given = document.get("labels") if isinstance(document, Mapping) else None
        return F.pad(tokens[1:], (0, 1), value=IGNORE_INDEX) if given is None else given

    def _row(self, parts: list[Tensor], fill: int) -> Tensor:
        row = torch.full((self.seq_len,), fill, dtype=torch.int64)
        start = 0
        for part in parts:
            row[start : start + len(part)] = part
            start += len(part) + -len(part) % self.multiple_of
        return row

    def _borders(self, sizes: list[int], number: int) -> Tensor:
        borders = torch.full((number,), self.seq_len, dtype=torch.int32)
        borders[: len(sizes) + 1] = torch.tensor([0, *sizes]).cumsum(0)
        return borders


class DynamicPackingCollator:
    """A collate function under context parallelism that cuts only the documents that are too long for one rank.

    Cutting a document costs an exchange of its keys and values; a short one is cut into slivers for nothing. So documents of
    up to ``seq_len / cp`` tokens are packed into rows of that length, ``cp`` rows a micro-batch, of which each rank gets one
    (``deal_rows``); longer ones are packed into rows of ``seq_len``, one a micro-batch, and cut. A rank holds ``seq_len / cp``
    tokens either way. Rows that are dealt together are those whose attention costs about the same, so that no rank waits
    long for another.

    The batch is a ``MicroBatches`` of what ``PackingCollator`` makes: give the strategy no size of micro-batches that would
    contradict it. The documents that are cut come first.

    Args:
        seq_len: S, tokens of a row that is cut; a multiple of ``2 * cp`` times cp.
        cp: context-parallel ranks.
        pad_token: token that stands at padding.

    Raises:
        ValueError: S does not divide; in a call: a document is longer than S.
    """

    def __init__(self, seq_len: int, cp: int, *, pad_token: int = 0) -> None:
        if cp < 1 or seq_len % (2 * cp * cp):
            raise ValueError(
                f"seq_len={seq_len} does not divide by 2 * cp * cp = {2 * cp * cp}: rows are cut into 2 * cp chunks, and a "
                f"rank's share, a row of its own, into as many. Choose a multiple."
            )
        self.cp, self._share = cp, seq_len // cp
        self._cut = PackingCollator(seq_len, multiple_of=2 * cp, pad_token=pad_token)
        self._whole = PackingCollator(self._share, pad_token=pad_token)

    def __call__(self, documents: Sequence[Tensor | Mapping[str, Tensor]]) -> MicroBatches:
        """Pack one batch; see the class."""
        lengths = [len(document["tokens"] if isinstance(document, Mapping) else document) for document in documents]
        long, short = (
            [d for d, n in zip(documents, lengths, strict=True) if (n > self._share) is is_long] for is_long in (True, False)
        )
        parts: list[dict[str, Any]] = []
        if long:
            packed = self._cut(long)
            parts += [self._rows(packed, [row]) for row in range(len(packed["tokens"]))]
        if short:
            packed = self._whole(short)
            costs = [sum(map(attention_pairs, borders)) for borders in packed["cu_seqlens"].diff(dim=1).tolist()]
            order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
            for start in range(0, len(order), self.cp):
                parts.append({**self._dealt(packed, order[start : start + self.cp]), "deal_rows": True})
        return MicroBatches(parts)

    def _dealt(self, packed: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        """One row for each rank; rows of padding where there are too few."""
        found = self._rows(packed, rows)
        missing = self.cp - len(rows)
        fill = {"tokens": self._whole.pad_token, "labels": IGNORE_INDEX, "cu_seqlens": self._share}
        for name, value in fill.items() if missing else ():
            found[name] = F.pad(found[name], (0, 0, 0, missing), value=value)
        found["cu_seqlens"][:, 0] = 0
        return {**found, "max_seqlen": self._share if missing else found["max_seqlen"]}

    @staticmethod
    def _rows(packed: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        return {name: value[rows] if isinstance(value, Tensor) else value for name, value in packed.items()}
