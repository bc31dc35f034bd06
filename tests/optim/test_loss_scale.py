"""The dynamic loss scale is plain arithmetic; what it does to a step is in test_nonfinite.py."""

from __future__ import annotations

import pytest

from lightning_megatron.optim.loss_scale import DynamicLossScale


def scales(scaler: DynamicLossScale, overflows: str) -> list[float]:
    seen = []
    for mark in overflows:
        scaler.update(overflow=mark == "x")
        seen.append(scaler.scale)
    return seen


def test_the_scale_grows_after_an_interval_without_overflow() -> None:
    assert scales(DynamicLossScale(4.0, growth_interval=2), "....") == [4, 8, 8, 16]


def test_an_overflow_starts_the_interval_anew() -> None:
    assert scales(DynamicLossScale(4.0, growth_interval=3), "..x...") == [4, 4, 4, 4, 4, 8]


def test_hysteresis_takes_the_first_overflows_without_lowering() -> None:
    assert scales(DynamicLossScale(16.0, hysteresis=3), "xxxxx") == [16, 16, 8, 4, 2]


def test_growth_gives_the_lives_back() -> None:
    assert scales(DynamicLossScale(4.0, growth_interval=1, hysteresis=2), "xx.xx") == [4, 2, 4, 4, 2]


def test_the_scale_stays_at_its_minimum() -> None:
    assert scales(DynamicLossScale(4.0, hysteresis=1, min_scale=2.0), "xxx") == [2, 2, 2]


def test_a_restored_scale_goes_on_as_the_saved_one() -> None:
    first = DynamicLossScale(4.0, growth_interval=3, hysteresis=2)
    scales(first, "x.")
    second = DynamicLossScale(1024.0, growth_interval=3, hysteresis=2)
    second.load_state_dict(first.state_dict())
    assert scales(second, "..x") == scales(first, "..x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0.5),
        ("growth_factor", 0.9),
        ("backoff_factor", 1.0),
        ("growth_interval", 0),
        ("hysteresis", 0),
        ("min_scale", 0.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        DynamicLossScale(**{name: value})  # type: ignore[arg-type]
