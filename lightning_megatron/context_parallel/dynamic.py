"""Dynamic context parallelism: as many ranks for a document as it needs, planned for one step. Pure data; nothing runs here.

``data.DynamicPackingCollator`` makes batches of a plan, ``sequence_batch`` cuts them, and attention takes the axis ``cp:n``.

Note [Degrees]
A short document on many ranks is cut into slivers whose keys and values travel for nothing; a long one on few ranks does not
fit. So each micro-batch gets the smallest block of neighbouring ranks that holds its longest document, and enough that no
document alone takes longer than the step would at perfect balance. Blocks have 1, 2, 4, ... ranks (in general each a multiple
of the one before, and all of them the last), so that they nest, and larger ones go first: a rank then waits only for the
other ranks of a block to end what they did before, and gradients meet at the end of the step alone. Because losses are sums
over tokens, divided by the global count, it does not matter who computes which part.

So the i-th micro-batches of all ranks are whole blocks, side by side (``waves``): larger blocks went first, and all ranks of a
block have had the same number of micro-batches before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_megatron.context_parallel.balance import attention_pairs


@dataclass(frozen=True)
class Cost:
    """Time of a document, in any unit.

    Args:
        token: of a token, all matrix products of the model.
        pair: of a query-key pair of causal attention.
        exchange: of a token whose keys and values travel once to another rank.
        microbatch: of a micro-batch, whatever it holds (launches).
    """

    token: float = 1.0
    pair: float = 1e-4
    exchange: float = 0.0
    microbatch: float = 0.0

    @classmethod
    def of_flops(cls, flops_per_token: Callable[[int], float]) -> Cost:
        """By the FLOPs of a token in a document of some length, which grow by as much with each token of it.

        ``Cost.of_flops(config.flops_per_token)`` is that of a ``GPTConfig``.
        """
        alone = flops_per_token(0)
        return cls(token=alone, pair=2.0 * (flops_per_token(1) - alone))

    def of_document(self, length: int) -> float:
        """On one rank."""
        return self.token * length + self.pair * attention_pairs(length)

    def of_microbatch(self, documents: Sequence[int], degree: int) -> float:
        """On each of ``degree`` ranks; documents are cut zig-zag, so they share it evenly."""
        work = sum(self.of_document(length) for length in documents) / degree
        return work + self.exchange * sum(documents) * (degree - 1) / degree + self.microbatch


@dataclass(frozen=True)
class PlannedMicroBatch:
    """What one block of ranks runs together.

    Args:
        first_rank, degree: the block: ranks ``first_rank .. first_rank + degree - 1``.
        documents: their numbers.
        cost: time on each rank.
    """

    first_rank: int
    degree: int
    documents: tuple[int, ...]
    cost: float

    @property
    def ranks(self) -> range:
        """The block."""
        return range(self.first_rank, self.first_rank + self.degree)


@dataclass(frozen=True)
class Simulation:
    """What comes of a plan: when each rank is done, how long it worked, and the end of the step."""

    busy: tuple[float, ...]
    finish: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """When the last rank is done."""
        return max(self.finish)

    @property
    def efficiency(self) -> float:
        """Work over ranks times makespan: 1 where nobody waits."""
        return sum(self.busy) / (len(self.busy) * self.makespan)


def plan_step(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    tokens_per_rank: int,
    cost: Cost = Cost(),
    min_degree: int = 1,
    max_degree: int | None = None,
) -> list[PlannedMicroBatch]:
    """Micro-batches of one optimizer step, in the order in which each rank runs its own.

    Args:
        lengths: tokens of each document.
        num_ranks: ranks that there are: dp x cp.
        tokens_per_rank: tokens that a rank can hold in one micro-batch.
        cost: the time of things.
        min_degree: least ranks of a block, one of ``degrees(max_degree)``.
        max_degree: most ranks of a block: cp; by default all. The same as ``min_degree`` is static context parallelism.

    Raises:
        ValueError: ``min_degree`` is no size of a block, blocks do not divide the ranks, or a document does not fit a block.
    """
    most = num_ranks if max_degree is None else max_degree
    chain = degrees(most)
    if min_degree not in chain or num_ranks % most:
        raise ValueError(
            f"min_degree={min_degree} and max_degree={most} of {num_ranks} ranks: blocks of max_degree must divide the ranks, "
            f"and min_degree be one of {list(chain)}."
        )
    if too_long := [length for length in lengths if not 1 <= length <= most * tokens_per_rank]:
        raise ValueError(
            f"a document of {too_long[0]} tokens does not fit {most} ranks of {tokens_per_rank} tokens: raise "
            f"tokens_per_rank or the number of ranks, or cut it."
        )
    ideal = sum(cost.of_document(length) for length in lengths) / num_ranks
    needed = [max(min_degree, _degree(length, chain, tokens_per_rank, cost, ideal)) for length in lengths]
    loads, planned = [0.0] * num_ranks, []
    for degree in sorted(set(needed), reverse=True):
        members = [i for i, own in enumerate(needed) if own == degree]
        for documents in _microbatches(members, lengths, degree, tokens_per_rank, cost, ideal):
            time = cost.of_microbatch([lengths[i] for i in documents], degree)
            starts = range(0, num_ranks, degree)
            first = min(starts, key=lambda start: (max(loads[start : start + degree]), start))
            done = max(loads[first : first + degree]) + time
            loads[first : first + degree] = [done] * degree
            planned.append(PlannedMicroBatch(first, degree, documents, time))
    return planned


def simulate_step(plan: Sequence[PlannedMicroBatch], num_ranks: int) -> Simulation:
    """Run a plan: a block starts when all its ranks are free."""
    busy, finish = [0.0] * num_ranks, [0.0] * num_ranks
    for microbatch in plan:
        done = max(finish[rank] for rank in microbatch.ranks) + microbatch.cost
        for rank in microbatch.ranks:
            busy[rank] += microbatch.cost
            finish[rank] = done
    return Simulation(tuple(busy), tuple(finish))


def waves(plan: Sequence[PlannedMicroBatch], num_ranks: int) -> list[list[PlannedMicroBatch]]:
    """The micro-batches of a plan by when they come: the i-th of each rank together. See Note [Degrees].

    Each wave covers all ranks, in order; ranks that have nothing left get a block of their own without documents.
    """
    turns: list[list[PlannedMicroBatch]] = [[] for _ in range(num_ranks)]
    for microbatch in plan:
        for rank in microbatch.ranks:
            turns[rank].append(microbatch)
    found = []
    for turn in range(max(map(len, turns), default=0)):
        wave, rank = list[PlannedMicroBatch](), 0
        while rank < num_ranks:
            has_one = turn < len(turns[rank])
            wave.append(turns[rank][turn] if has_one else PlannedMicroBatch(rank, 1, (), 0.0))
            assert wave[-1].first_rank == rank
            rank += wave[-1].degree
        found.append(wave)
    return found


def degrees(num_ranks: int) -> tuple[int, ...]:
    """Sizes of blocks, each a multiple of the one before: 1, 2, 4, 8 for 8 ranks; 1, 2, 6 for 6."""
    found, rest, factor = [1], num_ranks, 2
    while rest > 1:
        if rest % factor:
            factor += 1
            continue
        found.append(found[-1] * factor)
        rest //= factor
    return tuple(found)


def _degree(length: int, chain: tuple[int, ...], tokens_per_rank: int, cost: Cost, ideal: float) -> int:
    fitting = (n for n in chain if length <= n * tokens_per_rank and cost.of_document(length) / n <= ideal)
    return next(fitting, chain[-1])


def _microbatches(
    members: list[int], lengths: Sequence[int], degree: int, tokens_per_rank: int, cost: Cost, ideal: float
) -> list[tuple[int, ...]]:
    """Documents of one degree in micro-batches that fit, the costliest first.

    A document joins the cheapest micro-batch that has room, and that does not become dearer than half of what a rank has to
    do in all by it, so that enough pieces are left to balance with.
    """
    room = degree * tokens_per_rank
    groups: list[list[int]] = []
    tokens: list[int] = []
    costs: list[float] = []
    for item in sorted(members, key=lambda i: (-cost.of_document(lengths[i]), i)):
        own = cost.of_document(lengths[item]) / degree
        fitting = [g for g in range(len(groups)) if tokens[g] + lengths[item] <= room and costs[g] + own <= ideal / 2]
        place = min(fitting, key=lambda g: costs[g], default=len(groups))
        if place == len(groups):
            groups.append([])
            tokens.append(0)
            costs.append(0.0)
        groups[place].append(item)
        tokens[place] += lengths[item]
        costs[place] += own
    order = sorted(range(len(groups)), key=lambda g: -costs[g])
    return [tuple(sorted(groups[g])) for g in order]
