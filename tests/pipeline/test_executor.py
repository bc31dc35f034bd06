"""The executor without a Trainer: gradients, what is alive and when, what it tells its caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.pipeline.choice import Schedule, lists_for
from lightning_megatron.pipeline.executor import StageHooks
from lightning_megatron.pipeline.plan import hop, run_plan
from lightning_megatron.pipeline.schedule import Action, Kind, Placement, placement_for, zbh1
from lightning_megatron.pipeline.simulate import ScheduleError, simulate
from lightning_megatron.testing import run_distributed
from tests.pipeline.stages import Pipeline, inputs, new_model, whole_grads

CASES: dict[str, tuple[Schedule, int, int]] = {
    "1f1b": ("1f1b", 3, 1),
    "interleaved": ("interleaved", 2, 2),
    "gpipe": ("gpipe", 2, 1),
    "zbh1": ("zbh1", 3, 1),
    "zbv": ("zbv", 2, 2),
    "zbv of 3": ("zbv", 3, 2),
}


def assert_grads(found: list[dict[str, Any]], expected: dict[str, torch.Tensor], times: int) -> None:
    seen = set()
    for grads in found:
        for name, grad in grads.items():
            seen.add(name)
            torch.testing.assert_close(
                grad, expected[name] * times, rtol=1e-10, atol=1e-13, msg=lambda t, name=name: f"{name}: {t}"
            )
    assert seen == expected.keys()


@pytest.mark.parametrize("num_microbatches", [5, 1])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_three_runs_are_three_times_those_of_one_process(case: str, num_microbatches: int) -> None:
    schedule, num_ranks, num_local = CASES[case]

    def run() -> dict[str, Any]:
        pipeline = Pipeline(num_ranks, num_local, schedule)
        for _ in range(3):  # the first goes through the host
            pipeline.run(num_microbatches)
        return pipeline.grads()

    assert_grads(run_distributed(run, num_ranks), whole_grads(num_ranks * num_local, num_microbatches), 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_a_micro_batch_without_a_loss_adds_nothing(schedule: Schedule) -> None:
    def run() -> dict[str, Any]:
        pipeline = Pipeline(2, 1, schedule)
        pipeline.run(4, loss=lambda m, output: None if m == 2 else output)
        return pipeline.grads()

    assert_grads(run_distributed(run, 2), whole_grads(2, 4, skipped=(2,)), 1)


@pytest.mark.parametrize("case", CASES)
def test_as_much_is_alive_as_the_simulation_says(case: str) -> None:
    schedule, num_ranks, num_local = CASES[case]
    num_microbatches = 8

    def run() -> list[tuple[dict[str, int], dict[str, int]]]:
        pipeline = Pipeline(num_ranks, num_local, schedule)
        found = []
        for _ in range(2):
            pipeline.run(num_microbatches)
            watches = [layer.watch for layer in pipeline.layers.values()]
            found.append(
                ({k: v for w in watches for k, v in w.peak.items()}, {k: v for w in watches for k, v in w.alive.items()})
            )
            for watch in watches:
                watch.peak.clear()
        return found

    ranks = run_distributed(run, num_ranks)
    if num_local == 1 or schedule == "interleaved":
        ranks = ranks[::-1]  # global rank 0 holds the last stage
    placement = placement_for(schedule, num_ranks, num_local)  # type: ignore[arg-type]
    lists = lists_for(schedule, placement, num_microbatches)
    for rank, runs in enumerate(ranks):
        for peak, alive in runs:
            assert not any(alive.values()), "something is left after the run"
            for stage in placement.stages_of(rank):
                mine = [action for action in lists[rank] if action.stage == stage]
                assert peak[f"i{stage}"] == peak_of(mine, (Kind.B, Kind.I))
                assert peak[f"w{stage}"] == peak_of(mine, (Kind.B, Kind.W))
                if stage + 1 < placement.num_stages:
                    assert peak[f"o{stage}"] == most_outputs(schedule, placement, rank, stage, num_microbatches)
    if num_local == 1:
        report = simulate(lists, placement)
        assert tuple(runs[0][0][f"i{rank}"] for rank, runs in enumerate(ranks)) == report.peak_in_flight
        assert tuple(runs[0][0][f"w{rank}"] for rank, runs in enumerate(ranks)) == report.peak_held


def peak_of(actions: list[Action], releasing: tuple[Kind, Kind]) -> int:
    held = peak = 0
    for action in actions:
        held += (action.kind is Kind.F) - (action.kind in releasing)
        peak = max(peak, held)
    return peak


def most_outputs(schedule: Schedule, placement: Placement, rank: int, stage: int, num_microbatches: int) -> int:
    """Outputs of a stage that are alive at once: those under way, and those handed to the rank's own next stage."""
    plan = run_plan(schedule, rank, placement=placement, num_microbatches=num_microbatches)
    alive, peak = set(), 0
    for index, action in enumerate(plan.actions):
        alive -= {key for direction, key in plan.arrived[index] if direction == "forward"}
        if action.kind is Kind.F and action.stage == stage and hop(action, placement) is not None:
            alive.add((stage + 1, action.microbatch))
            peak = max(peak, len(alive))
        if action.stage == stage + 1 and action.kind in (Kind.B, Kind.I):
            alive.discard((stage + 1, action.microbatch))
    return peak


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zbv"])
def test_forwards_alone_keep_no_output_that_has_arrived(case: str) -> None:
    schedule, num_ranks, num_local = CASES[case]

    def run() -> list[int]:
        pipeline = Pipeline(num_ranks, num_local, schedule)
        peaks = []
        for _ in range(2):
            pipeline.run(12, backward=False)
            peaks.append(max(layer.watch.peak[f"o{i}"] for i, layer in pipeline.layers.items()))
        return peaks

    for peaks in run_distributed(run, num_ranks):
        assert max(peaks) <= 3, "of 12 outputs no more than what is under way"


