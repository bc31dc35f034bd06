"""The live mesh: one group for each rank set, axes in their own order, and the mesh that models are built under."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.mesh import Mesh, current_mesh, inside_strategy, use_mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.testing import run_distributed

CPU = torch.device("cpu")


def test_each_rank_stands_where_the_arithmetic_says_and_groups_hold_the_same_ranks() -> None:
    layout = Parallelism(tp=2, pp=2)

    def run() -> list[tuple[str, int, tuple[int, ...], list[int]]]:
        mesh = Mesh.create(layout, device=CPU)
        axes = (mesh[name] for name in ("tp", "pp", "dp", "dp_cp", "replica", "ends", "world"))
        groups = [dist.get_process_group_ranks(axis.group) if axis.group is not None else [mesh.rank] for axis in axes]
        named = [mesh[name] for name in ("tp", "pp", "dp", "dp_cp", "replica", "ends", "world")]
        return [(axis.name, axis.rank, axis.ranks, ranks) for axis, ranks in zip(named, groups, strict=True)]

    for rank, axes in enumerate(run_distributed(run, 8)):
        coordinate = layout.coordinate(rank, 8)
        for name, position, ranks, group in axes:
            assert sorted(ranks) == sorted(group)
            assert ranks[position] == rank
            assert name not in coordinate or position == coordinate[name]


def test_equal_rank_sets_share_one_group_and_blocks_of_tp_have_one_each() -> None:
    def run() -> tuple[bool, bool, tuple[int, ...]]:
        mesh = Mesh.create(Parallelism(tp=4), device=CPU)
        return mesh.tp.group is mesh.world.group, mesh["replica"].group is mesh.tp.group, mesh["tp:2"].ranks

    ranks = run_distributed(run, 4)
    assert all(shared and same for shared, same, _ in ranks)
    assert [block for _, _, block in ranks] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_the_public_device_mesh_has_the_axes_larger_than_one_on_the_same_groups() -> None:
    def run() -> tuple[tuple[str, ...], tuple[int, ...], bool]:
        mesh = Mesh.create(Parallelism(tp=2), device=CPU)
        assert mesh.device_mesh is not None
        names = mesh.device_mesh.mesh_dim_names
        assert names is not None
        return names, tuple(mesh.device_mesh.shape), mesh.device_mesh.get_group("tp") is mesh.tp.group

    assert run_distributed(run, 4) == [(("dp", "tp"), (2, 2), True)] * 4


def test_a_layout_that_does_not_fit_fails_before_a_group_is_made() -> None:
    def run() -> str:
        with pytest.raises(ValueError, match="does not divide world_size=2") as error:
            Mesh.create(Parallelism(tp=3), device=CPU)
        return str(error.value)

    run_distributed(run, 2)


def test_an_axis_that_the_layout_does_not_have_is_this_rank_alone() -> None:
    alone = Mesh()
    assert (alone["anything"].size, alone["anything"].rank, alone.coordinate) == (1, 0, "[rank=0]")
    assert not alone.sequence_parallel
    assert copy.deepcopy(alone) is alone


def test_the_ambient_mesh_is_there_inside_the_block_only() -> None:
    mesh = Mesh(parallelism=Parallelism(tp=1), rank=5)
    assert not inside_strategy()
    with use_mesh(mesh):
        assert inside_strategy()
        assert current_mesh() is mesh
    assert current_mesh().rank == 0
