"""The pipeline executor against its own theory: measured step time over simulated step time, for every schedule.

Each stage sleeps instead of computing (by default 20 ms forward, 40 ms backward, in two halves where a schedule splits it),
so that ranks on a machine with few cores run side by side as if each had a device. What is measured is everything else:
waiting for neighbours, messages over gloo, and the executor's own host time.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --schedules 1f1b zbh1 --microbatches 16 --steps 9

A row is: schedule with stages a rank V and micro-batches M, simulated and measured milliseconds a step (the median; the
fastest beside it), the ratio of the two, the bubble of both, and the processor time of the busiest rank for each action,
which is what the executor itself costs. The exit code is 1 where a ratio is above --limit. On a machine that is busy
otherwise, ratios say nothing; processor time still does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.executor import PipelineExecutor, Step
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.schedule import ScheduleName, placement_for, schedule_for
from lightning_megatron.pipeline.simulate import simulate
from lightning_megatron.pipeline.stage import cut_to_stages
from lightning_megatron.testing import run_distributed
from lightning_megatron.weight_gradients import now_or_later

STAGES = {"1f1b": 1, "interleaved": 2, "gpipe": 1, "zbh1": 1, "zbv": 2}


SPIN_SECONDS = 0.0005
"""The end of a sleep is waited for awake: the system wakes a sleeper 0.1 to 0.2 ms late."""


def _take(seconds: float) -> None:
    """Take this time, by the clock."""
    end = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - SPIN_SECONDS))
    while time.monotonic() < end:
        pass


class _Sleep(torch.autograd.Function):
    """``hidden + weight``, for a time forward, a time backward to the input, and a time backward to the weight."""

    weight_input = 1  # its gradient can wait

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: tuple[float, float, float]) -> Tensor:
        forward_s, *ctx.seconds = seconds
        _take(forward_s)
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input_s, weight_s = ctx.seconds

        def weight_gradient() -> Tensor:
            _take(weight_s)
            return grad.sum().view(1)

        _take(input_s)
        return grad, now_or_later(ctx, weight_gradient), None


class SleepingLayer(nn.Module):
    """Adds a number, slowly."""

    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seconds = seconds

    def forward(self, hidden: Tensor) -> Tensor:
        """``[...] -> [...]``."""
        added: Tensor = _Sleep.apply(hidden, self.weight, self.seconds)
        return added


class SleepingModel(PipelineModel):
    """One sleeping layer a stage."""

    def __init__(self, num_layers: int, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepingLayer(seconds) for _ in range(num_layers))

    def first(self, value: Tensor) -> Tensor:
        """The hidden state is the input."""
        # On a model's first stage nothing else asks for the gradient of the input, which the schedules count as work.
        return value.clone().requires_grad_(torch.is_grad_enabled())

    def last(self, hidden: Tensor) -> Tensor:
        """The output is the loss."""
        return hidden.sum()


@dataclass(frozen=True)
class Row:
    """One schedule's result; times in seconds."""

    schedule: ScheduleName
    stages_per_rank: int
    num_microbatches: int
    simulated: float
    useful: float
    measured: float
    fastest: float
    host: float

    @property
    def ratio(self) -> float:
        """Measured over simulated time."""
        return self.measured / self.simulated


def measure(name: ScheduleName, options: Namespace) -> Row:
    """Simulate a schedule, then run it on ``options.ranks`` processes."""
    placement = placement_for(name, options.ranks, STAGES[name])
    num_microbatches = options.microbatches
    lists = [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches) for r in range(options.ranks)]
    forward_s, input_s, weight_s = (ms / 1000 for ms in (options.forward_ms, options.input_ms, options.weight_ms))
    costs = {"cost_forward": forward_s, "cost_input": input_s, "cost_weight": weight_s, "cost_backward": input_s + weight_s}
    report = simulate(lists, placement, **costs)

    def run() -> list[tuple[float, float, float]]:
        return _steps(name, num_microbatches, (forward_s, input_s, weight_s), options)

    timeout = 60 + 4 * options.steps * report.makespan
    ranks = run_distributed(run, options.ranks, timeout_seconds=timeout, collective_timeout_seconds=timeout)
    steps = list(zip(*ranks, strict=True))[options.warmup :]
    times = [max(end for _, end, _ in step) - min(start for start, _, _ in step) for step in steps]
    host = statistics.median(
        max(cpu / len(actions) for (_, _, cpu), actions in zip(step, lists, strict=True)) for step in steps
    )
    useful = report.makespan / (1 + report.bubble)
    return Row(name, STAGES[name], num_microbatches, report.makespan, useful, statistics.median(times), min(times), host)


