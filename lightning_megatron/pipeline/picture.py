"""The timeline of a simulated pipeline as a picture: SVG by itself, PNG through Pillow (the ``draw`` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Literal

from lightning_megatron.pipeline.draw import MEANINGS, RGB, colour_of, kinds_in
from lightning_megatron.pipeline.schedule import Action
from lightning_megatron.pipeline.simulate import Report

_INK, _FAINT, _LINE, _LANE, _PAPER = (31, 35, 40), (101, 109, 118), (208, 215, 222), (246, 248, 250), (255, 255, 255)
_MARGIN, _NAME, _HEAD, _LANE_HEIGHT, _GAP = 16, 52, 58, 30, 5
_CELL, _MAX_WIDTH = 26, 3200
_DIGIT = 0.6
"""width of a digit in font sizes"""


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels; ``note`` is shown when the mouse rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: RGB
    radius: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text whose ``anchor`` (left, centre or right end) and vertical middle lie at ``x``, ``y``."""

    x: float
    y: float
    text: str
    size: float
    ink: RGB
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Box | Label


def save_picture(report: Report, path: Path, *, title: str) -> None:
    """Draw a timeline into ``path``, whose ending says how.

    Raises:
        ValueError: an ending other than ``.svg`` and ``.png``.
        RuntimeError: PNG without Pillow.
    """
    ending = path.suffix.lower()
    if ending not in (".svg", ".png"):
        raise ValueError(f"cannot draw into {path.name!r}: its ending must be .svg or .png, not {ending or 'missing'!r}.")
    width, height, shapes = picture_of(report, title)
    if ending == ".svg":
        path.write_text(svg(width, height, shapes), encoding="utf-8")
    else:
        _write_png(path, width, height, shapes)


def picture_of(report: Report, title: str) -> tuple[int, int, list[Shape]]:
    """Width, height and shapes of a timeline's picture, in the order in which they are drawn."""
    lengths = [end - start for timed in report.timeline for _, start, end in timed if end > start]
    scale = min(_CELL / min(lengths, default=1.0), _MAX_WIDTH / max(report.makespan, 1e-9))
    left = _MARGIN + _NAME
    right = left + max(report.makespan * scale, 420.0)
    shapes: list[Shape] = [*_heading(report, title)]
    bottom = _HEAD + len(report.timeline) * (_LANE_HEIGHT + _GAP)
    shapes += _axis(report.makespan, scale, left, bottom)
    for rank in range(len(report.timeline)):
        shapes += _lane(report, rank, scale, left)
    shapes += _legend(report, left, bottom + 42)
    return round(right + _MARGIN), bottom + 42 + 22, shapes


def _heading(report: Report, title: str) -> Iterator[Shape]:
    yield Label(_MARGIN, 20, title, 15, _INK, bold=True)
    peaks, last = ", ".join(map(str, report.peak_in_flight)), len(report.timeline) - 1
    ranks = f"ranks 0 to {last}" if last else "the rank"
    text = f"bubble {100 * report.bubble:.1f} % of the useful time; forwards in flight on {ranks}: at most {peaks}"
    yield Label(_MARGIN, 40, text, 12, _FAINT)


