"""Pipeline schedules as pure data: what one rank runs, in which order.

A schedule is a list of ``Action``. Nothing here touches a tensor or a process group; ``simulate.py`` proves a set of lists
free of deadlock, and ``executor.py`` runs one.

Note [Dropping micro-batches keeps a schedule legal]
    Every dependency joins two actions of one micro-batch. So from lists that all ranks can run for M' micro-batches, the
    actions of some micro-batches may be struck out, and what is left still runs: the old times remain valid. ``zbv`` uses
    this to be legal for every M.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

Style = Literal["round", "v"]
ScheduleName = Literal["auto", "1f1b", "interleaved", "gpipe", "forward_only", "zbh1", "zbv"]


class Kind(str, Enum):
    """What an action computes."""

    F = "F"
    """forward"""
    B = "B"
    """whole backward: gradients of the input and of the weights"""
    I = "I"  # noqa: E741 - the papers' letter is B, which is taken by the whole backward
    """backward with respect to the stage's input only"""
    W = "W"
    """backward with respect to the stage's weights only, after its I"""

    # Enum's own hash is a Python function; actions are hashed a lot.
    __hash__ = str.__hash__


class Action(NamedTuple):
    """One step of a rank: run ``kind`` of a global ``stage`` on a ``microbatch``. Prints as ``F3.0``."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which stages.

    Args:
        num_ranks: pipeline ranks P.
        stages_per_rank: stages V on each of them.
        style: ``"round"`` deals stages round the ranks like cards (stage s on rank ``s % P``); ``"v"`` goes down the ranks
            and back up (stage s on rank s, then on rank ``2P - 1 - s``), so that rank 0 holds the first and the last.

    Raises:
        ValueError: a size below 1, or style ``"v"`` with other than two stages a rank.
    """

    num_ranks: int
    stages_per_rank: int = 1
    style: Style = "round"

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.stages_per_rank < 1:
            raise ValueError(
                f"a pipeline of {self.num_ranks} ranks with {self.stages_per_rank} stages each: give 1 or more of both."
            )
        if self.style not in ("round", "v"):
            raise ValueError(f"style={self.style!r} is not a placement of stages: give 'round' or 'v'.")
        if self.style == "v" and self.stages_per_rank != 2:
            raise ValueError(
                f"a V-shaped placement goes down the ranks once and back up once, so it holds 2 stages a rank, "
                f"not {self.stages_per_rank}; set vpp=2 or another schedule."
            )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds a global stage."""
        assert 0 <= stage < self.num_stages, f"stage {stage} of {self.num_stages}"
        if self.style == "v" and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    @property
    def last_rank(self) -> int:
        """Pipeline rank that holds the last stage."""
        return self.rank_of(self.num_stages - 1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Global stages of a rank, from the input of the model to its output."""
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        if self.style == "v":
            return (rank, self.num_stages - 1 - rank)
        return tuple(range(rank, self.num_stages, self.num_ranks))


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2021, fig. 4): at most ``num_stages - stage`` forwards are ever in flight. Any M >= 1."""
    _check_count(num_microbatches)
    forward = [Action(Kind.F, stage, m) for m in range(num_microbatches)]
    backward = [Action(Kind.B, stage, m) for m in range(num_microbatches)]
    return _alternate(forward, backward, warmup=num_stages - 1 - stage)


def interleaved(rank: int, placement: Placement, num_microbatches: int, group_size: int | None = None) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021, sec. 2.2): bubble ``(P - 1) / (V * M)`` of the useful time.

    Micro-batches go through the rank's stages in groups of ``group_size`` G: the whole group through one stage, then
    through the rank's next. At most ``2(P - rank - 1) + (V - 1)G + 1`` forwards of one stage each are in flight. With one
    stage a rank this is ``one_f_one_b``.

    Args:
        rank: pipeline rank.
        placement: stages dealt round the ranks.
        num_microbatches: M.
        group_size: G; by default ``legal_group_size``.

    Raises:
        ValueError: V > 1 and M < P, or a ``group_size`` that is not legal (see ``legal_group_size``).
    """
    _check_count(num_microbatches)
    num_ranks, num_local = placement.num_ranks, placement.stages_per_rank
    if placement.style != "round":
        raise ValueError("schedule 'interleaved' needs stages dealt round the ranks (style='round'); use 'zbv' for style='v'.")
    if num_local == 1:
        return one_f_one_b(rank, num_ranks, num_microbatches)
    if group_size is None:
        group_size = _require_group_size(placement, num_microbatches)
    elif not _is_legal_group_size(group_size, num_ranks, num_microbatches):
        raise ValueError(
            f"group_size={group_size} is not legal for pp={num_ranks} and {num_microbatches} micro-batches: it must be "
            f"between {num_ranks} and {num_microbatches}, and leave a last group of 0 or at least {num_ranks} micro-batches "
            f"(here {num_microbatches} mod {group_size} = {num_microbatches % max(group_size, 1)}); "
            f"leave it out, or use {legal_group_size(num_ranks, num_microbatches)}."
        )
    warmup = 2 * (num_ranks - 1 - rank) + (num_local - 1) * group_size
    forward = _in_groups(Kind.F, placement.stages_of(rank), num_microbatches, group_size)
    backward = _in_groups(Kind.B, placement.stages_of(rank)[::-1], num_microbatches, group_size)
    return _alternate(forward, backward, warmup=warmup)


