"""Claims about which stage holds which layers. No process group is needed."""

from itertools import combinations

import pytest

from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.partition import layers_of_stages, parse_layout, split_layers


def sizes(split: list[tuple[int, ...]]) -> list[int]:
    return [len(stage) for stage in split]


def cost(counts: list[int], first: float, last: float) -> float:
    costs = [float(count) for count in counts]
    costs[0] += first
    costs[-1] += last
    return max(costs)


def best_cost(num_layers: int, num_stages: int, first: float, last: float, least: int) -> float:
    """The least maximum over every way to cut, each stage having at least ``least`` layers (0 or 1)."""
    spare = num_layers + (1 - least) * num_stages  # shift counts so that each is at least 1
    ways = combinations(range(1, spare), num_stages - 1)
    cuts = ([b - a - (1 - least) for a, b in zip((0, *cut), (*cut, spare), strict=True)] for cut in ways)
    return min(cost(counts, first, last) for counts in cuts)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (5, 1), (8, 4), (10, 4), (7, 7), (33, 8), (80, 16)])
def test_each_layer_is_placed_once_in_order(num_layers: int, num_stages: int) -> None:
    split = split_layers(num_layers, num_stages, first_weight=0.5, last_weight=1.5)
    assert [layer for stage in split for layer in stage] == list(range(num_layers))
    assert len(split) == num_stages
    assert min(sizes(split)) >= 1


@pytest.mark.parametrize("allow_empty", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (1, 1), (0, 2.5), (1.5, 0), (0.3, 0.7), (9, 9)])
def test_no_other_cut_has_a_cheaper_most_expensive_stage(first: float, last: float, allow_empty: bool) -> None:
    for num_layers in range(1, 10):
        for num_stages in range(1, min(num_layers, 5) + 1):
            split = split_layers(num_layers, num_stages, first_weight=first, last_weight=last, allow_empty=allow_empty)
            best = best_cost(num_layers, num_stages, first, last, least=0 if allow_empty else 1)
            assert cost(sizes(split), first, last) == pytest.approx(best, abs=1e-12)


def test_the_embedding_and_the_head_count_as_layers() -> None:
    assert sizes(split_layers(30, 8, first_weight=1, last_weight=1)) == [3, 4, 4, 4, 4, 4, 4, 3]
    assert sizes(split_layers(14, 4, last_weight=2)) == [4, 4, 4, 2]


def test_layers_left_over_go_to_the_middle_from_the_back_then_to_the_ends() -> None:
    assert sizes(split_layers(9, 4)) == [2, 2, 3, 2]
    assert sizes(split_layers(10, 4)) == [2, 3, 3, 2]
    assert sizes(split_layers(11, 4)) == [2, 3, 3, 3]
    assert sizes(split_layers(3, 2)) == [1, 2]


def test_an_explicit_layout_is_taken_as_it_is_empty_stages_included() -> None:
    assert split_layers(5, 4, layout=[0, 2, 3, 0]) == [(), (0, 1), (2, 3, 4), ()]
    assert split_layers(0, 2, layout=(0, 0)) == [(), ()]


def test_fewer_layers_than_stages_are_spread_only_when_allowed() -> None:
    assert split_layers(2, 4, allow_empty=True) == [(), (0,), (1,), ()]
    with pytest.raises(ValueError, match=r"2 layers cannot give each of 4 .* at most 2 stages, .* such as \[0, 1, 1, 0\]"):
        split_layers(2, 4)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ([2, 2], r"\[2, 2\] has 2 entries for 3 pipeline stages"),
        ([2, 2, 3], r"sums to 7, but the model has 6 layers"),
        ([7, 0, -1], "holds -1"),
        ([2, 2.0, 2], "holds 2.0"),
    ],
)
def test_a_wrong_layout_is_refused_with_its_numbers(layout: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_layers(6, 3, layout=layout)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_cost_below_nothing_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        split_layers(6, 3, last_weight=weight)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="-1 layers over 2 stages"):
        split_layers(-1, 2)
    with pytest.raises(ValueError, match="6 layers over 0 stages"):
        split_layers(6, 0)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("5,8,8,7", (5, 8, 8, 7)),
        ("4,7*2,4", (4, 7, 7, 4)),
        (" 0, 3 * 2 ,0", (0, 3, 3, 0)),
        ("8*4", (8, 8, 8, 8)),
        ("30", (30,)),
        ([5, 8, 8, 7], (5, 8, 8, 7)),
        ("auto", "auto"),
        (None, None),
    ],
)
def test_a_layout_has_one_form_however_it_is_written(written: list[int] | str | None, meant: object) -> None:
    assert parse_layout(written) == meant


@pytest.mark.parametrize(
    ("written", "named"),
    [("5,,8", "''"), ("4,-1", "'-1'"), ("4*0,2", "'4*0'"), ("even", "'even'"), ("2*3*4", r"'2*3*4'"), ("", "''")],
)
def test_a_layout_that_cannot_be_read_is_refused_with_its_wrong_part(written: str, named: str) -> None:
    with pytest.raises(ValueError, match="is no number of layers") as error:
        parse_layout(written)
    assert f"pipeline_layout={written!r}: {named} " in str(error.value)


def test_a_layout_without_a_number_for_each_stage_is_refused_before_the_model_is_known() -> None:
    with pytest.raises(ValueError, match=r"\[5, 8, 7\] has 3 numbers for pp\(2\) \* vpp\(2\) = 4 pipeline stages"):
        Parallelism(pp=2, vpp=2, pipeline_layout=(5, 8, 7))
    with pytest.raises(ValueError, match=r"holds 2\.5"):
        Parallelism(pp=2, pipeline_layout=(2.5, 3))  # type: ignore[arg-type]


def test_auto_counts_the_ends_of_the_model_and_none_does_not() -> None:
    assert sizes(layers_of_stages(14, 4, "auto", last_cost=2)) == [4, 4, 4, 2]
    assert sizes(layers_of_stages(14, 4, None, last_cost=2)) == sizes(split_layers(14, 4)) == [3, 4, 4, 3]


def test_auto_leaves_a_stage_without_layers_where_its_end_costs_more_than_all_others() -> None:
    assert sizes(layers_of_stages(6, 4, "auto", last_cost=5)) == [2, 2, 2, 0]
    assert sizes(layers_of_stages(2, 4, "auto")) == [0, 1, 1, 0]


def test_a_layout_names_itself_when_a_run_is_described() -> None:
    assert Parallelism(pp=2, pipeline_layout=(3, 1)).describe(2) == "pp=2 pipeline_layout=3,1"
    assert Parallelism(pp=2, pipeline_layout="auto").describe(4) == "pp=2 dp=2 pipeline_layout=auto"
