"""Bucket layouts are plain data: these tests need no process group."""

from __future__ import annotations

import pytest

from lightning_megatron.optim.layout import BucketPlan, ParamSlot, overlap, plan_buckets, shard_range

SIZES = [1, 63, 64, 65, 200, 7, 0, 1000, 129]


def slots(**options: object) -> list[ParamSlot]:
    return [ParamSlot(f"p{i}", numel, "float32", **options) for i, numel in enumerate(SIZES)]  # type: ignore[arg-type]


def names(plan: BucketPlan) -> list[str]:
    return [placement.name for placement in plan.placements]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_numel", [1, 100, 500, 10**9])
def test_every_parameter_lies_in_one_bucket_in_backward_order(bucket_numel: int, num_shards: int) -> None:
    plans = plan_buckets(slots(), bucket_numel=bucket_numel, num_shards=num_shards)
    assert [name for plan in plans for name in names(plan)] == [slot.name for slot in reversed(slots())]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_numel", [1, 100, 500, 10**9])
def test_placements_are_aligned_disjoint_and_inside_equal_aligned_shards(bucket_numel: int, num_shards: int) -> None:
    for plan in plan_buckets(slots(), bucket_numel=bucket_numel, num_shards=num_shards):
        ends = [0] + [placement.stop for placement in plan.placements]
        assert all(placement.start >= end for placement, end in zip(plan.placements, ends, strict=False))
        assert all(placement.start % 64 == 0 for placement in plan.placements)
        assert plan.numel >= ends[-1]
        assert plan.numel % (num_shards * 64) == 0
        assert plan.numel > 0


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
@pytest.mark.parametrize("bucket_numel", [1, 500, 10**9])
def test_shards_cover_every_element_of_a_parameter_once(bucket_numel: int, num_shards: int) -> None:
    for plan in plan_buckets(slots(), bucket_numel=bucket_numel, num_shards=num_shards):
        shards = [shard_range(plan, index) for index in range(num_shards)]
        assert [start for start, _ in shards] == [0] + [stop for _, stop in shards[:-1]]
        assert shards[-1][1] == plan.numel
        for placement in plan.placements:
            parts = [part for shard in shards if (part := overlap(placement, shard)) is not None]
            covered = [element for part in parts for element in range(part.start, part.stop)]
            assert covered == list(range(placement.stop - placement.start))
            assert all(part.stop - part.start == part.shard_stop - part.shard_start for part in parts)


def test_an_overlap_names_the_same_elements_in_both_coordinates() -> None:
    (plan,) = plan_buckets(slots(), bucket_numel=10**9, num_shards=3)
    for index in range(3):
        shard = shard_range(plan, index)
        for placement in plan.placements:
            part = overlap(placement, shard)
            if part is not None:
                assert placement.start + part.start == shard[0] + part.shard_start


def test_a_bucket_is_closed_once_it_is_large_enough() -> None:
    plans = plan_buckets(slots(), bucket_numel=500, num_shards=2)
    assert [names(plan) for plan in plans] == [["p8", "p7"], ["p6", "p5", "p4", "p3", "p2"], ["p1", "p0"]]
    assert len(plan_buckets(slots(), bucket_numel=1, num_shards=2)) == 8  # the empty parameter rides with the next one


def test_dtypes_experts_and_dense_parameters_do_not_share_buckets() -> None:
    params = [
        ParamSlot("a", 10, "float32"),
        ParamSlot("b", 10, "bfloat16"),
        ParamSlot("c", 10, "float32", expert=True),
        ParamSlot("d", 10, "float32"),
    ]
    plans = plan_buckets(params, bucket_numel=10**9, num_shards=2)
    assert [(plan.dtype_key, plan.expert, names(plan)) for plan in plans] == [
        ("float32", True, ["c"]),
        ("bfloat16", False, ["b"]),
        ("float32", False, ["d", "a"]),
    ]


def test_a_tied_parameter_is_cut_alike_whatever_else_a_stage_holds() -> None:
    tied = ParamSlot("embedding", 1000, "float32", tied=True)
    first = plan_buckets([tied, *slots()], bucket_numel=10**9, num_shards=3)
    last = plan_buckets([*slots()[:3], tied], bucket_numel=50, num_shards=3)
    alone = [[plan for plan in plans if plan.tied] for plans in (first, last)]
    assert alone[0] == alone[1]
    assert [names(plan) for plan in alone[0]] == [["embedding"]]


@pytest.mark.parametrize("wrong", [{"bucket_numel": 0}, {"num_shards": 0}, {"alignment": 0}])
def test_sizes_below_one_are_refused_with_their_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=0"):
        plan_buckets(slots(), **{"bucket_numel": 10, "num_shards": 1, **wrong})


def test_a_model_without_trainable_parameters_has_no_buckets() -> None:
    assert plan_buckets([], bucket_numel=10, num_shards=2) == []