def legal_group_size(num_ranks: int, num_microbatches: int) -> int | None:
    """Smallest G with ``P <= G <= M`` whose last group, ``M mod G``, has none or at least P micro-batches; else ``None``.

    A shorter last group comes round to rank 0 before the first rank is free for it: it stalls, or deadlocks.
    G = M always qualifies, so that ``None`` means M < P.
    """
    sizes = range(num_ranks, num_microbatches + 1)
    return next((size for size in sizes if _is_legal_group_size(size, num_ranks, num_microbatches)), None)


def nearest_legal_microbatches(num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """The counts of micro-batches nearest to ``num_microbatches`` that interleave: itself, or the least legal one, P."""
    return (max(num_ranks, num_microbatches),)


def gpipe(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019): legal for any M >= 1 and V. All M * V forwards are in flight."""
    return forward_only(rank, placement, num_microbatches) + _all_through(Kind.B, rank, placement, num_microbatches)


def forward_only(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """The forwards alone, for evaluation and prediction: legal for any M >= 1 and V."""
    return _all_through(Kind.F, rank, placement, num_microbatches)


def zbh1(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sec. 2.3.1): 1F1B with the backward in two parts.

    A rank puts its weight parts off by as many micro-batches as it holds fewer than rank 0, so that the input gradient
    reaches the next rank sooner and the last weight parts fill the end. Every rank then holds at most P micro-batches
    until their W, which is what rank 0 holds in 1F1B, and the bubble is a third of 1F1B's when F, I and W take equal
    time. Any M >= 1.

    Raises:
        ValueError: more than one stage a rank.
    """
    _check_count(num_microbatches)
    if placement.stages_per_rank != 1:
        raise ValueError(
            f"schedule 'zbh1' has one stage a rank, not {placement.stages_per_rank}; set vpp=1 or use 'zbv' with vpp=2."
        )
    actions: list[Action] = []
    for action in one_f_one_b(rank, placement.num_ranks, num_microbatches):
        if action.kind is Kind.F:
            actions.append(action)
            continue
        actions.append(action._replace(kind=Kind.I))
        if action.microbatch >= rank:
            actions.append(Action(Kind.W, rank, action.microbatch - rank))
    late = range(max(num_microbatches - rank, 0), num_microbatches)
    return actions + [Action(Kind.W, rank, m) for m in late]


def zbv(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", V-ZB): two stages a rank, laid as a V.

    With equal times of F, I and W no rank is ever idle between its first and its last action once M >= 2P, and at most
    2P stages (half the size of 1F1B's, so P of those) are held until their W. Any M >= 1.

    Raises:
        ValueError: a placement that is not V-shaped.
    """
    _check_count(num_microbatches)
    if placement.style != "v":
        raise ValueError("schedule 'zbv' needs a V-shaped placement (style='v', two stages a rank).")
    return list(_zbv_of_all_ranks(placement, num_microbatches)[rank])


def schedule_for(
    name: ScheduleName, *, rank: int, placement: Placement, num_microbatches: int, strict: bool = True
) -> list[Action]:
    """The actions of one rank, in order, by the name of the schedule.

    Args:
        name: ``"auto"`` is ``"1f1b"`` with one stage a rank and ``"interleaved"`` with more (``"zbv"`` when V-shaped).
        rank: pipeline rank.
        placement: which rank holds which stages.
        num_microbatches: M.
        strict: refuse an M that cannot be interleaved. When false (a short last batch at run time) fall back to
            ``gpipe``; the choice depends on P and M only, so that all ranks make the same one.

    Raises:
        ValueError: an unknown name, M < 1, a placement that does not fit the schedule, or (``strict``) M < P interleaved.
    """
    _check_count(num_microbatches)
    num_ranks, num_local = placement.num_ranks, placement.stages_per_rank
    if name == "auto":
        name = "zbv" if placement.style == "v" else "1f1b" if num_local == 1 else "interleaved"
    if name == "1f1b":
        if num_local != 1:
            raise ValueError(f"schedule '1f1b' has one stage a rank, not {num_local}; set vpp=1 or use 'interleaved'.")
        return one_f_one_b(rank, num_ranks, num_microbatches)
    if name == "interleaved":
        if not strict and num_local > 1 and legal_group_size(num_ranks, num_microbatches) is None:
            return gpipe(rank, placement, num_microbatches)
        return interleaved(rank, placement, num_microbatches)
    makers = {"gpipe": gpipe, "forward_only": forward_only, "zbh1": zbh1, "zbv": zbv}
    if name not in makers:
        raise ValueError(f"schedule {name!r} is unknown: give one of auto, 1f1b, interleaved, {', '.join(makers)}.")
    return makers[name](rank, placement, num_microbatches)


def placement_for(name: ScheduleName, num_ranks: int, stages_per_rank: int) -> Placement:
    """The placement that a schedule wants: V-shaped for ``"zbv"``, dealt round the ranks for all others."""
    return Placement(num_ranks, stages_per_rank, "v" if name == "zbv" else "round")


def needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What must be done before an action: forward of the stage before; for a backward own forward and the next stage's.

    A backward of the next stage is named as its I; a B there serves as well.
    """
    kind, stage, microbatch = action
    if kind is Kind.F:
        return () if stage == 0 else (Action(Kind.F, stage - 1, microbatch),)
    if kind is Kind.W:
        return (Action(Kind.I, stage, microbatch),)
    own = (Action(Kind.F, stage, microbatch),)
    return own if stage == num_stages - 1 else (*own, Action(Kind.I, stage + 1, microbatch))


def _check_count(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} micro-batches: a step needs at least 1.")


def _is_legal_group_size(size: int, num_ranks: int, num_microbatches: int) -> bool:
    if not num_ranks <= size <= num_microbatches:
        return False
    rest = num_microbatches % size
    return rest == 0 or rest >= num_ranks


def _require_group_size(placement: Placement, num_microbatches: int) -> int:
    size = legal_group_size(placement.num_ranks, num_microbatches)
    if size is None:
        nearest = " or ".join(map(str, nearest_legal_microbatches(placement.num_ranks, num_microbatches)))
        raise ValueError(
            f"{num_microbatches} micro-batches cannot be interleaved over pp={placement.num_ranks} with "
            f"vpp={placement.stages_per_rank}: at least pp micro-batches are needed, or ranks wait for each other. The nearest "
            f"legal number is {nearest}; or set vpp=1 or schedule='gpipe', which take any number."
        )
    return size


def _alternate(forward: Sequence[Action], backward: Sequence[Action], *, warmup: int) -> list[Action]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forward))
    actions = list(forward[:warmup])
    for pair in zip_longest(forward[warmup:], backward):
        actions += [action for action in pair if action is not None]
    return actions


def _in_groups(kind: Kind, stages: Sequence[int], num_microbatches: int, group_size: int) -> list[Action]:
    """Each group of micro-batches through all ``stages`` in turn, then the next group; the last group may be short."""
    starts = range(0, num_microbatches, group_size)
    groups = [range(start, min(start + group_size, num_microbatches)) for start in starts]
    return [Action(kind, stage, m) for group in groups for stage in stages for m in group]


def _all_through(kind: Kind, rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    """One direction alone: F through all stages, or B back through all."""
    _check_count(num_microbatches)
    stages = placement.stages_of(rank)
    if placement.style == "round":
        size = legal_group_size(placement.num_ranks, num_microbatches) or num_microbatches
        return _in_groups(kind, stages if kind is Kind.F else stages[::-1], num_microbatches, size)
    # A micro-batch enters every 2 ticks and moves one stage a tick. The two stages of a rank differ by an odd number, so
    # that no tick is asked for twice and sorting by tick is a schedule that runs without a wait.
    last = placement.num_stages - 1
    ticks = [(2 * m + (s if kind is Kind.F else last - s), s, m) for s in stages for m in range(num_microbatches)]
    return [Action(kind, s, m) for _, s, m in sorted(ticks)]


def _v_shaped(rank: int, placement: Placement, num_microbatches: int) -> Iterator[Action]:
    """The order of F and I in ZB-V on one rank: the order for endless micro-batches, those from M on struck out.

    Rank r holds ``low``, on the way down, and ``high``, on the way up. It runs ahead on ``low`` until the first micro-batch
    comes back up, ``2(P - r) - 1`` of them, then keeps 2P stages in flight: see Note [Dropping micro-batches ...].
    """
    low, high = placement.stages_of(rank)
    ahead = placement.num_ranks - rank
    fill = [(Kind.F, low)] * (2 * ahead - 1) + [(Kind.F, high), (Kind.F, low)] * rank
    turn = [(Kind.F, high), (Kind.I, high)] * ahead
    steady = [(Kind.F, low), (Kind.I, low), (Kind.F, high), (Kind.I, high)]
    rounds = num_microbatches  # each round has one I of `low`, the last of the four to get there
    seen: dict[tuple[Kind, int], int] = {}
    for part in fill + turn + steady * rounds:
        microbatch = seen[part] = seen.get(part, -1) + 1
        if microbatch < num_microbatches:
            yield Action(*part, microbatch)


@lru_cache(maxsize=16)
def _zbv_of_all_ranks(placement: Placement, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Where W fits depends on all ranks, so they are made together; kept, as each rank is asked for in turn."""
    orders = [list(_v_shaped(rank, placement, num_microbatches)) for rank in range(placement.num_ranks)]
    return tuple(map(tuple, _with_weight_parts(orders, placement, max_held=2 * placement.num_ranks)))


def _with_weight_parts(orders: Sequence[Sequence[Action]], placement: Placement, max_held: int) -> list[list[Action]]:
    """Add each I's W where the rank would wait (F, I and W taking one tick each) or would hold more than ``max_held``."""
    done: set[Action] = set()
    result: list[list[Action]] = [[] for _ in orders]
    position = [0] * len(orders)
    owed: list[list[Action]] = [[] for _ in orders]  # the I whose W is not yet run
    held = [0] * len(orders)
    total = sum(len(order) + sum(a.kind is Kind.I for a in order) for order in orders)
    while sum(map(len, result)) < total:
        heads = [order[at : at + 1] for order, at in zip(orders, position, strict=True)]
        ran = [_tick(heads[r], done, placement.num_stages, owed[r], held[r] < max_held) for r in range(len(orders))]
        assert any(ran), "the order of F and I does not run"
        for rank, action in enumerate(ran):
            if action is None:
                continue
            result[rank].append(action)
            done.add(action)
            held[rank] += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
            if action.kind is Kind.W:
                owed[rank].pop(0)
                continue
            position[rank] += 1
            owed[rank] += [action] * (action.kind is Kind.I)
    return result


def _tick(head: Sequence[Action], done: set[Action], num_stages: int, owed: Sequence[Action], may_hold: bool) -> Action | None:
    """What a rank runs in one tick: its next F or I if that is ready, else the oldest W that it owes, else nothing."""
    for action in head:
        if (may_hold or action.kind is not Kind.F) and all(need in done for need in needs(action, num_stages)):
            return action
    return owed[0]._replace(kind=Kind.W) if owed else None
