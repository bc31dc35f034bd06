"""What auto picks, and what becomes of lists of one's own."""

from __future__ import annotations

import pytest

from lightning_megatron.pipeline.choice import choose, frozen, lists_for, style_for
from lightning_megatron.pipeline.plan import run_plan
from lightning_megatron.pipeline.schedule import Action, Kind, Placement, forward_only, gpipe, one_f_one_b, zbh1, zbv
from lightning_megatron.pipeline.simulate import ScheduleError


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "picked"),
    [(4, 8, "zbh1"), (4, 64, "1f1b"), (2, 2, "zbh1"), (2, 16, "1f1b"), (1, 4, "1f1b")],
)
def test_auto_splits_the_backward_where_micro_batches_are_few(num_ranks: int, num_microbatches: int, picked: str) -> None:
    choice = choose(Placement(num_ranks), num_microbatches)
    assert choice.name == picked
    if num_ranks > 1:
        assert f"{num_microbatches} micro-batches on {num_ranks} ranks" in choice.why


def test_auto_lays_a_v_only_where_it_knows_that_it_is_worth_it() -> None:
    assert style_for("auto", 4, 2, 4) == "v"
    assert style_for("auto", 4, 2, 64) == "round"
    assert style_for("auto", 4, 2, None) == "round"
    assert choose(Placement(4, 2, "v"), 4).name == "zbv"
    assert choose(Placement(4, 2, "v"), 64).name == "zbv", "stages stay where they are"
    assert choose(Placement(4, 2), 4).name == "interleaved"
    assert choose(Placement(4, 3), 4).name == "interleaved"


def test_lists_of_ones_own_are_placed_by_what_rank_0_runs() -> None:
    v = frozen([zbv(r, Placement(2, 2, "v"), 4) for r in range(2)])
    assert style_for(v, 2, 2) == "v"
    assert style_for(frozen([gpipe(r, Placement(2, 2), 4) for r in range(2)]), 2, 2) == "round"
    assert run_plan(v, 1, placement=Placement(2, 2, "v"), num_microbatches=4).actions == tuple(v[1])  # type: ignore[index]


def test_lists_for_more_micro_batches_lose_those_that_are_not_there() -> None:
    lists = frozen([zbh1(r, Placement(3), 6) for r in range(3)])
    for num_microbatches in range(1, 7):
        kept = lists_for(lists, Placement(3), num_microbatches)
        assert {action.microbatch for action in kept[0]} == set(range(num_microbatches))


@pytest.mark.parametrize(
    ("lists", "num_microbatches", "words"),
    [
        ([zbh1(r, Placement(2), 4) for r in range(2)], 5, ["4 micro-batches", "there are 5"]),
        ([forward_only(r, Placement(2), 4) for r in range(2)], 4, ["forwards alone", "I and W"]),
        ([one_f_one_b(0, 2, 4), one_f_one_b(1, 2, 4)[:-1]], 4, ["B1.3", "is missing from rank 1"]),
        ([one_f_one_b(0, 2, 4)], 4, ["1 schedules for a pipeline of 2 ranks"]),
        ([one_f_one_b(0, 2, 4)[::-1], one_f_one_b(1, 2, 4)], 4, ["deadlock", "rank 0 stands at B0.3"]),
    ],
)
def test_lists_that_cannot_run_are_refused(lists: list[list[Action]], num_microbatches: int, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        lists_for(frozen(lists), Placement(2), num_microbatches)
    for word in ["own lists", *words]:
        assert word in str(error.value)


def test_a_function_of_ones_own_is_named_when_it_cannot_run() -> None:
    def backwards_first(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
        return one_f_one_b(rank, placement.num_ranks, num_microbatches)[::-1]

    with pytest.raises(ScheduleError, match="backwards_first cannot run 4 micro-batches: deadlock"):
        lists_for(backwards_first, Placement(2), 4)


def test_what_is_no_list_of_actions_is_refused() -> None:
    with pytest.raises(TypeError, match="one list of lightning_megatron"):
        frozen([["F0.0", "B0.0"]])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["1f1b", "zbh1", "gpipe"])
def test_what_was_sent_is_waited_for_after_it_is_used_in_the_simulation_and_once(name: str) -> None:
    placement = Placement(4)
    for rank in range(4):
        plan = run_plan(name, rank, placement=placement, num_microbatches=8)  # type: ignore[arg-type]
        arrived = [message for messages in plan.arrived for message in messages]
        assert len(arrived) == len(set(arrived))
        for index, messages in enumerate(plan.arrived):
            for direction, (stage, microbatch) in messages:
                kinds = (Kind.F,) if direction == "forward" else (Kind.B, Kind.I)
                done = [a for a in plan.actions[:index] if a.microbatch == microbatch and a.kind in kinds]
                assert done, "it is let go after it was sent"
                assert abs(stage - rank) == 1
