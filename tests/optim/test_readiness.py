"""Which buckets are launched when is plain data: no process group."""

from __future__ import annotations

import itertools

import pytest

from lightning_megatron.optim.readiness import Readiness, StageOrder

BUCKETS = [[0, 1], [2], [3, 4]]


def learned() -> Readiness:
    """After one armed backward in which each parameter arrived once."""
    ready = Readiness(BUCKETS)
    ready.arm(range(5))
    assert [ready.arrived(param) for param in range(5)] == [[]] * 5
    assert ready.finish_all() == [0, 1, 2]
    ready.reset()
    return ready


def test_nothing_is_launched_before_the_last_backward() -> None:
    ready = learned()
    assert [ready.arrived(param) for param in range(5)] == [[]] * 5
    assert ready.finish_all() == [0, 1, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_buckets_are_launched_in_their_order_whatever_the_order_of_arrivals(order: tuple[int, ...]) -> None:
    ready = learned()
    ready.arm(range(5))
    launched = [bucket for param in order for bucket in ready.arrived(param)]
    assert launched == [0, 1, 2]
    assert ready.finish_all() == []


def test_a_full_bucket_is_launched_at_once_if_those_before_it_are() -> None:
    ready = learned()
    ready.arm(range(5))
    assert [ready.arrived(param) for param in (2, 0, 1)] == [[], [], [0, 1]]


def test_an_unused_parameter_holds_its_bucket_and_later_ones_until_the_end() -> None:
    ready = learned()
    ready.arm(range(5))
    assert [ready.arrived(param) for param in (0, 1, 3, 4)] == [[], [0], [], []]
    assert ready.finish([2]) == [1, 2]


def test_a_parameter_that_arrives_twice_in_a_backward_is_final_the_second_time() -> None:
    ready = Readiness([[0], [1]])
    ready.arm([0, 1])
    for param in (0, 0, 1):
        assert ready.arrived(param) == []
    ready.finish_all()
    ready.reset()
    ready.arm([0, 1])
    assert [ready.arrived(param) for param in (0, 1, 0)] == [[], [], [0, 1]]


def test_more_arrivals_than_ever_before_are_remembered() -> None:
    ready = learned()
    ready.arm(range(5))
    for param in (4, 4, 3):  # held back by the buckets before
        assert ready.arrived(param) == []
    ready.finish_all()
    ready.reset()
    ready.arm(range(5))
    assert [ready.arrived(param) for param in (0, 1, 2, 3, 4, 4)] == [[], [0], [1], [], [], [2]]


def test_counts_of_one_pattern_say_nothing_about_another() -> None:
    ready = Readiness([[0]])
    for pattern, arrivals in ((2, 1), (8, 7)):
        ready.arm([0], pattern)
        assert [ready.arrived(0) for _ in range(arrivals)] == [[]] * arrivals
        assert ready.finish_all() == [0]
        ready.reset()
    ready.arm([0], 8)
    assert [ready.arrived(0) for _ in range(7)] == [[]] * 6 + [[0]]


def test_no_backward_at_all_launches_everything_once() -> None:
    ready = learned()
    assert ready.finish_all() == [0, 1, 2]
    assert ready.finish_all() == []


def test_a_parameter_of_two_stages_is_armed_for_the_last_of_them_whichever_it_is() -> None:
    for first, last in ((0, 1), (1, 0)):
        order = StageOrder({0: [7, 8], 1: [7, 9]})
        assert 7 not in order.begin(first)
        assert 7 not in order.end(first)
        assert 7 in order.begin(last)
        assert 7 in order.end(last)
