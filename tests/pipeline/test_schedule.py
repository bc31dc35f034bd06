"""Claims about single schedules and about all of them: order, bubble, memory, what is refused. No process group is needed.

Unit costs here: a forward takes 1, a whole backward 2, and its input and weight parts 1 each.
"""

import pytest

from lightning_megatron.pipeline.schedule import (
    Action,
    Kind,
    Placement,
    ScheduleName,
    forward_only,
    gpipe,
    interleaved,
    legal_group_size,
    nearest_legal_microbatches,
    one_f_one_b,
    placement_for,
    schedule_for,
    zbh1,
    zbv,
)
from lightning_megatron.pipeline.simulate import Report, ScheduleError, simulate

RANKS = range(1, 9)
MICROBATCHES = range(1, 33)
SOME_MICROBATCHES = (1, 2, 3, 7, 8, 9, 17, 32)


def report_of(name: ScheduleName, placement: Placement, num_microbatches: int, **costs: float) -> Report:
    ranks = range(placement.num_ranks)
    lists = [schedule_for(name, rank=r, placement=placement, num_microbatches=num_microbatches) for r in ranks]
    return simulate(lists, placement, **costs)


def kinds_and_places(text: str) -> list[Action]:
    return [Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in text.split()]


# Placement


def test_stages_are_dealt_round_the_ranks() -> None:
    placement = Placement(4, 3)
    assert [placement.rank_of(stage) for stage in range(12)] == [0, 1, 2, 3] * 3
    assert placement.stages_of(1) == (1, 5, 9)


