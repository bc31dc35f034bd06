"""``lightning-megatron checkpoint inspect | verify | consolidate``: look after checkpoints on the command line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_megatron.checkpoint.inspection import Summary, consolidate, summarize, verify


def parser() -> ArgumentParser:
    """The command line."""
    top = ArgumentParser(prog="lightning-megatron", description="Tools for lightning_megatron.")
    checkpoint = top.add_subparsers(required=True, metavar="COMMAND").add_parser("checkpoint", help="look after checkpoints")
    commands = checkpoint.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="layout, step, tensors and sizes of a checkpoint")
    inspect.add_argument("dir", type=Path, metavar="DIR")
    inspect.add_argument("--all", action="store_true", help="list every tensor, those of the optimizers too")
    inspect.set_defaults(run=_inspect)
    check = commands.add_parser("verify", help="read everything and compare shapes and checksums; exit code 1 if it is damaged")
    check.add_argument("dir", type=Path, metavar="DIR")
    check.set_defaults(run=_verify)
    one = commands.add_parser("consolidate", help="write one file with the unsharded state dict")
    one.add_argument("dir", type=Path, metavar="DIR")
    one.add_argument("file", type=Path, metavar="FILE")
    one.add_argument("--optimizer", action="store_true", help="with the states of the optimizers")
    one.set_defaults(run=_consolidate)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, or 1 if the checkpoint is missing, incomplete or damaged."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options, Console())
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return code


def _inspect(options: Namespace, console: Console) -> int:
    summary = summarize(options.dir)
    console.print(_facts(summary))
    console.print(_tensors(summary, every=options.all))
    return 0


def _facts(summary: Summary) -> Table:
    table = Table(title=str(summary.path), show_header=False, title_justify="left")
    ours, sizes = summary.meta.get("lightning_megatron", {}), summary.num_bytes
    layout = ours.get("layout", {})
    shown = [f"{name}={size}" for name, size in layout.items() if name in _AXES and size != 1]
    rows = {
        "state": "\n".join(("incomplete", *summary.missing)) if summary.missing else "complete",
        "step": summary.meta.get("global_step", "?"),
        "epoch": summary.meta.get("epoch", "?"),
        "written by": f"{' '.join(shown) or 'one rank a replica'} over {layout.get('world_size', '?')} rank(s)",
        "seed": ours.get("seed", "?"),
        "between steps": "gradients of earlier batches included" if "per_token" in ours else "no",
        "model": f"{sum(t.key.startswith('model.') for t in summary.tensors)} tensors, {_size(sizes('model.'))}",
        "optimizers": f"{summary.num_optimizers}, {_size(sizes('optimizer_'))}",
        "on the disk": _size(summary.file_bytes),
    }
    if summary.leftovers:
        rows["beside it"] = f"{len(summary.leftovers)} leftover(s) of interrupted saves, cleaned by the next save"
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _tensors(summary: Summary, *, every: bool) -> Table:
    table = Table("tensor", "shape", "dtype", "parts", "size")
    for tensor in summary.tensors:
        if every or tensor.key.startswith("model."):
            dtype = str(tensor.dtype).removeprefix("torch.")
            size = _size(tensor.num_bytes)
            table.add_row(tensor.key, "×".join(map(str, tensor.shape)) or "0-dim", dtype, str(tensor.num_parts), size)
    return table


_AXES = ("tp", "pp", "cp", "vpp", "ep", "etp")


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _verify(options: Namespace, console: Console) -> int:
    problems = verify(options.dir)
    for problem in problems:
        console.print(problem, highlight=False, soft_wrap=True)
    if not problems:
        console.print(f"{options.dir} is sound: all parts are there, of their shapes and with their checksums.", soft_wrap=True)
    return 1 if problems else 0


def _consolidate(options: Namespace, console: Console) -> int:
    number = consolidate(options.dir, options.file, with_optimizer=options.optimizer)
    console.print(f"{options.file}: state_dict of {number} tensors.", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