def test_a_rank_hands_a_hidden_state_to_its_own_next_stage_without_a_copy() -> None:
    def run() -> list[list[tuple[int, int]]]:
        pipeline = Pipeline(2, 2, "zbv")
        pipeline.run(4)
        return [layer.pointers for layer in pipeline.layers.values()]

    lower, upper = run_distributed(run, 2)[1]  # the bottom of the V: stages 1 and 2
    assert [output for _, output in lower] == [received for received, _ in upper]


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zbv"])
def test_a_call_outside_of_a_step_returns_the_output_on_every_rank(case: str) -> None:
    schedule, num_ranks, num_local = CASES[case]

    def run() -> list[torch.Tensor]:
        pipeline = Pipeline(num_ranks, num_local, schedule)
        with torch.no_grad():
            return [pipeline.model(inputs(2)[m]) for m in (0, 1, 0)]

    model = new_model(num_ranks * num_local)
    expected = [model(inputs(2)[m]).detach() for m in (0, 1, 0)]
    for outputs in run_distributed(run, num_ranks):
        assert all(torch.equal(output, value) for output, value in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_stage_is_reported_once_before_its_last_backward_and_once_when_its_gradients_are_final(case: str) -> None:
    schedule, num_ranks, num_local = CASES[case]

    def run() -> bool:
        pipeline = Pipeline(num_ranks, num_local, schedule)
        told: list[tuple[str, int]] = []
        at_the_time = {}

        def ready(stage: int) -> None:
            told.append(("ready", stage))
            at_the_time[stage] = pipeline.layers[stage].linear.weight.grad.clone()

        pipeline.run(4, hooks=StageHooks(lambda stage: told.append(("last", stage)), ready))
        for stage, layer in pipeline.layers.items():
            assert told.index(("last", stage)) < told.index(("ready", stage))
            assert torch.equal(at_the_time[stage], layer.linear.weight.grad)
        assert len(told) == 2 * len(pipeline.layers)
        pipeline.run(4, backward=False, hooks=StageHooks(ready, ready))
        return len(told) == 2 * len(pipeline.layers)

    assert all(run_distributed(run, num_ranks))


def test_a_schedule_of_ones_own_that_cannot_run_says_so_before_anything_is_sent() -> None:
    lists = [zbh1(rank, Placement(2), 4) for rank in range(2)]
    lists[1][0], lists[1][1] = lists[1][1], lists[1][0]  # I before F

    def run() -> str:
        pipeline = Pipeline(2, 1, tuple(map(tuple, lists)))
        with pytest.raises(ScheduleError) as error:
            pipeline.run(4)
        return str(error.value)

    for message in run_distributed(run, 2):
        assert "own lists of actions" in message
        assert "rank 1 stands at I1.0 and waits for F1.0" in message
