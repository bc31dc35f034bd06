"""Rank arithmetic: every rank has one coordinate, groups partition the world, and what does not fit says why."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lightning_megatron.parallelism import DENSE_AXES, Parallelism, pipeline_edges

LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({}, 4),
    ({"tp": 2, "pp": 2}, 8),
    ({"tp": 2, "cp": 2, "pp": 3}, 24),
    ({"tp": 4, "pp": 2, "order": "pp-tp-dp-cp"}, 16),
    ({"tp": 2, "pp": 2, "ep": 4}, 16),
    ({"pp": 2, "vpp": 2, "placement": "v"}, 4),
]


@pytest.mark.parametrize(("sizes", "world_size"), LAYOUTS)
def test_ranks_and_coordinates_are_one_to_one(sizes: dict[str, Any], world_size: int) -> None:
    layout = Parallelism(**sizes)
    dp = layout.data_parallel_size(world_size)
    found = [tuple(layout.coordinate(rank, world_size)[axis] for axis in DENSE_AXES) for rank in range(world_size)]
    assert sorted(found) == sorted(product(range(layout.tp), range(layout.cp), range(layout.pp), range(dp)))


@pytest.mark.parametrize(("sizes", "world_size"), LAYOUTS)
@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp", "cp"), ("pp", "cp", "tp"), ("ep",), ("edp",)])
def test_groups_partition_the_world(sizes: dict[str, Any], world_size: int, axes: tuple[str, ...]) -> None:
    groups = Parallelism(**sizes).groups(axes, world_size)
    assert sorted(rank for group in groups for rank in group) == list(range(world_size))
    assert len({len(group) for group in groups}) == 1


def test_tensor_parallel_peers_are_neighbours_and_replicas_far_apart() -> None:
    layout = Parallelism(tp=2, pp=2)
    assert layout.groups(("tp",), 8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups(("dp",), 8) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_global_rank_zero_holds_the_last_stage() -> None:
    layout = Parallelism(tp=2, pp=4)
    position = layout.coordinate(0, 8)
    assert layout.stage_of(position["pp"], 0) == layout.num_stages - 1
    both_ends = Parallelism(pp=2, vpp=2, placement="v")
    assert [both_ends.stage_of(both_ends.coordinate(0, 2)["pp"], i) for i in (0, 1)] == [0, 3]


def test_expert_axes_lie_inside_a_stage_and_share_its_pipeline() -> None:
    layout = Parallelism(tp=2, pp=2, ep=4)
    for group in layout.groups(("ep",), 16):
        assert len({layout.coordinate(rank, 16)["pp"] for rank in group}) == 1


def test_activations_go_round_the_ring_only_with_several_stages_a_rank() -> None:
    assert pipeline_edges(Parallelism(pp=3), 3) == [(2, 1), (1, 0)]
    assert pipeline_edges(Parallelism(pp=3, vpp=2), 3) == [(2, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp=0 is not a size"),
        ({"order": "tp-pp-dp"}, "must name tp, cp, pp and dp once each"),
        ({"vpp": 2}, "vpp=2 needs pp >= 2"),
        ({"pp": 2, "vpp": 3, "placement": "v"}, "vpp=3; set vpp=2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallelism(**sizes)


def test_a_world_that_does_not_divide_is_refused_with_the_numbers_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"pp\(3\) = 6 does not divide world_size=8; launch a multiple of 6"):
        Parallelism(tp=2, pp=3).data_parallel_size(8)
    with pytest.raises(ValueError, match=r"ep\(3\) \* etp\(1\) = 3 does not divide the 4 ranks"):
        Parallelism(pp=2, ep=3).data_parallel_size(8)
