"""Claims about the simulation itself: worked examples, golden grids, and that every planted fault is found and named.

To renew the golden grids after a reviewed change: ``python tests/pipeline/test_simulate.py`` from the repository root.
"""

from pathlib import Path

import pytest

from lightning_megatron.pipeline.schedule import Action, Kind, Placement, ScheduleName, placement_for, schedule_for
from lightning_megatron.pipeline.simulate import ScheduleError, check_complete, render, simulate

GOLDEN = Path(__file__).parent / "golden"
GRIDS: list[tuple[ScheduleName, int, int, int]] = [
    ("1f1b", 4, 1, 6),
    ("1f1b", 4, 1, 2),
    ("interleaved", 2, 2, 5),
    ("interleaved", 4, 2, 4),
    ("interleaved", 4, 2, 9),
    ("gpipe", 4, 2, 3),
    ("forward_only", 4, 2, 6),
    ("zbh1", 4, 1, 8),
    ("zbv", 4, 2, 8),
    ("zbv", 3, 2, 2),
]


def lists_of(name: ScheduleName, placement: Placement, num_microbatches: int) -> list[list[Action]]:
    ranks = range(placement.num_ranks)
    return [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches) for r in ranks]


def grid_of(name: ScheduleName, num_ranks: int, num_local: int, num_microbatches: int) -> tuple[Path, str]:
    placement = placement_for(name, num_ranks, num_local)
    report = simulate(lists_of(name, placement, num_microbatches), placement)
    return GOLDEN / f"{name}_p{num_ranks}_v{num_local}_m{num_microbatches}.txt", render(report)


def parse(text: str) -> list[Action]:
    return [Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in text.split()]


@pytest.mark.parametrize(("name", "num_ranks", "num_local", "num_microbatches"), GRIDS)
def test_schedules_look_as_they_did_when_they_were_reviewed(
    name: ScheduleName, num_ranks: int, num_local: int, num_microbatches: int
) -> None:
    path, grid = grid_of(name, num_ranks, num_local, num_microbatches)
    assert grid == path.read_text()


def test_no_golden_grid_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {grid_of(*case)[0].name for case in GRIDS}


# Times, by hand


def test_times_bubble_and_memory_of_two_ranks_are_as_worked_out_by_hand() -> None:
    report = simulate([parse("F0.0 F0.1 B0.0 B0.1"), parse("F1.0 B1.0 F1.1 B1.1")], Placement(2))
    assert [(str(action), start, end) for action, start, end in report.timeline[0]] == [
        ("F0.0", 0, 1),
        ("F0.1", 1, 2),
        ("B0.0", 4, 6),
        ("B0.1", 7, 9),
    ]
    assert [(str(action), start, end) for action, start, end in report.timeline[1]] == [
        ("F1.0", 1, 2),
        ("B1.0", 2, 4),
        ("F1.1", 4, 5),
        ("B1.1", 5, 7),
    ]
    assert report.makespan == 9
    assert report.bubble == 3 / 6
    assert report.idle_inside == (3, 0)
    assert report.peak_in_flight == report.peak_held == (2, 1)
    assert report.peak_buffered == (0, 1)  # F0.1's output waits from 2 to 4


def test_a_transfer_takes_its_time_and_an_edge_carries_one_message_at_a_time() -> None:
    report = simulate([parse("F0.0 F0.1 F0.2"), parse("F1.0 F1.1 F1.2")], Placement(2), cost_transfer=2.0)
    assert [start for _, start, _ in report.timeline[1]] == [3, 5, 7]


def test_two_directions_of_one_pair_of_ranks_do_not_hold_each_other_up() -> None:
    lists = [parse("F0.0 F0.1 B0.0 B0.1"), parse("F1.0 B1.0 F1.1 B1.1")]
    report = simulate(lists, Placement(2), cost_forward=1, cost_backward=1, cost_transfer=2.0)
    # B1.0 ends at 5 and F0.1 arrives at 5; B0.0 starts at 7, as if nothing else travelled.
    assert report.timeline[0][2] == (Action(Kind.B, 0, 0), 7, 8)


def test_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    placement = Placement(2, 2, "v")
    report = simulate([parse("F0.0 F3.0"), parse("F1.0 F2.0")], placement, cost_transfer=1.0)
    assert [start for _, start, _ in (*report.timeline[0], *report.timeline[1])] == [0, 5, 2, 3]


def test_activations_of_a_split_backward_are_in_flight_until_i_and_held_until_w() -> None:
    report = simulate([parse("F0.0 I0.0 F0.1 I0.1 W0.0 W0.1")], Placement(1))
    assert report.peak_in_flight == (1,)
    assert report.peak_held == (2,)
    assert report.makespan == 6
    assert report.bubble == 0


def test_whole_and_split_backwards_may_meet_in_one_pipeline() -> None:
    report = simulate([parse("F0.0 B0.0"), parse("F1.0 I1.0 W1.0")], Placement(2))
    assert report.timeline[0][1] == (Action(Kind.B, 0, 0), 3, 5)


