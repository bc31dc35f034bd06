"""From what a user asks for to a list of actions for each rank: a named schedule, ``auto``, or lists of the user's own.

Note [What auto picks]
``auto`` compares the schedules that run on the placement: 1F1B with ``zbh1`` for one stage a rank, interleaved 1F1B with
``zbv`` for two. Splitting a backward is not free (the graph is walked and kept, and products are entered twice), so the
split one is simulated with backwards that cost ``_SPLIT_COST`` times as much (on two H200, transformer blocks of width
4096, it was 1.03 to 1.11 times). It is picked where it makes the simulated step shorter by ``_WORTH`` and where no rank
holds more micro-batches (until their weight gradients are made) than the fullest rank does otherwise. In effect: with few
micro-batches for the number of ranks. The choice depends on sizes alone, so all ranks make the same one, and so does a
resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from lightning_megatron.pipeline.schedule import Action, Kind, Placement, ScheduleName, Style, schedule_for
from lightning_megatron.pipeline.simulate import Report, ScheduleError, simulate

ActionLists = tuple[tuple[Action, ...], ...]
Maker = Callable[[int, Placement, int], Sequence[Action]]
Schedule = ScheduleName | Maker | ActionLists
"""A name; a function ``(rank, placement, num_microbatches) -> actions``; or the actions of each rank."""

_SPLIT_COST = 1.1
_WORTH = 0.1


@dataclass(frozen=True)
class Choice:
    """What ``auto`` picked.

    Args:
        name: the schedule.
        why: one sentence with the numbers.
    """

    name: ScheduleName
    why: str


def frozen(schedule: ScheduleName | Maker | Sequence[Sequence[Action]]) -> Schedule:
    """What a user gave, in a form that can be compared and kept.

    Raises:
        TypeError: it is neither a name nor a function nor a list of actions for each rank.
    """
    if isinstance(schedule, str) or callable(schedule):
        return cast(Schedule, schedule)
    lists = tuple(tuple(actions) for actions in schedule)
    for action in (action for actions in lists for action in actions):
        if not isinstance(action, Action):
            raise TypeError(
                f"schedule=[...] holds {action!r}; give one list of lightning_megatron.pipeline.schedule.Action for each "
                f"pipeline rank, or a function (rank, placement, num_microbatches) -> such a list."
            )
    return lists


def describe(schedule: Schedule) -> str:
    """A schedule's name, for messages."""
    if isinstance(schedule, str):
        return schedule
    return getattr(schedule, "__name__", type(schedule).__name__) if callable(schedule) else "own lists of actions"


def style_for(schedule: Schedule, num_ranks: int, stages_per_rank: int, num_microbatches: int | None = None) -> Style:
    """How a schedule wants stages laid over ranks.

    ``zbv``, lists whose rank 0 runs the last stage, and functions with an attribute ``placement = "v"`` want a V;
    ``auto`` wants one where it would pick ``zbv`` for M, if that is known.
    """
    if num_ranks == 1 or stages_per_rank != 2:
        return "round"
    if schedule == "auto" and num_microbatches is not None:
        return "v" if _better(num_ranks, stages_per_rank, num_microbatches).name == "zbv" else "round"
    if isinstance(schedule, str):
        return "v" if schedule == "zbv" else "round"
    if callable(schedule):
        return "v" if getattr(schedule, "placement", "round") == "v" else "round"
    last = num_ranks * stages_per_rank - 1
    return "v" if schedule and any(action.stage == last for action in schedule[0]) else "round"


def choose(placement: Placement, num_microbatches: int) -> Choice:
    """What ``auto`` runs. See Note [What auto picks]."""
    if placement.num_ranks == 1:
        return Choice("1f1b", "there is one pipeline rank")
    best = _better(placement.num_ranks, placement.stages_per_rank, num_microbatches)
    if placement.stages_per_rank != 2:
        return best
    laid: ScheduleName = "zbv" if placement.style == "v" else "interleaved"
    return best if best.name == laid else Choice(laid, "that is how stages are laid over the ranks")


@lru_cache(maxsize=64)
def _better(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Choice:
    plain: ScheduleName = "1f1b" if stages_per_rank == 1 else "interleaved"
    if stages_per_rank > 2:
        return Choice(plain, f"{stages_per_rank} stages a rank are interleaved")
    split: ScheduleName = "zbh1" if stages_per_rank == 1 else "zbv"
    whole = _simulated(plain, num_ranks, stages_per_rank, num_microbatches)
    parts = _simulated(split, num_ranks, stages_per_rank, num_microbatches)
    saved, held, held_whole = 1 - parts.makespan / whole.makespan, max(parts.peak_held), max(whole.peak_held)
    numbers = (
        f"for {num_microbatches} micro-batches on {num_ranks} ranks {split} is simulated to take {saved:.0%} less time than "
        f"{plain} (a split backward counted {_SPLIT_COST:g} times) and to hold {held} stage inputs on the fullest rank, not "
        f"{held_whole}"
    )
    if saved >= _WORTH and held <= held_whole:
        return Choice(split, numbers)
    return Choice(plain, f"{numbers}; it is picked from {_WORTH:.0%} on, if it holds no more")


def _simulated(name: ScheduleName, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Report:
    placement = Placement(num_ranks, stages_per_rank, "v" if name == "zbv" else "round")
    lists = _named(name, placement, num_microbatches)
    return simulate(lists, placement, cost_input=_SPLIT_COST, cost_weight=_SPLIT_COST)


def _named(name: ScheduleName, placement: Placement, num_microbatches: int) -> list[list[Action]]:
    ranks = range(placement.num_ranks)
    return [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches, strict=False) for r in ranks]


def lists_for(schedule: Schedule, placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """The actions of each rank. What is the user's own is checked to run, and to run each micro-batch forward and back.

    An M that a named schedule cannot run falls back as ``schedule_for`` says; lists of the user's own for more
    micro-batches lose those that are not there (schedule.py: Note [Dropping micro-batches keeps a schedule legal]).

    Raises:
        ScheduleError: a schedule of the user's own cannot run.
    """
    if isinstance(schedule, str):
        name = choose(placement, num_microbatches).name if schedule == "auto" else schedule
        return _named(name, placement, num_microbatches)
    if callable(schedule):
        lists = [list(schedule(rank, placement, num_microbatches)) for rank in range(placement.num_ranks)]
    else:
        lists = [[action for action in actions if action.microbatch < num_microbatches] for actions in schedule]
    name_of_it = describe(schedule)
    try:
        simulate(lists, placement)
    except ScheduleError as error:
        raise ScheduleError(f"schedule={name_of_it} cannot run {num_microbatches} micro-batches: {error}") from error
    actions = {action for actions in lists for action in actions}
    found = 1 + max((action.microbatch for action in actions), default=-1)
    if found != num_microbatches:
        raise ScheduleError(f"schedule={name_of_it} runs {found} micro-batches, but there are {num_microbatches}.")
    if all(action.kind is Kind.F for action in actions):
        raise ScheduleError(f"schedule={name_of_it} has forwards alone, so nothing would be trained: add B, or I and W.")
    return lists