def _axis(makespan: float, scale: float, left: float, bottom: float) -> Iterator[Shape]:
    step = _round_step(70 / scale)
    for tick in range(floor(makespan / step + 1e-9) + 1):
        x = left + tick * step * scale
        yield Box(x - 0.5, _HEAD - 4, 1, bottom - _HEAD + 6, _LINE)
        yield Label(x, bottom + 10, f"{tick * step:g}", 11, _FAINT, "middle")


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... (or such a fraction) that is not below ``least``."""
    power: float = 10.0 ** floor(log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _lane(report: Report, rank: int, scale: float, left: float) -> Iterator[Shape]:
    top = _HEAD + rank * (_LANE_HEIGHT + _GAP)
    middle = top + _LANE_HEIGHT / 2
    yield Label(left - 10, middle, f"rank {rank}", 12, _INK, "end")
    yield Box(left, top, report.makespan * scale, _LANE_HEIGHT, _LANE, 3)
    for action, start, end in report.timeline[rank]:
        width = (end - start) * scale
        if width <= 0:
            continue
        fill, ink = colour_of(action, report.placement)
        gap = min(1.0, width / 4)  # so that neighbours of one colour stay apart
        note = (
            f"{action}: {MEANINGS[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}, {start:g} to {end:g}"
        )
        yield Box(left + start * scale + gap / 2, top, width - gap, _LANE_HEIGHT, fill, min(3.0, width / 4), note)
        text = str(action.microbatch)
        size = min(12.0, (width - 4) / (_DIGIT * len(text)))
        if size >= 7:
            yield Label(left + (start + end) / 2 * scale, middle, text, size, ink, "middle")


def _legend(report: Report, x: float, y: float) -> Iterator[Shape]:
    stages = report.placement.stages_of(0)
    for kind in kinds_in(report):
        for stage in stages:
            fill, _ = colour_of(Action(kind, stage, 0), report.placement)
            yield Box(x, y - 6, 12, 12, fill, 2)
            x += 14
        text = MEANINGS[kind]
        yield Label(x + 4, y, text, 12, _INK)
        x += 4 + 6.6 * len(text) + 18
    if len(stages) > 1:
        yield Label(x, y, "dark to light: stages of a rank", 12, _FAINT)


def svg(width: int, height: int, shapes: list[Shape]) -> str:
    """Shapes as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="{_hex(_PAPER)}"/>',
    ]
    for shape in shapes:
        lines.append(_svg_box(shape) if isinstance(shape, Box) else _svg_label(shape))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _svg_box(box: Box) -> str:
    radius = f' rx="{box.radius:g}"' if box.radius else ""
    place = f'x="{box.x:.6g}" y="{box.y:.6g}" width="{box.width:.6g}" height="{box.height:.6g}"'
    start = f'<rect {place}{radius} fill="{_hex(box.fill)}"'
    return f"{start}><title>{escape(box.note)}</title></rect>" if box.note else f"{start}/>"


def _svg_label(label: Label) -> str:
    anchor = f' text-anchor="{label.anchor}"' if label.anchor != "start" else ""
    weight = ' font-weight="600"' if label.bold else ""
    baseline = label.y + 0.35 * label.size  # `dominant-baseline` is not drawn alike everywhere
    place = f'x="{label.x:.6g}" y="{baseline:.6g}" font-size="{label.size:.3g}"'
    return f'<text {place}{anchor}{weight} fill="{_hex(label.ink)}">{escape(label.text)}</text>'


def _hex(colour: RGB) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _write_png(path: Path, width: int, height: int, shapes: list[Shape]) -> None:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise RuntimeError(
            f"drawing {path.name} needs Pillow: pip install 'lightning-megatron[draw]'; an .svg file needs nothing."
        ) from error
    zoom = 2  # pixels of a screen with a high density
    image = Image.new("RGB", (width * zoom, height * zoom), _PAPER)
    draw = ImageDraw.Draw(image)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for shape in shapes:
        if isinstance(shape, Label):
            font = ImageFont.load_default(shape.size * zoom)
            stroke = 0.4 * zoom if shape.bold else 0  # the font has one weight
            at = (shape.x * zoom, shape.y * zoom)
            draw.text(at, shape.text, fill=shape.ink, font=font, anchor=anchors[shape.anchor], stroke_width=stroke)
            continue
        corners = (shape.x * zoom, shape.y * zoom, (shape.x + shape.width) * zoom - 1, (shape.y + shape.height) * zoom - 1)
        draw.rounded_rectangle(corners, shape.radius * zoom, fill=shape.fill)
    image.save(path)
