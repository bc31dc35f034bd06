"""Which layers each pipeline stage holds, as pure data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from lightning_megatron.parallelism import PipelineLayout


def parse_layout(layout: Sequence[int] | str | None) -> PipelineLayout:
    """A layout as users write it, in its one form: the number of layers of each stage, ``"auto"`` or ``None``.

    Args:
        layout: a list with the number of layers of each stage, in the order of the model; the same as a string,
            ``"5,8,8,7"``, where ``N*K`` stands for K stages of N layers each (``"4,7*2,4"`` is ``4,7,7,4``); ``"auto"``;
            or ``None``.

    Raises:
        ValueError: naming the part of the string that is none of these.
    """
    if layout is None:
        return None
    if layout == "auto":
        return "auto"
    if not isinstance(layout, str):
        return tuple(layout)
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\*\s*(\d+)\s*)?", part)
        if match is None or (match[2] is not None and int(match[2]) < 1):
            raise ValueError(
                f"pipeline_layout={layout!r}: {part.strip()!r} is no number of layers. Give the layers of each stage, as in "
                f"'5,8,8,7'; 'N*K' stands for K stages of N layers, as in '4,7*2,4'; 'auto' splits by cost."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def layers_of_stages(
    num_layers: int, num_stages: int, layout: PipelineLayout = None, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[tuple[int, ...]]:
    """Global layer indices of each stage under a parsed layout.

    Args:
        num_layers: layers of the whole model.
        num_stages: stages of the whole pipeline, ``pp * vpp``.
        layout: ``None`` gives every stage as near the same number as can be, and at least one; ``"auto"`` counts the
            model's ends and may leave a stage without layers; a tuple is taken as it is.
        first_cost: cost of what the first stage runs before its layers, in layers; for ``"auto"``.
        last_cost: cost of what the last stage runs after its layers, in layers; for ``"auto"``.

    Raises:
        ValueError: the numbers do not fit; see ``split_layers``.
    """
    if layout == "auto":
        return split_layers(num_layers, num_stages, first_weight=first_cost, last_weight=last_cost, allow_empty=True)
    return split_layers(num_layers, num_stages, layout=layout)


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    first_weight: float = 0.0,
    last_weight: float = 0.0,
    layout: Sequence[int] | None = None,
    allow_empty: bool = False,
) -> list[tuple[int, ...]]:
    """Global layer indices of each stage, contiguous and in order.

    Without ``layout`` the cost of the most expensive stage is as small as it can be, a layer costing 1. Among equals,
    layers left over go to the middle stages from the back, then to the last, then to the first: early stages keep the
    most activations alive, and the ends hold the embedding and the head.

    Args:
        num_layers: layers of the whole model.
        num_stages: stages of the whole pipeline, ``pp * vpp``.
        first_weight: cost of what the first stage runs before its layers (embedding), in layers.
        last_weight: cost of what the last stage runs after its layers (norm, head, loss), in layers.
        layout: the number of layers of each stage, instead of a balanced split; zeros are allowed.
        allow_empty: let a balanced split give a stage no layer.

    Raises:
        ValueError: a negative size; a layout whose length or sum is wrong; fewer layers than stages without ``allow_empty``.
    """
    if num_layers < 0 or num_stages < 1:
        raise ValueError(f"{num_layers} layers over {num_stages} stages: give 0 or more layers and at least 1 stage.")
    if layout is None:
        counts = _balanced(num_layers, num_stages, first_weight, last_weight, allow_empty)
    else:
        counts = _checked(layout, num_layers, num_stages)
    ends = list(accumulate(counts))
    return [tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def _checked(layout: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    counts = list(layout)
    if len(counts) != num_stages:
        raise ValueError(
            f"pipeline_layout {counts} has {len(counts)} entries for {num_stages} pipeline stages (pp * vpp): give one a stage."
        )
    if wrong := [count for count in counts if not isinstance(count, int) or isinstance(count, bool) or count < 0]:
        raise ValueError(
            f"pipeline_layout {counts} holds {wrong[0]!r}, which is no number of layers: give whole numbers of 0 or more."
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"pipeline_layout {counts} sums to {sum(counts)}, but the model has {num_layers} layers: place each once."
        )
    return counts


def _balanced(num_layers: int, num_stages: int, first_weight: float, last_weight: float, allow_empty: bool) -> list[int]:
    """Pour layers one by one into the cheapest stage: with equal layers this minimises the greatest cost."""
    if not (first_weight >= 0 and last_weight >= 0):
        raise ValueError(f"first_weight={first_weight} and last_weight={last_weight} are costs in layers: give 0 or more.")
    if num_layers < num_stages and not allow_empty:
        raise ValueError(
            f"{num_layers} layers cannot give each of {num_stages} pipeline stages (pp * vpp) a layer; lower pp or vpp to at "
            f"most {num_layers} stages, or give a pipeline_layout with zeros, such as {_spread(num_layers, num_stages)}."
        )
    counts = [0 if allow_empty else 1] * num_stages
    fixed = [0.0] * num_stages
    fixed[0] += first_weight
    fixed[-1] += last_weight
    last = num_stages - 1
    preference = [*range(last - 1, 0, -1), last, 0] if last else [0]
    for _ in range(num_layers - sum(counts)):
        cheapest = min(preference, key=lambda stage: fixed[stage] + counts[stage])  # the first of equals
        counts[cheapest] += 1
    return counts


def _spread(num_layers: int, num_stages: int) -> list[int]:
    return _balanced(num_layers, num_stages, 0.0, 0.0, allow_empty=True)
