"""Run all ranks' schedules against each other, without tensors: is a set of lists free of deadlock, and how good is it?

Note [What the simulation takes for granted]
    A rank runs its list strictly in order, one action at a time. Sends never block. An edge (source rank, destination
    rank, direction) is a FIFO that carries one message at a time in the order of the sender's actions; the receiver posts
    its receives in that same order and keeps early ones in a buffer. The two directions are independent, also between the
    two ranks of a pipeline of 2, where both edges join the same pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from lightning_megatron.pipeline.schedule import Action, Kind, Placement, needs

Timed = tuple[Action, float, float]
Edge = tuple[int, int, Kind]


class ScheduleError(ValueError):
    """A set of schedules that cannot run: a deadlock, or an action that is missing, repeated or on the wrong rank."""


@dataclass(frozen=True)
class Report:
    """How a set of schedules runs.

    Args:
        placement: which rank holds which stages.
        timeline: for each rank its actions as ``(action, start, end)``, in order, in units of the costs given.
        makespan: from the start of the first action to the end of the last.
        bubble: idle time of the busiest rank as a part of its useful time: ``(makespan - useful) / useful``.
        idle_inside: for each rank, the time without work between its own first and last action. The zero-bubble papers
            measure this: a rank may start the next step before the others have ended this one.
        peak_in_flight: for each rank, the most forwards whose B (or I) had not ended, in activations of one stage.
        peak_held: the same until the B or W, which is how long a split backward keeps part of the activations.
        peak_buffered: for each rank, the most received tensors waiting to be used, both directions together.
    """

    placement: Placement
    timeline: tuple[tuple[Timed, ...], ...]
    makespan: float
    bubble: float
    idle_inside: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_held: tuple[int, ...]
    peak_buffered: tuple[int, ...]


def simulate(
    schedules: Sequence[Sequence[Action]],
    placement: Placement,
    *,
    cost_forward: float = 1.0,
    cost_backward: float = 2.0,
    cost_input: float = 1.0,
    cost_weight: float = 1.0,
    cost_transfer: float = 0.0,
) -> Report:
    """Run one list of actions a rank against each other. See Note [What the simulation takes for granted].

    Args:
        schedules: the list of each pipeline rank.
        placement: which rank holds which stages.
        cost_forward: time of an F of one stage, in any unit.
        cost_backward: time of a B.
        cost_input: time of an I.
        cost_weight: time of a W.
        cost_transfer: time of one message on an edge between two ranks.

    Raises:
        ScheduleError: naming the rank and the actions: a deadlock; an action that is missing, repeated, out of order with
            its W, or on a rank that does not hold its stage.
    """
    check_complete(schedules, placement)
    costs = {Kind.F: cost_forward, Kind.B: cost_backward, Kind.I: cost_input, Kind.W: cost_weight}
    run = _Run(schedules, placement, costs, cost_transfer)
    run.to_the_end()
    timeline = tuple(tuple(timed) for timed in run.timeline)
    makespan = max((timed[-1][2] for timed in timeline if timed), default=0.0)
    busy = [sum(end - start for _, start, end in timed) for timed in timeline]
    useful = max(busy, default=0.0)
    return Report(
        placement=placement,
        timeline=timeline,
        makespan=makespan,
        bubble=(makespan - useful) / useful if useful else 0.0,
        idle_inside=tuple(t[-1][2] - t[0][1] - b if t else 0.0 for t, b in zip(timeline, busy, strict=True)),
        peak_in_flight=tuple(_peak(s, (Kind.B, Kind.I)) for s in schedules),
        peak_held=tuple(_peak(s, (Kind.B, Kind.W)) for s in schedules),
        peak_buffered=tuple(_peak_of_intervals(waits) for waits in run.buffered),
    )


def check_complete(schedules: Sequence[Sequence[Action]], placement: Placement) -> None:
    """Check that each stage runs each micro-batch once: F alone everywhere, or with B or I and W everywhere.

    The number of micro-batches is the largest that any action names.

    Raises:
        ScheduleError: naming the first missing, repeated or misplaced action and its rank.
    """
    if len(schedules) != placement.num_ranks:
        raise ScheduleError(f"{len(schedules)} schedules for a pipeline of {placement.num_ranks} ranks: give one a rank.")
    seen: set[Action] = set()
    for rank, schedule in enumerate(schedules):
        stages = placement.stages_of(rank)
        for action in schedule:
            if action.stage not in stages or action.microbatch < 0:
                raise ScheduleError(f"rank {rank} runs {action}, which is foreign to it: it holds stages {stages}.")
            if action in seen:
                raise ScheduleError(f"rank {rank} runs {action} twice.")
            seen.add(action)
    backward = any(action.kind is not Kind.F for action in seen)
    num_microbatches = 1 + max((action.microbatch for action in seen), default=-1)
    for stage in range(placement.num_stages):
        for microbatch in range(num_microbatches):
            _check_slot(seen, placement.rank_of(stage), stage, microbatch, backward)


def _check_slot(seen: set[Action], rank: int, stage: int, microbatch: int, backward: bool) -> None:
    forward, whole, of_input, of_weight = (Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    if forward not in seen:
        raise ScheduleError(f"{forward} is missing from rank {rank}, which holds stage {stage}.")
    if whole in seen:
        if extra := [str(part) for part in (of_input, of_weight) if part in seen]:
            raise ScheduleError(f"rank {rank} runs {whole} and also {' and '.join(extra)}, which is part of it.")
        return
    if not backward:
        return
    if of_input not in seen and of_weight not in seen:
        raise ScheduleError(f"{whole} (or {of_input} and {of_weight}) is missing from rank {rank}, which holds stage {stage}.")
    for part in (of_input, of_weight):
        if part not in seen:
            raise ScheduleError(f"{part} is missing from rank {rank}, which holds stage {stage}.")


def render(report: Report) -> str:
    """The timeline as a plain-text grid, a line a rank, for golden files.

    A column is the longest time that divides every start and end. An action stands in its first column and is drawn on
    with ``-``; ``.`` is idle time. Ends with a line feed.
    """
    times = {time for timed in report.timeline for _, start, end in timed for time in (start, end)}
    exact = [Fraction(time).limit_denominator(1000) for time in times]
    scale = lcm(*(time.denominator for time in exact))
    step = Fraction(gcd(*(int(time * scale) for time in exact)) or 1, scale)
    columns = round(Fraction(report.makespan).limit_denominator(1000) / step)
    rows = [_row(timed, step, columns) for timed in report.timeline]
    width = max((len(cell) for row in rows for cell in row), default=1)
    placement = report.placement
    lines = [
        f"ranks {placement.num_ranks}, stages a rank {placement.stages_per_rank} ({placement.style}), column {float(step):g}",
        f"makespan {report.makespan:g}, bubble {report.bubble:.4f}",
    ]
    for rank, row in enumerate(rows):
        cells = " ".join(cell.ljust(width) for cell in row)
        lines.append(f"{rank}| {cells}".rstrip())
    for rank in range(placement.num_ranks):
        in_flight, held = report.peak_in_flight[rank], report.peak_held[rank]
        lines.append(f"{rank}: peak in flight {in_flight}, until W {held}; idle inside {report.idle_inside[rank]:g}")
    return "\n".join(lines) + "\n"


class _Run:
    """One simulation. Each rank has its clock; a rank that must wait is woken by the action that it waits for."""

    def __init__(
        self, schedules: Sequence[Sequence[Action]], placement: Placement, costs: dict[Kind, float], cost_transfer: float
    ) -> None:
        self.schedules = schedules
        self.owner = [placement.rank_of(stage) for stage in range(placement.num_stages)]
        self.costs = costs
        self.cost_transfer = cost_transfer
        self.timeline: list[list[Timed]] = [[] for _ in schedules]
        self.buffered: list[list[tuple[float, float]]] = [[] for _ in schedules]
        self.available: dict[tuple[Action, int], float] = {}  # when a rank has the result of an action
        self.link_free: dict[Edge, float] = {}
        self.waiting: dict[tuple[Action, int], int] = {}

    def to_the_end(self) -> None:
        awake = list(range(len(self.schedules)))
        while awake:
            rank = awake.pop()
            awake += self._run_until_wait(rank)
        if stuck := [r for r, s in enumerate(self.schedules) if len(self.timeline[r]) < len(s)]:
            raise ScheduleError(_deadlock(self._wait_of, stuck[0]))

    def _run_until_wait(self, rank: int) -> Iterator[int]:
        """Run a rank as far as it goes; yield the ranks that were waiting for what it did."""
        schedule, timed = self.schedules[rank], self.timeline[rank]
        for action in schedule[len(timed) :]:
            required = needs(action, len(self.owner))
            arrivals = [self.available.get((need, rank)) for need in required]
            if None in arrivals:
                self.waiting[required[arrivals.index(None)], rank] = rank
                return
            start = max((timed[-1][2] if timed else 0.0, *(at for at in arrivals if at is not None)))
            end = start + self.costs[action.kind]
            timed.append((action, start, end))
            self._note_buffered(rank, required, start)
            for done in self._publish(action, rank, end):
                if (woken := self.waiting.pop(done, None)) is not None:
                    yield woken

    def _publish(self, action: Action, rank: int, end: float) -> list[tuple[Action, int]]:
        """Record when this rank and the one that is next have the result of an action."""
        result = action._replace(kind=Kind.I) if action.kind is Kind.B else action
        self.available[result, rank] = end
        receiver = self._receiver(result)
        if receiver == rank:
            return [(result, rank)]
        edge = (rank, receiver, result.kind)
        self.link_free[edge] = arrival = max(end, self.link_free.get(edge, 0.0)) + self.cost_transfer
        self.available[result, receiver] = arrival
        return [(result, receiver)]

    def _receiver(self, result: Action) -> int:
        """The rank that uses a result: its own for a W and at the ends of the pipeline."""
        stage = result.stage + {Kind.F: 1, Kind.I: -1}.get(result.kind, 0)
        return self.owner[stage if 0 <= stage < len(self.owner) else result.stage]

    def _note_buffered(self, rank: int, required: Iterable[Action], start: float) -> None:
        for need in required:
            if self.owner[need.stage] != rank:
                self.buffered[rank].append((self.available[need, rank], start))

    def _wait_of(self, rank: int) -> tuple[Action, Action, int]:
        """What a stuck rank stands at, what it waits for, and the rank that should do that."""
        action = self.schedules[rank][len(self.timeline[rank])]
        needed = next(need for need in needs(action, len(self.owner)) if (need, rank) not in self.available)
        owner = self.owner[needed.stage]
        whole = needed._replace(kind=Kind.B)
        return action, whole if needed.kind is Kind.I and whole in self.schedules[owner] else needed, owner


def _deadlock(wait_of: Callable[[int], tuple[Action, Action, int]], rank: int) -> str:
    """Follow who waits for whom until a rank comes again, and name the ranks of that circle."""
    order: list[int] = []
    while rank not in order:
        order.append(rank)
        rank = wait_of(rank)[2]
    circle = order[order.index(rank) :]
    parts = []
    for rank in circle:
        action, needed, owner = wait_of(rank)
        whose = "which comes later in its own list" if owner == rank else f"which rank {owner} has not run"
        parts.append(f"rank {rank} stands at {action} and waits for {needed}, {whose}")
    return "deadlock: " + "; ".join(parts) + "."


def _peak(schedule: Sequence[Action], releasing: tuple[Kind, Kind]) -> int:
    """The most forwards whose releasing action has not run, along one rank's list."""
    held = peak = 0
    for action in schedule:
        held += (action.kind is Kind.F) - (action.kind in releasing)
        peak = max(peak, held)
    return peak


def _peak_of_intervals(intervals: Sequence[tuple[float, float]]) -> int:
    """The most intervals open at a time; one that ends where another begins does not overlap it."""
    real = [(start, end) for start, end in intervals if end > start]
    events = sorted([(start, 1) for start, _ in real] + [(end, -1) for _, end in real])
    held = peak = 0
    for _, change in events:
        held += change
        peak = max(peak, held)
    return peak


def _row(timed: Sequence[Timed], step: Fraction, columns: int) -> list[str]:
    cells = ["."] * columns
    for action, start, end in timed:
        first, last = (round(Fraction(time).limit_denominator(1000) / step) for time in (start, end))
        if last > first:  # an action that costs nothing has no column
            cells[first:last] = [str(action)] + ["-"] * (last - first - 1)
    return cells