def test_a_v_goes_down_the_ranks_and_back_up() -> None:
    placement = Placement(4, 2, "v")
    assert [placement.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [placement.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize(
    ("sizes", "said"), [((0, 1), "0 ranks"), ((2, 0), "0 stages"), ((4, 3, "v"), "2 stages a rank, not 3")]
)
def test_an_impossible_placement_is_refused_with_its_numbers(sizes: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Placement(*sizes)


def test_each_schedule_gets_the_placement_that_it_wants() -> None:
    assert placement_for("zbv", 4, 2).style == "v"
    assert placement_for("interleaved", 4, 2).style == "round"


def test_an_action_prints_as_its_kind_stage_and_microbatch() -> None:
    assert str(Action(Kind.F, 3, 0)) == "F3.0"
    assert f"{Action(Kind.W, 11, 25)}" == "W11.25"


# 1F1B


def test_1f1b_of_a_middle_stage_is_as_drawn_in_the_paper() -> None:
    assert one_f_one_b(2, 4, 4) == kinds_and_places("F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 B2.3")


@pytest.mark.parametrize("num_ranks", RANKS)
def test_1f1b_holds_no_more_than_its_distance_to_the_loss(num_ranks: int) -> None:
    for num_microbatches in MICROBATCHES:
        report = report_of("1f1b", Placement(num_ranks), num_microbatches)
        assert report.peak_in_flight == tuple(min(num_ranks - stage, num_microbatches) for stage in range(num_ranks))
        assert report.makespan == 3 * (num_microbatches + num_ranks - 1)
        assert report.bubble == (num_ranks - 1) / num_microbatches


# Interleaved 1F1B


def test_interleaved_is_as_worked_out_by_hand() -> None:
    expected = (
        "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 F0.3 B2.1 F0.4 B2.2 F2.3 B0.0 F2.4 B0.1 B0.2 B2.3 B2.4 B0.3 B0.4",
        "F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F1.3 B1.0 F1.4 B1.1 F3.3 B1.2 F3.4 B3.3 B3.4 B1.3 B1.4",
    )
    for rank in range(2):
        assert interleaved(rank, Placement(2, 2), 5) == kinds_and_places(expected[rank])


@pytest.mark.parametrize("num_ranks", RANKS)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(num_ranks: int) -> None:
    for placement in [Placement(num_ranks, num_local) for num_local in (2, 3, 4)]:
        for num_microbatches in range(num_ranks, MICROBATCHES.stop):
            report = report_of("interleaved", placement, num_microbatches)
            # A stage of a rank with V of them takes a V-th of the time, which the unit cost already is.
            useful = 3 * placement.stages_per_rank * num_microbatches
            assert report.makespan == useful + 3 * (num_ranks - 1), (placement, num_microbatches)
            assert report.bubble == 3 * (num_ranks - 1) / useful
            check_interleaved_memory(report, legal_group_size(num_ranks, num_microbatches) or 0, num_microbatches)


def check_interleaved_memory(report: Report, group_size: int, num_microbatches: int) -> None:
    num_ranks, num_local = report.placement.num_ranks, report.placement.stages_per_rank
    warmup = [2 * (num_ranks - 1 - rank) + (num_local - 1) * group_size for rank in range(num_ranks)]
    assert report.peak_in_flight == tuple(min(count + 1, num_local * num_microbatches) for count in warmup)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (3, 3), (4, 2), (4, 4), (8, 2)])
def test_every_legal_group_size_reaches_the_same_bubble(num_ranks: int, num_local: int) -> None:
    placement = Placement(num_ranks, num_local)
    cases = 0
    for num_microbatches in (num_ranks, num_ranks + 1, 14, 19, 24):
        for size in range(num_ranks, num_microbatches + 1):
            if 0 < num_microbatches % size < num_ranks:
                continue
            lists = [interleaved(rank, placement, num_microbatches, size) for rank in range(num_ranks)]
            for cost_backward in (1.0, 2.0):
                report = simulate(lists, placement, cost_backward=cost_backward)
                assert report.bubble == (num_ranks - 1) / (num_local * num_microbatches)
                check_interleaved_memory(report, size, num_microbatches)
            cases += 1
    assert cases >= 13


@pytest.mark.parametrize(("num_local", "group_size", "full_stages"), [(1, 4, 4.0), (2, 4, 5.5), (4, 4, 4.75), (2, 8, 7.5)])
def test_interleaved_memory_in_whole_stages_is_the_known_one(num_local: int, group_size: int, full_stages: float) -> None:
    placement = Placement(4, num_local)
    report = simulate([interleaved(rank, placement, 16, group_size) for rank in range(4)], placement)
    assert report.peak_in_flight[0] / num_local == full_stages


def test_the_group_size_is_the_smallest_legal_one() -> None:
    assert legal_group_size(4, 12) == 4
    assert legal_group_size(4, 14) == 5  # 14 mod 4 = 2 would stall; 14 mod 5 = 4
    assert legal_group_size(4, 9) == 5
    assert legal_group_size(4, 7) == 7
    assert legal_group_size(4, 3) is None
    for num_ranks in RANKS:
        for num_microbatches in MICROBATCHES:
            assert (legal_group_size(num_ranks, num_microbatches) is None) == (num_microbatches < num_ranks)


def in_groups_regardless(placement: Placement, rank: int, num_microbatches: int, size: int) -> list[Action]:
    """Interleaved 1F1B written anew, with no check of the group size."""
    groups = [range(at, min(at + size, num_microbatches)) for at in range(0, num_microbatches, size)]
    table = [(local, m) for group in groups for local in range(placement.stages_per_rank) for m in group]
    stages = placement.stages_of(rank)
    ahead = 2 * (placement.num_ranks - rank - 1) + (placement.stages_per_rank - 1) * size
    actions = []
    for at in range(len(table) + ahead):
        if at < len(table):
            actions.append(Action(Kind.F, stages[table[at][0]], table[at][1]))
        if at >= ahead:
            actions.append(Action(Kind.B, stages[-1 - table[at - ahead][0]], table[at - ahead][1]))
    return actions


def test_a_last_group_shorter_than_the_pipeline_stalls_or_deadlocks_so_it_is_refused() -> None:
    four, eight = Placement(4, 2), Placement(8, 2)
    legal = simulate([in_groups_regardless(four, rank, 10, 5) for rank in range(4)], four)
    short = simulate([in_groups_regardless(four, rank, 10, 4) for rank in range(4)], four)
    assert legal.bubble == 3 / 20
    assert short.bubble > 2 * legal.bubble
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate([in_groups_regardless(eight, rank, 12, 8) for rank in range(8)], eight)
    with pytest.raises(
        ValueError, match=r"group_size=4 is not legal for pp=4 and 10 .* 10 mod 4 = 2\); leave it out, or use 5"
    ):
        interleaved(0, four, 10, 4)
    for rank in range(4):
        assert interleaved(rank, four, 14) == in_groups_regardless(four, rank, 14, 5)


def test_too_few_microbatches_are_refused_with_the_numbers_the_rule_and_the_nearest_legal() -> None:
    with pytest.raises(ValueError, match=r"3 micro-batches .* pp=4 with vpp=2: at least pp .* nearest legal number is 4"):
        schedule_for("auto", rank=0, placement=Placement(4, 2), num_microbatches=3)
    assert nearest_legal_microbatches(4, 3) == (4,)
    assert nearest_legal_microbatches(4, 9) == (9,)


def test_a_short_tail_batch_falls_back_to_gpipe_only_when_not_strict_and_only_when_needed() -> None:
    placement = Placement(4, 2)
    for rank in range(4):
        tail = schedule_for("interleaved", rank=rank, placement=placement, num_microbatches=3, strict=False)
        assert tail == gpipe(rank, placement, 3)
        enough = schedule_for("auto", rank=rank, placement=placement, num_microbatches=4, strict=False)
        assert enough == interleaved(rank, placement, 4)


# All forwards, all backwards


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpipe_and_forward_only_run_with_any_number_of_microbatches_and_stages(num_ranks: int) -> None:
    placements = [Placement(num_ranks, num_local) for num_local in (1, 2, 3, 4)] + [Placement(num_ranks, 2, "v")]
    for placement in placements:
        for num_microbatches in SOME_MICROBATCHES:
            forwards = report_of("forward_only", placement, num_microbatches)
            both = report_of("gpipe", placement, num_microbatches)
            assert both.peak_in_flight == (placement.stages_per_rank * num_microbatches,) * num_ranks
            assert all(action.kind is Kind.F for timed in forwards.timeline for action, _, _ in timed)
            if placement.style == "round" and num_microbatches >= num_ranks:
                assert forwards.makespan == placement.stages_per_rank * num_microbatches + num_ranks - 1
                assert both.makespan == 3 * forwards.makespan
                assert forwards.peak_buffered[-1] <= 1


# Zero bubble: F, I and W take one unit each, so that a micro-batch is 3 units a stage


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zbh1_has_a_third_of_the_bubble_of_1f1b_at_its_memory(num_ranks: int) -> None:
    placement = Placement(num_ranks)
    for num_microbatches in MICROBATCHES:
        report = report_of("zbh1", placement, num_microbatches)
        whole = report_of("1f1b", placement, num_microbatches)
        assert report.peak_in_flight == whole.peak_in_flight
        assert max(report.peak_held) <= max(whole.peak_in_flight)
        if num_microbatches >= num_ranks:
            assert report.makespan == 3 * num_microbatches + num_ranks - 1
            assert report.bubble <= whole.bubble / 3 + 1e-12
        else:  # one micro-batch passes all ranks forth and back, the others follow it, and one W ends the step
            assert report.makespan == 2 * num_ranks + 2 * num_microbatches - 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zbv_never_idles_between_its_first_and_last_action_at_the_memory_of_1f1b(num_ranks: int) -> None:
    placement = Placement(num_ranks, 2, "v")
    for num_microbatches in MICROBATCHES:
        report = report_of("zbv", placement, num_microbatches)
        assert max(report.peak_held) <= 2 * num_ranks  # half-size stages: P whole ones, as rank 0 of 1F1B
        if num_microbatches >= num_ranks:
            # The last rank cannot start before P - 1 forwards of half a stage; nothing else is lost.
            assert report.makespan == 6 * num_microbatches + num_ranks - 1
        if num_microbatches >= 2 * num_ranks:
            assert report.idle_inside == (0.0,) * num_ranks
            assert report.bubble <= 1 / 12


@pytest.mark.parametrize("name", ["zbh1", "zbv"])
def test_split_schedules_beat_1f1b_when_their_parts_take_unequal_times_too(name: ScheduleName) -> None:
    placement = placement_for(name, 4, 2 if name == "zbv" else 1)
    whole = report_of("1f1b", Placement(4), 12)
    for costs in ({"cost_input": 1.3, "cost_weight": 0.7}, {"cost_input": 0.8, "cost_weight": 1.2}):
        assert report_of(name, placement, 12, **costs).bubble < whole.bubble / 1.5


@pytest.mark.parametrize("name", ["zbh1", "zbv"])
def test_a_weight_part_follows_its_input_part_in_the_order_of_microbatches(name: ScheduleName) -> None:
    placement = placement_for(name, 4, 2 if name == "zbv" else 1)
    for rank in range(4):
        actions = schedule_for(name, rank=rank, placement=placement, num_microbatches=9)
        for stage in placement.stages_of(rank):
            order = {kind: [a.microbatch for a in actions if a.kind is kind and a.stage == stage] for kind in Kind}
            assert order[Kind.F] == order[Kind.I] == order[Kind.W] == list(range(9))
            assert not order[Kind.B]


# Names


@pytest.mark.parametrize(
    ("name", "placement", "meant"),
    [
        ("auto", Placement(3), "1f1b"),
        ("auto", Placement(3, 2), "interleaved"),
        ("auto", Placement(3, 2, "v"), "zbv"),
        ("interleaved", Placement(3), "1f1b"),
    ],
)
def test_auto_takes_what_the_placement_asks_for(name: ScheduleName, placement: Placement, meant: ScheduleName) -> None:
    for rank in range(3):
        got = schedule_for(name, rank=rank, placement=placement, num_microbatches=6)
        assert got == schedule_for(meant, rank=rank, placement=placement, num_microbatches=6)


def test_names_lead_to_their_functions() -> None:
    one, two, vee = Placement(3), Placement(3, 2), Placement(3, 2, "v")
    assert schedule_for("1f1b", rank=1, placement=one, num_microbatches=6) == one_f_one_b(1, 3, 6)
    assert schedule_for("gpipe", rank=1, placement=two, num_microbatches=6) == gpipe(1, two, 6)
    assert schedule_for("forward_only", rank=1, placement=vee, num_microbatches=6) == forward_only(1, vee, 6)
    assert schedule_for("zbh1", rank=1, placement=one, num_microbatches=6) == zbh1(1, one, 6)
    assert schedule_for("zbv", rank=1, placement=vee, num_microbatches=6) == zbv(1, vee, 6)


@pytest.mark.parametrize(
    ("name", "placement", "num_microbatches", "said"),
    [
        ("1f1b", Placement(2, 2), 4, "one stage a rank, not 2; set vpp=1"),
        ("zbh1", Placement(2, 2), 4, "one stage a rank, not 2; set vpp=1"),
        ("zbv", Placement(2, 2), 4, "V-shaped"),
        ("interleaved", Placement(2, 2, "v"), 4, "dealt round"),
        ("auto", Placement(2), 0, "0 micro-batches: a step needs at least 1"),
        ("zb", Placement(2), 4, "'zb' is unknown: give one of auto, 1f1b, interleaved, gpipe, forward_only, zbh1, zbv"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(name: str, placement: Placement, num_microbatches: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedule_for(name, rank=0, placement=placement, num_microbatches=num_microbatches)  # type: ignore[arg-type]
