"""Pack documents of any length into rows of one length, so that no attention reaches from one into another.

Note [Padded documents]
Under context parallelism each document is cut into ``2 * cp`` chunks, so its length is padded to a multiple of that. Padding
stands at a document's end, where causal attention lets no real token see it; attention without a causal mask tells it apart by
``real_lengths``. Its labels do not count. So the loss is that of the documents one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.context_parallel.dynamic import Cost, PlannedMicroBatch, plan_step, waves
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
      is documents of padding, none longer than the longest other; rows with fewer documents repeat S;
    - ``max_seqlen``: length of the longest document, an int;
    - ``real_lengths``: int32 ``[R, n + 1]``, tokens of the document that begins at each border, without padding.

    R is as many rows as the documents need (no document is left out), unless ``num_rows`` says how many.

    Args:
        seq_len: S.
        multiple_of: what each document is padded to a multiple of: ``2 * cp``; see Note [Padded documents]. S must be one.
        num_rows: rows of each batch; those that documents do not fill are padding.
        pad_token: token that stands at padding.

    Raises:
        ValueError: S is no multiple of ``multiple_of``; in a call: a document is longer than S or has another number of labels
            than tokens, or documents need more rows.
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
        longest = max(sizes, default=self.seq_len)
        held = [self._filled([sizes[i] for i in row], longest) for row in rows]
        num_borders = -(-(max(map(len, held)) + 1) // 8) * 8
        return {
            "tokens": torch.stack([self._row([tokens[i] for i in row], self.pad_token) for row in rows]),
            "labels": torch.stack([self._row([labels[i] for i in row], IGNORE_INDEX) for row in rows]),
            "cu_seqlens": torch.stack([self._borders(row, num_borders) for row in held]),
            "max_seqlen": longest,
            "real_lengths": torch.stack([self._real([len(tokens[i]) for i in row], num_borders) for row in rows]),
        }

    @staticmethod
    def _labels(document: Tensor | Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        given = document.get("labels") if isinstance(document, Mapping) else None
        if given is None:
            return F.pad(tokens[1:], (0, 1), value=IGNORE_INDEX)
        if len(given) != len(tokens):
            raise ValueError(
                f"a document has {len(tokens)} tokens and {len(given)} labels: give one each, labels[t] what token t is to "
                f"predict (-100 for nothing, as at the last)."
            )
        return given

    def _filled(self, sizes: list[int], longest: int) -> list[int]:
        """Lengths of a row's documents, and of those of padding: as one they might be longer than a model takes."""
        rest = self.seq_len - sum(sizes)
        return [*sizes, *[longest] * (rest // longest), *([rest % longest] if rest % longest else [])]

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

    @staticmethod
    def _real(lengths: list[int], number: int) -> Tensor:
        return F.pad(torch.tensor(lengths, dtype=torch.int32), (0, number - len(lengths)))


class DynamicPackingCollator:
    """A collate function under context parallelism that cuts each document over as few ranks as it needs.

    Cutting a document costs an exchange of its keys and values; a short one is cut into slivers for nothing. So each gets the
    smallest block of neighbouring ranks that holds it (1, 2, 4, ... of the cp ranks), documents are packed together for each
    block, and blocks are chosen so that ranks have about as much to do; see ``context_parallel.dynamic``. A rank holds
    ``seq_len / cp`` tokens at most. Losses are those of the documents one by one.

    The batch is a ``MicroBatches``, the longest documents first. Each micro-batch is a single row ``[1, S']`` as
    ``PackingCollator`` makes it, of S' up to S, in which the parts of the blocks lie end to end, with

    - ``cp_blocks``: pairs (ranks, tokens), which blocks those are.

    Give the strategy no size of micro-batches that would contradict it.

    With ``num_replicas`` the plan is one for all dp x cp ranks, and so balances replicas, too: each then gets the documents
    of all (``Trainer(use_distributed_sampler=False)`` and the same order everywhere) and makes a batch of its share.

    Args:
        seq_len: S, the longest document, and what cp ranks hold together; a multiple of ``2 * cp`` times cp.
        cp: context-parallel ranks.
        pad_token: token that stands at padding.
        cost: what balances ranks: time of a token and of a query-key pair; by default ``Cost()``.
        round_to: a rank's tokens in a micro-batch are rounded up to a multiple of this (up to ``S / cp``), so that few
            shapes come up.
        num_replicas, replica: data-parallel replicas that plan together, and which of them this is:
            ``strategy.distributed_sampler_kwargs`` says, as ``num_replicas`` and ``rank``.

    Raises:
        ValueError: S does not divide, or ``round_to`` is odd; in a call: a document is longer than S.
    """

    def __init__(
        self,
        seq_len: int,
        cp: int,
        *,
        pad_token: int = 0,
        cost: Cost | None = None,
        round_to: int = 128,
        num_replicas: int = 1,
        replica: int = 0,
    ) -> None:
        if cp < 1 or seq_len % (2 * cp * cp):
            raise ValueError(
                f"seq_len={seq_len} does not divide by 2 * cp * cp = {2 * cp * cp}: rows are cut into 2 * cp chunks, and a "
                f"rank's share, a row of its own, into as many. Choose a multiple."
            )
        if round_to < 2 or round_to % 2:
            raise ValueError(f"round_to={round_to}: give an even number of tokens; a rank holds two chunks of a document.")
        self.cp, self._share, self._cost, self._round_to = cp, seq_len // cp, cost or Cost(), round_to
        self._pad_token, self._num_replicas, self._replica = pad_token, num_replicas, replica

    def plan(self, lengths: Sequence[int]) -> list[list[PlannedMicroBatch]]:
        """Which documents run together and where, micro-batch by micro-batch; see ``context_parallel.dynamic.waves``."""
        padded = [length + -length % (2 * self.cp) for length in lengths]
        num_ranks = self.cp * self._num_replicas
        limits = {"tokens_per_rank": self._share, "max_degree": self.cp}
        return waves(plan_step(padded, num_ranks=num_ranks, cost=self._cost, **limits), num_ranks)

    def __call__(self, documents: Sequence[Tensor | Mapping[str, Tensor]]) -> MicroBatches:
        """Pack one batch; see the class."""
        lengths = [len(document["tokens"] if isinstance(document, Mapping) else document) for document in documents]
        first = self.cp * self._replica
        own = [[block for block in wave if first <= block.first_rank < first + self.cp] for wave in self.plan(lengths)]
        return MicroBatches([self._row(blocks, documents, lengths) for blocks in own])

    def _row(
        self, wave: list[PlannedMicroBatch], documents: Sequence[Tensor | Mapping[str, Tensor]], lengths: list[int]
    ) -> dict[str, Any]:
        parts, blocks, start = [], [], 0
        for block in wave:
            multiple = 2 * block.degree if block.degree > 1 else 1
            held = sum(lengths[i] + -lengths[i] % multiple for i in block.documents)
            unit = self._round_to * block.degree
            size = min(max(held, 1) + -max(held, 1) % unit, self._share * block.degree)
            packed = PackingCollator(size, multiple_of=multiple, num_rows=1, pad_token=self._pad_token)(
                [documents[i] for i in block.documents]
            )
            parts.append({**packed, "cu_seqlens": packed["cu_seqlens"] + start})
            blocks.append((block.degree, size))
            start += size
        names = ("tokens", "labels", "cu_seqlens", "real_lengths")
        row = {name: torch.cat([part[name] for part in parts], dim=1) for name in names}
        return {**row, "max_seqlen": max(part["max_seqlen"] for part in parts), "cp_blocks": blocks}
