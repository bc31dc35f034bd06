"""How much attention each rank computes: counts of query-key pairs, which its time goes with. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def attention_pairs(length: int, *, causal: bool = True, window: int | None = None) -> int:
    """Query-key pairs of one document, each worth ``4 * heads * head_dim`` FLOPs forward."""
    if causal:
        return _pairs_before(length, window)
    reach = length if window is None else min(window, length)
    return length * (2 * reach - 1) - reach * (reach - 1) if window is not None else length * length


def zigzag_pairs(documents: Sequence[int], cp: int, *, window: int | None = None) -> list[int]:
    """Causal pairs that each rank computes when documents lie zig-zag (layout: Note [Zig-zag]).

    Args:
        documents: lengths, multiples of ``2 * cp``.
        cp: ranks.
        window: of the attention; ``None`` for all of a document.
    """
    totals = [0] * cp
    for length in documents:
        chunk = length // (2 * cp)
        for rank in range(cp):
            for number in (rank, 2 * cp - 1 - rank):
                totals[rank] += _pairs_before((number + 1) * chunk, window) - _pairs_before(number * chunk, window)
    return totals


def plain_pairs(documents: Sequence[int], cp: int) -> list[int]:
    """The same when each rank holds one run of the row, as it comes: what zig-zag is there to avoid."""
    length = sum(documents)
    borders = [rank * length // cp for rank in range(cp + 1)]
    totals, start = [0] * cp, 0
    for document in documents:
        for rank in range(cp):
            first, last = (min(max(border - start, 0), document) for border in borders[rank : rank + 2])
            totals[rank] += _pairs_before(last, None) - _pairs_before(first, None)
        start += document
    return totals


def imbalance(loads: Sequence[float]) -> float:
    """How much the slowest is above the mean: 0.05 for 5 %."""
    return max(loads) * len(loads) / sum(loads) - 1.0


def _pairs_before(length: int, window: int | None) -> int:
    """Causal pairs of the first ``length`` queries of a document."""
    full = length if window is None else min(window, length)
    return full * (full + 1) // 2 + (length - full) * full
