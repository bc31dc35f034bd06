"""What docs/schedules.md says is what the simulation says, and its pictures are what the command draws.

To renew the pictures after a reviewed change: ``python tests/pipeline/test_docs_schedules.py`` from the repository root.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.pipeline.__main__ import main
from lightning_megatron.pipeline.schedule import ScheduleName, legal_group_size, needs, placement_for, schedule_for
from lightning_megatron.pipeline.simulate import Report, simulate

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "schedules.md"
STAGES: dict[ScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbh1": 1, "zbv": 2}


def draw(name: ScheduleName, path: Path) -> str:
    assert main(f"--schedule {name} --pp 4 --vpp {STAGES[name]} --microbatches 8 --save {path}".split()) == 0
    return path.read_text()


def report_of(name: ScheduleName, num_ranks: int, num_local: int, num_microbatches: int) -> Report:
    placement = placement_for(name, num_ranks, num_local)
    lists = [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches) for r in range(num_ranks)]
    return simulate(lists, placement)


def rows(heading: str) -> dict[str, list[str]]:
    """Cells of the table whose head begins with a heading's second column, by schedule."""
    table = PAGE.read_text().split(f"| schedule | {heading}")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in cells}


@pytest.mark.parametrize("name", STAGES)
def test_each_picture_is_what_the_command_draws(name: ScheduleName, tmp_path: Path) -> None:
    assert (DOCS / "schedules" / f"{name}.svg").read_text() == draw(name, tmp_path / "new.svg")
    assert f"(schedules/{name}.svg)" in PAGE.read_text()


def test_the_example_figures_are_simulated_ones() -> None:
    table = rows("step")
    assert table.keys() == STAGES.keys()
    for name, (step, bubble, activations) in table.items():
        num_local = STAGES[name]  # type: ignore[index]
        report = report_of(name, 4, num_local, 8)  # type: ignore[arg-type]
        assert float(step) == report.makespan / num_local
        assert float(bubble.removesuffix(" %")) / 100 == report.bubble
        assert [float(held) for held in activations.split(",")] == [held / num_local for held in report.peak_held]


def formulas(name: ScheduleName, sizes: dict[str, int]) -> tuple[Fraction, Fraction, Fraction]:
    """The page's bubble, activations and messages with numbers put in."""
    values: dict[str, Any] = {key: Fraction(value) for key, value in sizes.items()}
    bubble, activations, messages = (re.sub(r",.*", "", cell) if "min" not in cell else cell for cell in rows("bubble")[name])

    def value(text: str) -> Fraction:
        text = text.replace("−", "-").replace("·", "*")
        text = re.sub(r"([0-9)]) (?=[(A-Z])", r"\1*", text)
        return Fraction(eval(text, {"min": min}, values))

    return value(bubble), value(activations), value(messages)


@pytest.mark.parametrize("name", STAGES)
def test_the_formulas_are_what_is_simulated(name: ScheduleName) -> None:
    for num_ranks in (2, 3, 4, 6):
        for num_local in (1, 2, 3) if name in ("interleaved", "gpipe") else (STAGES[name],):
            for num_microbatches in (2 * num_ranks, 2 * num_ranks + 1, 5 * num_ranks):
                if name == "interleaved" and num_local == 1:
                    continue
                report = report_of(name, num_ranks, num_local, num_microbatches)
                group = legal_group_size(num_ranks, num_microbatches)
                assert group is not None
                sizes = {"P": num_ranks, "V": num_local, "M": num_microbatches, "G": group}
                bubble, activations, messages = formulas(name, sizes)
                assert report.bubble == pytest.approx(float(bubble))
                assert Fraction(max(report.peak_held), num_local) == activations
                assert messages == _messages(report, num_microbatches)


def _messages(report: Report, num_microbatches: int) -> Fraction:
    """Results that another rank needs, for each micro-batch."""
    placement = report.placement
    count = 0
    for rank, timed in enumerate(report.timeline):
        for action, _, _ in timed:
            count += sum(placement.rank_of(need.stage) != rank for need in needs(action, placement.num_stages))
    return Fraction(count, num_microbatches)


def test_the_blocks_of_the_page_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    said = " ".join(line.strip("# ") for line in PAGE.read_text().splitlines() if line.startswith("    # "))
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_the_line_for_scripts_is_the_one_of_the_command_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "interleaved", "--pp", "4", "--vpp", "2", "--microbatches", "14"]) == 0
    assert f"`{capsys.readouterr().out.splitlines()[-1]}`" in PAGE.read_text()


if __name__ == "__main__":
    for schedule in STAGES:
        draw(schedule, DOCS / "schedules" / f"{schedule}.svg")
