"""Claims about ``python -m lightning_megatron.pipeline``: what it prints, what it draws, how it refuses."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_megatron.pipeline.__main__ import main
from lightning_megatron.pipeline.picture import Box, picture_of
from lightning_megatron.pipeline.schedule import ScheduleName, placement_for, schedule_for
from lightning_megatron.pipeline.simulate import Report, simulate

ROOT = Path(__file__).parents[2]
CASES: list[tuple[ScheduleName, int, int]] = [
    ("1f1b", 4, 1),
    ("interleaved", 4, 2),
    ("gpipe", 3, 1),
    ("zbh1", 4, 1),
    ("zbv", 4, 2),
]


def report_of(name: ScheduleName, num_ranks: int, num_local: int, num_microbatches: int = 8) -> Report:
    placement = placement_for(name, num_ranks, num_local)
    lists = [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches) for r in range(num_ranks)]
    return simulate(lists, placement)


def arguments(name: str, num_ranks: int, num_local: int, num_microbatches: int = 8) -> list[str]:
    return f"--schedule {name} --pp {num_ranks} --vpp {num_local} --microbatches {num_microbatches}".split()


@pytest.fixture(autouse=True)
def _a_plain_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "num_ranks", "num_local"), CASES)
def test_the_last_line_is_plain_and_says_what_the_simulation_says(
    name: ScheduleName, num_ranks: int, num_local: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(name, num_ranks, num_local)) == 0
    report = report_of(name, num_ranks, num_local)
    peaks = ",".join(map(str, report.peak_in_flight))
    assert capsys.readouterr().out.splitlines()[-1] == f"bubble {report.bubble:.4f} peak_in_flight {peaks}"


def test_the_line_is_that_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("interleaved", 4, 2, 14)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "bubble 0.1071 peak_in_flight 12,10,8,6"


@pytest.mark.parametrize(("name", "num_ranks", "num_local"), CASES)
def test_the_grid_shows_every_action_of_every_rank_in_order(
    name: ScheduleName, num_ranks: int, num_local: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(name, num_ranks, num_local)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for rank, timed in enumerate(report_of(name, num_ranks, num_local).timeline):
        row = "".join(line.split("│")[1] for line in lines if line.startswith(f"rank {rank} "))
        assert re.findall(r"[FBIW]\d+", row) == [f"{action.kind.value}{action.microbatch}" for action, _, _ in timed]


def test_a_long_run_shows_its_beginning_and_its_end_and_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("1f1b", 4, 1, 256)) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 60
    assert re.search(r"time \d+ to \d+ is left out", out)
    assert "F0" in out
    assert "B255" in out


def test_costs_are_taken_and_a_whole_backward_takes_its_two_parts_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ["--cost-forward", "20", "--cost-input", "25", "--cost-weight", "15", "--cost-transfer", "1.5"]
    placement = placement_for("1f1b", 4, 1)
    lists = [schedule_for("1f1b", rank=r, placement=placement, num_microbatches=8) for r in range(4)]
    for given, cost_backward in (([], 40.0), (["--cost-backward", "33"], 33.0)):
        assert main([*arguments("1f1b", 4, 1), *costs, *given]) == 0
        report = simulate(lists, placement, cost_forward=20, cost_backward=cost_backward, cost_transfer=1.5)
        out = capsys.readouterr().out
        assert f"makespan {report.makespan:g};" in out
        assert f"\nbubble {report.bubble:.4f} peak" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--schedule interleaved --pp 4 --vpp 2 --microbatches 3", "nearest legal number is 4"),
        ("--schedule 1f1b --vpp 2", "set vpp=1"),
        ("--schedule zbv --vpp 3", "not 3; set vpp=2"),
        ("--schedule interleaved --vpp 1", "raise --vpp"),
        ("--pp 0", "a pipeline of 0 ranks"),
        ("--microbatches 0", "at least 1"),
        ("--cost-forward -1", "--cost-forward=-1 is not a time"),
        ("--schedule zigzag", "zigzag"),
        ("--pp two", "--pp"),
        ("--save grid.gif", "must be .svg or .png"),
        ("--save /nowhere/at/all.svg", "/nowhere/at/all.svg"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(options.split())
    except SystemExit as exit:  # argparse's own
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert said in printed.err


@pytest.mark.parametrize(("name", "num_ranks", "num_local"), CASES)
def test_the_svg_has_a_box_for_every_action_where_and_as_long_as_it_ran(
    name: ScheduleName, num_ranks: int, num_local: int, tmp_path: Path
) -> None:
    path = tmp_path / "grid.svg"
    assert main([*arguments(name, num_ranks, num_local), "--save", str(path)]) == 0
    report = report_of(name, num_ranks, num_local)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in ElementTree.parse(path).iter(f"{space}rect") if box.find(f"{space}title") is not None]
    notes = [str(box.findtext(f"{space}title")) for box in boxes]
    expected = [timed for rank in report.timeline for timed in rank]
    assert [note.split(":")[0] for note in notes] == [str(action) for action, _, _ in expected]
    unit = min(float(box.attrib["width"]) for box in boxes) + 1  # a gap of one pixel
    for box, (_, start, end) in zip(boxes, expected, strict=True):
        assert float(box.attrib["width"]) + 1 == pytest.approx((end - start) * unit, rel=1e-3)
        assert float(box.attrib["x"]) - float(boxes[0].attrib["x"]) == pytest.approx(start * unit, rel=1e-3)


def test_boxes_of_a_picture_never_overlap_and_never_leave_it() -> None:
    width, height, shapes = picture_of(report_of("zbv", 4, 2, 40), "zbv")
    boxes = sorted((box.y, box.x, box.x + box.width) for box in shapes if isinstance(box, Box) and box.note)
    for (y, _, end), (next_y, start, _) in itertools.pairwise(boxes):
        assert next_y > y or start >= end
    assert max(end for _, _, end in boxes) < width
    assert max(y for y, _, _ in boxes) < height


def test_a_png_needs_pillow_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["--save", str(tmp_path / "grid.png")]) == 2
    assert "pip install 'lightning-megatron[draw]'" in capsys.readouterr().err


def test_a_png_is_a_picture_of_the_same_size_twice_as_dense(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "grid.png"
    assert main([*arguments("zbh1", 4, 1), "--save", str(path)]) == 0
    width, height, _ = picture_of(report_of("zbh1", 4, 1), "zbh1")
    with image.open(path) as picture:
        assert picture.size == (2 * width, 2 * height)
        assert len(picture.convert("P").getcolors()) > 4


def test_the_module_runs_as_a_command_and_explains_itself() -> None:
    command = [sys.executable, "-m", "lightning_megatron.pipeline", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python -m lightning_megatron.pipeline --schedule zbv" in done.stdout


def test_auto_says_what_it_picked_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    for num_local in (1, 2):
        assert main(["--pp", "4", "--vpp", str(num_local), "--microbatches", "4"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("zbh1: 4 ranks" if num_local == 1 else "zbv: 4 ranks, 2 stages each")
        assert lines[1].startswith("picked by auto: ")
