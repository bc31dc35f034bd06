"""What a run looks like, on one screen: axes, and what each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_megatron.comm import all_gather_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.strategy.prepare import PreparedModule


@dataclass(frozen=True)
class RankSummary:
    """One row of the layout table."""

    rank: int
    position: dict[str, int]
    stages: list[str]
    num_parameters: int
    parameter_bytes: int


def summarize(prepared: PreparedModule) -> RankSummary:
    """What this rank holds."""
    mesh = prepared.mesh
    parameters = [param for _, param in prepared.named_parameters()]
    stages = [_describe(part) for part in prepared.parts.values()]
    return RankSummary(
        mesh.rank,
        {name: mesh[name].rank for name in ("dp", "pp", "cp", "tp")},
        stages,
        sum(param.numel() for param in parameters),
        sum(param.numel() * param.element_size() for param in parameters),
    )


def _describe(part: object) -> str:
    from lightning_megatron.pipeline.model import StagePart

    assert isinstance(part, StagePart)
    if part.num_stages == 1:
        return "whole model"
    first, last = (part.layers[0], part.layers[-1]) if part.layers else (0, -1)
    layers = [f"layers {first}-{last}"] if last > first else [f"layer {first}"] * len(part.layers)
    units = ["first"] * part.is_first + layers
    return f"{part.stage}: {', '.join(units + ['last'] * part.is_last) or 'no layers'}"


def print_layout(prepared: PreparedModule, console: Console) -> None:
    """Gather every rank's summary and print the table on global rank 0. All ranks call it."""
    mesh = prepared.mesh
    rows = all_gather_object(summarize(prepared), mesh.world)
    if mesh.rank == 0:
        console.print(layout_table(rows, mesh))


def layout_table(rows: list[RankSummary], mesh: Mesh) -> Table:
    """The table: one row a rank; replicas beyond the first are left out, since they hold the same."""
    shown = [name for name in ("dp", "pp", "cp", "tp") if mesh[name].size > 1]
    title = f"MegatronStrategy: {mesh.parallelism.describe(mesh.world_size)} over {mesh.world_size} rank(s)"
    table = Table(title=title, title_justify="left")
    for heading in ("rank", *shown):
        table.add_column(heading, justify="right")
    table.add_column("stage")
    table.add_column("parameters", justify="right")
    table.add_column("bytes", justify="right")
    for row in rows:
        if row.position["dp"] == 0:
            cells = [str(row.position[name]) for name in shown]
            size = f"{row.parameter_bytes / 2**20:,.1f} MiB"
            table.add_row(str(row.rank), *cells, "; ".join(row.stages), f"{row.num_parameters:,}", size)
    if mesh.dp.size > 1:
        table.caption = f"{mesh.dp.size} replicas hold the same; the first is shown."
    return table
