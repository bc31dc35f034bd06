"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2), with hysteresis."""

from __future__ import annotations

from typing import Any


class DynamicLossScale:
    """The largest power of two that fp16 gradients seem to bear.

    After ``growth_interval`` steps without an overflow the scale is multiplied by ``growth_factor``. An overflow, whose step
    is skipped, uses up one of ``hysteresis`` lives, which come back with the next growth; without any left, each overflow
    multiplies the scale by ``backoff_factor``. All ranks see the same overflows, so they hold the same scale.

    Args:
        init_scale: the first scale.
        growth_factor: at least 1.
        backoff_factor: between 0 and 1.
        growth_interval: steps (optimizer steps in a row that were not skipped).
        hysteresis: overflows until the scale is lowered for the first time.
        min_scale: it is never lowered below. A gradient that is not finite then is no overflow of scaling.

    Raises:
        ValueError: a value out of range, by name.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
    ) -> None:
        rules = {
            "init_scale": (init_scale, init_scale >= min_scale, f"at least min_scale={min_scale}"),
            "growth_factor": (growth_factor, growth_factor >= 1, "1 or more"),
            "backoff_factor": (backoff_factor, 0 < backoff_factor < 1, "between 0 and 1"),
            "growth_interval": (growth_interval, growth_interval >= 1, "1 or more"),
            "hysteresis": (hysteresis, hysteresis >= 1, "1 or more"),
            "min_scale": (min_scale, min_scale > 0, "more than 0"),
        }
        for name, (value, holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name}={value} must be {rule}.")
        self.scale, self.min_scale = float(init_scale), float(min_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._good_steps, self._lives = 0, hysteresis

    def update(self, *, overflow: bool) -> None:
        """Learn from a step."""
        if overflow:
            self._good_steps = 0
            self._lives = max(0, self._lives - 1)
            if self._lives == 0:
                self.scale = max(self.scale * self._backoff_factor, self.min_scale)
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps, self._lives = 0, self._hysteresis
            self.scale *= self._growth_factor

    def state_dict(self) -> dict[str, Any]:
        """What changes, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps, "lives": self._lives}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.scale, self._good_steps, self._lives = float(state["scale"]), int(state["good_steps"]), int(state["lives"])
