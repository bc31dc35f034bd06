"""Everything about a run that follows from its schedule: action lists, message orders, and when a receive may be posted.

Note [When a receive may be posted]
A posted receive occupies the device until its message comes, and anything on this host that waits for the device (an
allocation, the first use of a kernel, a user's ``.item()``) then waits for that message. So a receive may be posted only
when its message needs no action that this rank has yet to issue; and it should be posted as soon as that holds, because
the sender's device is occupied until then. The count of own actions that a message needs, through other ranks and their
program order, is a vector clock (Mattern 1989) over the action lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from lightning_megatron.pipeline.schedule import Action, Kind, Placement, ScheduleName, needs, schedule_for

Key = tuple[int, int]
"""A message: (stage that receives it, micro-batch)."""


@dataclass(frozen=True)
class Message:
    """One incoming message of a rank.

    Args:
        direction: ``"forward"`` for a hidden state, ``"backward"`` for its gradient.
        source: pipeline rank that sends it.
        key: receiving stage and micro-batch.
        after: own actions that must have been issued before the receive is posted.
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
    clocks = vector_clocks(lists, placement)
    incoming = []
    for source, actions in enumerate(lists):
        for action in actions:
            going = hop(action, placement)
            if going is None or source == rank or placement.rank_of(going[1]) != rank:
                continue
            direction, stage = going
            incoming.append(Message(direction, source, (stage, action.microbatch), clocks[action][rank]))
    return RunPlan(tuple(lists[rank]), tuple(incoming))


def vector_clocks(lists: list[list[Action]], placement: Placement) -> dict[Action, tuple[int, ...]]:
    """For each action, how many actions of each rank must have been issued before it is done, its own included.

    Raises:
        RuntimeError: the lists wait for each other (the simulator says which actions do).
    """
    clocks: dict[Action, tuple[int, ...]] = {}
    done = [0] * len(lists)
    last = [(0,) * len(lists) for _ in lists]
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(lists):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                inputs = needs(action, placement.num_stages)
                if any(source not in clocks for source in inputs):
                    break
                merged = [max(column) for column in zip(last[rank], *(clocks[source] for source in inputs), strict=True)]
                done[rank] += 1
                merged[rank] = done[rank]
                clocks[action] = last[rank] = tuple(merged)
                if action.kind is Kind.B:  # a whole backward serves whoever needs its input-gradient part
                    clocks[action._replace(kind=Kind.I)] = last[rank]
                moving = True
    if any(done[rank] < len(actions) for rank, actions in enumerate(lists)):
        raise RuntimeError("the schedule cannot run to its end: some of its actions wait for each other.")
    return clocks
