"""The timeline of a simulated pipeline in the terminal: a row a rank, time to the right, a colour a kind.

Note [Colours]
The hues are Okabe and Ito's, which most colour-blind readers can tell apart; the stages of a rank are shades of a hue,
from dark to light in the order in which a micro-batch passes them. Where a terminal shows no colour, a letter stands
before each micro-batch number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm, log10

from rich.console import Console
from rich.style import Style
from rich.text import Text

from lightning_megatron.pipeline.schedule import Action, Kind, Placement
from lightning_megatron.pipeline.simulate import Report, Timed

RGB = tuple[int, int, int]
HUES: dict[Kind, RGB] = {Kind.F: (0, 114, 178), Kind.B: (213, 94, 0), Kind.I: (230, 159, 0), Kind.W: (0, 158, 115)}
MEANINGS: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward to the input",
    Kind.W: "backward to the weights",
}
_LIGHTEST = 0.62
_MAX_BLOCKS = 6


def colour_of(action: Action, placement: Placement) -> tuple[RGB, RGB]:
    """Fill and text colour of an action. See Note [Colours]."""
    stages = placement.stages_of(placement.rank_of(action.stage))
    lightness = _LIGHTEST * stages.index(action.stage) / max(len(stages) - 1, 1)
    red, green, blue = (round(value + (255 - value) * lightness) for value in HUES[action.kind])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return (red, green, blue), (20, 20, 20) if bright else (255, 255, 255)


def kinds_in(report: Report) -> list[Kind]:
    """The kinds that a timeline holds, in the order of the legend."""
    present = {action.kind for timed in report.timeline for action, _, _ in timed}
    return [kind for kind in HUES if kind in present]


def print_grid(report: Report, console: Console) -> None:
    """Print the timeline of all ranks, as wide as the terminal; a longer one goes on in blocks below each other.

    Of more than six blocks the first and the last three are shown, with a line between them that says so.
    """
    grid = _Grid.fitting(report, console)
    blocks = list(grid.blocks())
    left_out = len(blocks) - _MAX_BLOCKS
    for at, (first, last) in enumerate(blocks):
        middle = at - _MAX_BLOCKS // 2
        if left_out > 0 and 0 <= middle < left_out:
            if middle == 0:
                end = blocks[at + left_out][0]
                text = f"⋯ time {grid.time_at(first):g} to {grid.time_at(end):g} is left out; --save FILE.svg draws all ⋯"
                console.print()
                console.print(Text(text, style="dim"))
            continue
        if at:
            console.print()
        console.print(grid.ruler(first, last), no_wrap=True, crop=True)
        for rank in range(len(report.timeline)):
            console.print(grid.row(rank, first, last), no_wrap=True, crop=True)
    console.print(_legend(report))


@dataclass(frozen=True)
class _Grid:
    """How a timeline is laid over columns of characters."""

    report: Report
    scale: Fraction
    """columns a unit of time"""
    columns: int
    """columns beside the rank's name, in one block"""
    header: int
    """columns of the rank's name"""
    letters: bool
    """whether a micro-batch number has its kind before it"""

    @classmethod
    def fitting(cls, report: Report, console: Console) -> _Grid:
        """The grid with letters if they are needed or all fits with them into one block; else without."""
        header = len(f"rank {len(report.timeline) - 1} ")
        columns = max(console.width - header - 1, 12)
        coloured = console.color_system is not None and not console.no_color
        with_letters = cls(report, _scale(report, letters=True), columns, header, True)
        if not coloured or with_letters.end <= columns:
            return with_letters
        return cls(report, _scale(report, letters=False), columns, header, False)

    @property
    def end(self) -> int:
        """Columns of the whole timeline."""
        return self.column_of(self.report.makespan)

    def column_of(self, time: float) -> int:
        return round(_exact(time) * self.scale)

    def time_at(self, column: int) -> float:
        return float(column / self.scale)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last column of each block; blocks break between two marks of the ruler where that wastes little."""
        mark = self.step * self.scale
        whole = int(self.columns // mark * mark) if self.columns >= 4 * mark and mark.denominator == 1 else self.columns
        for first in range(0, self.end, whole):
            yield first, min(first + whole, self.end)

    @property
    def step(self) -> int | Fraction:
        """Time between two marks of the ruler: 1, 2, 5, 10, ... so that each has room."""
        power = Fraction(10) ** floor(log10(8 / self.scale))
        return next(step * power for step in (1, 2, 5, 10) if step * power * self.scale >= 8)

    def ruler(self, first: int, last: int) -> Text:
        """Times above the columns."""
        line = " " * (self.header + 1)
        time = ceil(first / self.scale / self.step) * self.step
        while (column := round(time * self.scale)) < last:
            line = line.ljust(self.header + 1 + column - first) + f"{float(time):g}"
            time += self.step
        return Text(line, style="dim")

    def row(self, rank: int, first: int, last: int) -> Text:
        """One rank between two columns."""
        row = Text(f"rank {rank}".ljust(self.header), style="bold")
        row.append("│", style="not bold dim")
        column = first
        for timed in self.report.timeline[rank]:
            start, end = max(self.column_of(timed[1]), first), min(self.column_of(timed[2]), last)
            if start >= end:
                continue
            row.append("·" * (start - column), style="not bold dim")
            self._append_cell(row, timed, start, end)
            column = end
        row.append("·" * (last - column), style="not bold dim")
        return row

    def _append_cell(self, row: Text, timed: Timed, start: int, end: int) -> None:
        action = timed[0]
        label = f"{action.kind.value if self.letters else ''}{action.microbatch}"
        is_begun = self.column_of(timed[1]) < start  # a block above has its label
        fill, ink = colour_of(action, self.report.placement)
        text = ("" if is_begun else label).ljust(end - start)[: end - start]
        rgb = "rgb({},{},{})".format
        row.append(text[:-1], style=Style.parse(f"not bold {rgb(*ink)} on {rgb(*fill)}"))
        # A cell ends in a thin line where its label leaves room for it, so that cells of one colour stay apart.
        edge = "▕" if text[-1] == " " and self.column_of(timed[2]) == end else text[-1]
        row.append(edge, style=Style.parse(f"not bold {rgb(*((255, 255, 255) if edge == '▕' else ink))} on {rgb(*fill)}"))


def _exact(time: float) -> Fraction:
    return Fraction(time).limit_denominator(1000)


def _scale(report: Report, *, letters: bool) -> Fraction:
    """Columns a unit of time such that the shortest action holds its label and an edge; whole columns where possible."""
    lengths = {_exact(end - start) for timed in report.timeline for _, start, end in timed if end > start}
    if not lengths:
        return Fraction(1)
    highest = max(action.microbatch for timed in report.timeline for action, _, _ in timed)
    label = len(str(highest)) + letters
    scale = Fraction(label + 1) / min(lengths)
    times = {_exact(time) for timed in report.timeline for _, start, end in timed for time in (start, end)}
    common = lcm(*(time.denominator for time in times))
    unit = Fraction(gcd(*(int(time * common) for time in times)) or 1, common)
    # Where the common unit is much finer than a label, columns are rounded instead.
    return ceil(scale * unit) / unit if scale * unit > Fraction(1, 2) else scale


def _legend(report: Report) -> Text:
    placement = report.placement
    legend = Text()
    for kind in kinds_in(report):
        for stage in placement.stages_of(0):
            fill, ink = colour_of(Action(kind, stage, 0), placement)
            style = "rgb({},{},{}) on rgb({},{},{})".format(*ink, *fill)
            legend.append(f" {kind.value} ", style=style)
        legend.append(f" {MEANINGS[kind]}   ")
    legend.append("·", style="dim")
    legend.append(" idle")
    if placement.stages_per_rank > 1:
        legend.append("\n dark to light: the stages of a rank, first to last", style="dim")
    return legend