def _steps(
    name: ScheduleName, num_microbatches: int, seconds: tuple[float, float, float], options: Namespace
) -> list[tuple[float, float, float]]:
    """Start and end of each step on this rank, by the machine's clock, and its processor time."""
    placement = placement_for(name, options.ranks, STAGES[name])
    layout = Parallelism(pp=options.ranks, vpp=STAGES[name], placement=placement.style)
    mesh = Mesh.create(layout, device=torch.device("cpu"))
    num_stages = placement.num_stages
    model = SleepingModel(num_stages, seconds)
    parts = {stage: StagePart(stage, num_stages, (stage,)) for stage in placement.stages_of(mesh.pp.rank)}
    cut_to_stages(model, list(parts.values()), ends_apart=placement.style != "v")
    executor = PipelineExecutor(mesh, placement, parts=parts, context=nullcontext, model=model)
    model._stage_runner = executor.runner
    batch = torch.zeros(options.hidden)
    step = Step(
        "training_step",
        run=lambda microbatch, is_last: model(batch),
        loss=lambda microbatch, output: output,
        signatures=["same"] * num_microbatches,
        seed_names=[("benchmark", m) for m in range(num_microbatches)],
    )
    times = []
    for _ in range(options.warmup + options.steps):
        dist.barrier()
        start, cpu = time.monotonic(), time.process_time()
        executor.run(name, step, num_microbatches=num_microbatches)
        times.append((start, time.monotonic(), time.process_time() - cpu))
    return times


def table_of(rows: list[Row], options: Namespace) -> Table:
    """The result for people."""
    parts = f"{options.forward_ms:g} ms forward, {options.input_ms:g} + {options.weight_ms:g} ms backward"
    table = Table(title=f"{options.ranks} ranks on gloo, stages that sleep {parts}", title_justify="left")
    headings = (
        "V",
        "M",
        "simulated ms",
        "measured ms",
        "fastest ms",
        "ratio",
        "bubble simulated",
        "bubble measured",
        "host ms/action",
    )
    table.add_column("schedule")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{1000 * value:.1f}" for value in (row.simulated, row.measured, row.fastest)]
        bubbles = [f"{value / row.useful - 1:.3f}" for value in (row.simulated, row.measured)]
        ratio = f"{row.ratio:.3f}" if row.ratio <= options.limit else f"[red]{row.ratio:.3f}[/]"
        sizes = [str(row.stages_per_rank), str(row.num_microbatches)]
        table.add_row(row.schedule, *sizes, *times, ratio, *bubbles, f"{1000 * row.host:.2f}")
    return table


def parse_options(arguments: list[str] | None = None) -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=list(STAGES), default=list(STAGES), help="which to run")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="forward of a stage")
    parser.add_argument("--input-ms", type=float, default=20.0, help="backward of a stage to its input")
    parser.add_argument("--weight-ms", type=float, default=20.0, help="backward of a stage to its weight")
    parser.add_argument("--hidden", type=int, default=4096, help="numbers in a hidden state")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--limit", type=float, default=1.05, help="ratio above which the exit code is 1")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options()
    torch.set_num_threads(1)
    console = Console()
    rows = []
    for name in options.schedules:
        try:
            rows.append(measure(name, options))
        except AssertionError as error:
            console.print(f"{name} did not run: {str(error).strip().splitlines()[-1]}", style="red")
    console.print(table_of(rows, options))
    return int(len(rows) < len(options.schedules) or any(row.ratio > options.limit for row in rows))


if __name__ == "__main__":
    sys.exit(main())
