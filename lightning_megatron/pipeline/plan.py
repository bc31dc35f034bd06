"""Everything about a run that follows from its schedule: action lists, message orders, and when a receive may be posted.

Note [When a receive is posted]
A receive that is posted, and a send that nobody has posted the receive for, occupy the device; and whatever on a host
waits for its device (an allocation, the first use of a kernel, a user's ``.item()``) then waits for that message. Ranks
that post at will can so come to wait for each other, though the schedule itself is free of deadlocks. So each receive is
posted at the time at which its message comes in the simulated run: before the first action that starts no earlier than
the sending action ends. Then an action waits, by its receives and by its earlier sends, only for actions that start
before it in the simulation, and no circle can close. It is also early enough to hide the transfer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

from lightning_megatron.pipeline.schedule import Action, Kind, Placement, ScheduleName, schedule_for
from lightning_megatron.pipeline.simulate import simulate

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
    """

    actions: tuple[Action, ...]
    incoming: tuple[Message, ...] = field(repr=False)


def hop(action: Action, placement: Placement) -> tuple[str, int] | None:
    """Where an action's result goes: (direction, receiving stage), or ``None`` if it stays."""
    if action.kind is Kind.F and action.stage + 1 < placement.num_stages:
        return "forward", action.stage + 1
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return "backward", action.stage - 1
    return None


@lru_cache(maxsize=64)
def run_plan(schedule: ScheduleName, rank: int, *, placement: Placement, num_microbatches: int) -> RunPlan:
    """The plan of one rank. A number of micro-batches that the schedule cannot run falls back as ``schedule_for`` says."""
    lists = [
        schedule_for(schedule, rank=r, placement=placement, num_microbatches=num_microbatches, strict=False)
        for r in range(placement.num_ranks)
    ]
    timeline = simulate(lists, placement).timeline
    starts = [start for _, start, _ in timeline[rank]]
    incoming = []
    for source, timed in enumerate(timeline):
        for action, _, end in timed:
            going = hop(action, placement)
            if going is None or source == rank or placement.rank_of(going[1]) != rank:
                continue
            direction, stage = going
            incoming.append(Message(direction, source, (stage, action.microbatch), bisect_left(starts, end)))
    return RunPlan(tuple(lists[rank]), tuple(incoming))