def test_the_grid_draws_fractions_of_a_unit_and_leaves_out_what_costs_nothing() -> None:
    lists = [parse("F0.0 I0.0 W0.0")]
    rows = render(simulate(lists, Placement(1), cost_forward=0.5, cost_input=1.5, cost_weight=0.0)).splitlines()
    assert rows[0] == "ranks 1, stages a rank 1 (round), column 0.5"
    assert rows[2] == "0| F0.0 I0.0 -    -"


# Planted faults


def test_a_deadlock_is_reported_with_the_ranks_and_actions_that_wait_for_each_other() -> None:
    lists = [parse("F0.0 B0.0 F0.1 B0.1"), parse("F1.0 F1.1 B1.0 B1.1")]
    with pytest.raises(ScheduleError) as error:
        simulate(lists, Placement(2))
    assert str(error.value) == (
        "deadlock: rank 0 stands at B0.0 and waits for B1.0, which rank 1 has not run; "
        "rank 1 stands at F1.1 and waits for F0.1, which rank 0 has not run."
    )


def test_a_deadlock_names_only_the_ranks_in_the_circle_and_split_parts_by_their_letter() -> None:
    texts = ("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1", "F1.0 I1.0 F1.1 W1.0 I1.1 W1.1", "F2.0 F2.1 I2.0 I2.1 W2.0 W2.1")
    lists = [parse(text) for text in texts]  # rank 0 is stuck as well, but nobody waits for it
    with pytest.raises(ScheduleError) as error:
        simulate(lists, Placement(3))
    assert str(error.value) == (
        "deadlock: rank 1 stands at I1.0 and waits for I2.0, which rank 2 has not run; "
        "rank 2 stands at F2.1 and waits for F1.1, which rank 1 has not run."
    )


def test_a_rank_that_waits_for_its_own_later_action_is_reported() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 stands at W0.0 and waits for I0.0, which comes later in its own list"):
        simulate([parse("F0.0 W0.0 I0.0")], Placement(1))


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (["F0.0 B0.0"], "1 schedules for a pipeline of 2 ranks"),
        (["F0.0 B0.0", "F1.0"], r"B1.0 \(or I1.0 and W1.0\) is missing from rank 1"),
        (["F0.0 B0.0", "B1.0"], "F1.0 is missing from rank 1"),
        (["F0.0 I0.0", "F1.0 B1.0"], "W0.0 is missing from rank 0"),
        (["F0.0 W0.0", "F1.0 B1.0"], "I0.0 is missing from rank 0"),
        (["F0.0 F0.0 B0.0", "F1.0 B1.0"], "rank 0 runs F0.0 twice"),
        (["F0.0 B0.0 W0.0", "F1.0 B1.0"], "rank 0 runs B0.0 and also W0.0"),
        (["F0.0 B0.0 F1.1", "F1.0 B1.0"], r"rank 0 runs F1.1, which is foreign to it: it holds stages \(0,\)"),
        (["F0.0 B0.0", "F1.0 B1.0 F2.0"], "rank 1 runs F2.0, which is foreign"),
    ],
)
def test_missing_repeated_and_foreign_actions_are_named_with_their_rank(lists: list[str], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        simulate([parse(text) for text in lists], Placement(2))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zbh1", "zbv"])
def test_taking_away_or_repeating_any_single_action_is_found(name: ScheduleName) -> None:
    placement = placement_for(name, 3, 1 if name in ("1f1b", "zbh1") else 2)
    lists = lists_of(name, placement, 4)
    for rank, actions in enumerate(lists):
        for at, action in enumerate(actions):
            for planted in ([*actions[:at], *actions[at + 1 :]], [*actions, action]):
                with pytest.raises(ScheduleError, match=rf"{action}\b.*rank {rank}|rank {rank} runs {action} twice"):
                    check_complete([*lists[:rank], planted, *lists[rank + 1 :]], placement)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbh1", "zbv"])
def test_a_swap_is_found_wherever_the_order_forces_it(name: ScheduleName) -> None:
    placement = placement_for(name, 3, 1 if name in ("1f1b", "zbh1") else 2)
    lists = lists_of(name, placement, 4)
    for rank, actions in enumerate(lists):
        for stage in placement.stages_of(rank):
            for m in range(4):
                backward = next(at for at, a in enumerate(actions) if a[1:] == (stage, m) and a.kind in (Kind.B, Kind.I))
                forward = actions.index(Action(Kind.F, stage, m))
                planted = list(actions)
                planted[forward], planted[backward] = actions[backward], actions[forward]
                with pytest.raises(ScheduleError, match=rf"deadlock: .*{actions[backward]}"):
                    simulate([*lists[:rank], planted, *lists[rank + 1 :]], placement)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in GRIDS:
        golden_path, golden_text = grid_of(*case)
        golden_path.write_text(golden_text)
