"""Everything about a run that follows from its schedule: action lists, message orders, and when a receive may be posted.

Note [When a receive is posted]
A receive that is posted, and a send that nobody has posted the receive for, occupy the device; and whatever on a host
waits for its device (an allocation, the first use of a kernel, a user's ``.item()``) then waits for that message. Ranks
that post at will can so come to wait for each other, though the schedule itself is free of deadlocks. So each receive is
posted at the time at which its message comes in the simulated run: before the first action that starts no earlier than
the sending action ends. Then an action waits, by its receives and by its earlier sends, only for actions that start
before it in the simulation, and no circle can close. It is also early enough to hide the transfer.

Note [When a send is let go]
What was sent is kept until it has arrived. It is waited for, and freed, before the first action that starts no earlier
in the simulation than the action that uses it ends at the receiver. By the argument of Note [When a receive is posted]
this closes no circle, since the action that is waited for starts before; and the receiver has the length of that action to
be late in before anybody stands still. The memory of a rank is then what the simulation says, however far its host runs
ahead of its device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_megatron.pipeline.choice import Schedule, lists_for
from lightning_megatron.pipeline.schedule import Action, Kind, Placement
from lightning_megatron.pipeline.simulate import Timed, simulate

Key = tuple[int, int]
"""A message: (stage that receives it, micro-batch)."""


@dataclass(frozen=True)
class Message:
    """One incoming message of a rank.

    Args:
        direction: ``"forward"`` for a hidden state, ``"backward"`` for its gradient.
        source: pipeline rank that sends it.
        key: receiving stage and micro-batch.
        after: the receive is posted once this many own actions are under way.
    """

    direction: str
    source: int
    key: Key
    after: int


@dataclass(frozen=True)
class RunPlan:
    """What one rank does in one run of a schedule.

    Args:
        actions: its actions in order.
        incoming: its messages, each sender's in the order in which that sender sends them.
        arrived: for each action, what this rank has sent that will have been used before it: ``(direction, key)``.
        last_backward: for each stage, the index of its last B, or I.
        last_gradient: for each stage, the index of its last B, or W: what comes to its parameters has come after that.
    """

    actions: tuple[Action, ...]
    incoming: tuple[Message, ...] = field(repr=False)
    arrived: tuple[tuple[tuple[str, Key], ...], ...] = field(repr=False)
    last_backward: dict[int, int] = field(repr=False, hash=False)
    last_gradient: dict[int, int] = field(repr=False, hash=False)


def hop(action: Action, placement: Placement) -> tuple[str, int] | None:
    """Where an action's result goes: (direction, receiving stage), or ``None`` if it stays."""
    if action.kind is Kind.F and action.stage + 1 < placement.num_stages:
        return "forward", action.stage + 1
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return "backward", action.stage - 1
    return None


@lru_cache(maxsize=64)
def run_plan(schedule: Schedule, rank: int, *, placement: Placement, num_microbatches: int) -> RunPlan:
    """The plan of one rank.

    Raises:
        ScheduleError: a schedule of the user's own cannot run, see ``lists_for``.
    """
    lists = lists_for(schedule, placement, num_microbatches)
    timeline = simulate(lists, placement).timeline
    actions = tuple(lists[rank])
    return RunPlan(
        actions,
        tuple(_incoming(timeline, rank, placement)),
        _arrivals(timeline, rank, placement),
        {action.stage: i for i, action in enumerate(actions) if action.kind in (Kind.B, Kind.I)},
        {action.stage: i for i, action in enumerate(actions) if action.kind in (Kind.B, Kind.W)},
    )


def _incoming(timeline: Sequence[Sequence[Timed]], rank: int, placement: Placement) -> Iterator[Message]:
    starts = [start for _, start, _ in timeline[rank]]
    for source, timed in enumerate(timeline):
        for action, _, end in timed:
            going = hop(action, placement)
            if going is None or source == rank or placement.rank_of(going[1]) != rank:
                continue
            direction, stage = going
            yield Message(direction, source, (stage, action.microbatch), bisect_left(starts, end))


def _arrivals(timeline: Sequence[Sequence[Timed]], rank: int, placement: Placement) -> tuple[tuple[tuple[str, Key], ...], ...]:
    """See Note [When a send is let go]."""
    used = {}
    for timed in timeline:
        for action, _, end in timed:
            if action.kind is not Kind.W:
                used["forward" if action.kind is Kind.F else "backward", (action.stage, action.microbatch)] = end
    starts = [start for _, start, _ in timeline[rank]]
    arrived: list[list[tuple[str, Key]]] = [[] for _ in starts]
    for action, _, _ in timeline[rank]:
        going = hop(action, placement)
        if going is None or placement.rank_of(going[1]) == rank:
            continue
        message = going[0], (going[1], action.microbatch)
        if (index := bisect_left(starts, used[message])) < len(starts):
            arrived[index].append(message)
    return tuple(map(tuple, arrived))
