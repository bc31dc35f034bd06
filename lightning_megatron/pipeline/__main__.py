"""``python -m lightning_megatron.pipeline``: print, measure and draw a schedule before anything is trained."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from rich.console import Console

from lightning_megatron.pipeline.choice import choose, style_for
from lightning_megatron.pipeline.draw import print_grid
from lightning_megatron.pipeline.picture import save_picture
from lightning_megatron.pipeline.schedule import Placement, ScheduleName, placement_for, schedule_for
from lightning_megatron.pipeline.simulate import Report, simulate

_PROGRAM = "python -m lightning_megatron.pipeline"
_EXAMPLES = f"""
examples:
  {_PROGRAM} --schedule 1f1b --pp 4 --microbatches 8
  {_PROGRAM} --schedule interleaved --pp 4 --vpp 2 --microbatches 14
  {_PROGRAM} --schedule zbv --pp 4 --microbatches 8 --save zbv.svg
  {_PROGRAM} --pp 8 --microbatches 32 --cost-forward 21 --cost-backward 40 --cost-transfer 1.5

The last line is for scripts: `bubble` is the idle time of the busiest rank as a part of its useful time, and
`peak_in_flight` is, for each rank, the most forwards (of one stage each) whose backward has not run. docs/schedules.md
explains each schedule.
"""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line; exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def parser() -> ArgumentParser:
    """The command line."""
    made = _Parser(
        prog=_PROGRAM,
        description="Simulate a pipeline schedule and draw its timeline: a row a rank, time to the right.",
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("--schedule", choices=get_args(ScheduleName), default="auto", help="its name (default: auto)")
    made.add_argument("--pp", type=int, default=4, metavar="P", help="pipeline ranks (default: 4)")
    made.add_argument("--vpp", type=int, metavar="V", help="stages on each rank (default: 2 for interleaved and zbv, else 1)")
    made.add_argument("--microbatches", type=int, default=8, metavar="M", help="micro-batches of a step (default: 8)")
    costs = made.add_argument_group("times of one action of one stage, in any unit")
    costs.add_argument("--cost-forward", type=float, default=1.0, metavar="TIME", help="forward (default: 1)")
    costs.add_argument("--cost-input", type=float, default=1.0, metavar="TIME", help="backward to the input (default: 1)")
    costs.add_argument("--cost-weight", type=float, default=1.0, metavar="TIME", help="backward to the weights (default: 1)")
    costs.add_argument("--cost-backward", type=float, metavar="TIME", help="whole backward (default: the two together)")
    costs.add_argument(
        "--cost-transfer", type=float, default=0.0, metavar="TIME", help="message between two ranks (default: 0)"
    )
    made.add_argument("--save", type=Path, metavar="FILE", help="draw the timeline into FILE.svg or FILE.png")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (``sys.argv`` if not given).

    Returns:
        The exit code: 0, or 2 after a one-line message on standard error.
    """
    made = parser()
    options = made.parse_args(arguments)
    try:
        title, why, report = _simulated(options)
        if options.save is not None:
            save_picture(report, options.save, title=title)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{made.prog}: error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    console.print(title, style="bold")
    if why:
        console.print(f"picked by auto: {why}", style="dim")
    print_grid(report, console)
    console.print(_summary(report), style="dim")
    sys.stdout.flush()
    print(f"bubble {report.bubble:.4f} peak_in_flight {','.join(map(str, report.peak_in_flight))}")
    return 0


def _simulated(options: Namespace) -> tuple[str, str, Report]:
    """A title that says what runs, why where ``auto`` picked it, and how it runs."""
    costs = {f"cost_{name}": getattr(options, f"cost_{name}") for name in ("forward", "input", "weight", "transfer")}
    whole = options.cost_backward
    costs["cost_backward"] = costs["cost_input"] + costs["cost_weight"] if whole is None else whole
    for cost_name, cost in costs.items():
        if not 0 <= cost < float("inf"):
            raise ValueError(f"--{cost_name.replace('_', '-')}={cost:g} is not a time; give 0 or more.")
    name, num_microbatches = options.schedule, options.microbatches
    vpp = options.vpp if options.vpp is not None else 2 if name in ("interleaved", "zbv") else 1
    if name == "interleaved" and vpp == 1:
        raise ValueError("schedule 'interleaved' needs 2 or more stages a rank, not vpp=1; raise --vpp, or use '1f1b'.")
    placement, why = placement_for(name, options.pp, vpp), ""
    if name == "auto":
        placement = Placement(options.pp, vpp, style_for(name, options.pp, vpp, num_microbatches))
        choice = choose(placement, num_microbatches)
        name, why = choice.name, choice.why
    lists = [
        schedule_for(name, rank=rank, placement=placement, num_microbatches=num_microbatches) for rank in range(options.pp)
    ]
    stages = f", {vpp} stages each" if vpp > 1 else ""
    title = f"{name}: {options.pp} rank{'s' * (options.pp > 1)}{stages}, {num_microbatches} micro-batches"
    return title, why, simulate(lists, placement, **costs)


def _summary(report: Report) -> str:
    """The figures that the last line has no room for."""
    by_rank = [f"idle between first and last action {', '.join(f'{idle:g}' for idle in report.idle_inside)}"]
    if report.peak_held != report.peak_in_flight:
        by_rank.append(f"held until the weight part {', '.join(map(str, report.peak_held))}")
    first = f"makespan {report.makespan:g}; bubble {100 * report.bubble:.1f} % of the useful time"
    return f"{first}\nby rank: {'; '.join(by_rank)}"


if __name__ == "__main__":
    sys.exit(main())
