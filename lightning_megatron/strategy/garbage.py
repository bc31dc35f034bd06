"""Python's garbage collection at the same steps on all ranks.

A collection stops a rank for as long as it takes to look at every object, and with it all ranks that wait for this one.
Collected automatically, each rank stops at steps of its own; collected together, all stop at once. What is there when the
training starts (modules, imported packages) is frozen, so that a collection looks at what has come since.

Objects that refer to each other may hold tensors, and a device's memory would not last long until the next collection. So
each batch begins with a collection of the youngest objects, which are few and go at once, and every ``_MIDDLE_STEPS`` of the
next older ones.
"""

from __future__ import annotations

import gc

_MIDDLE_STEPS = 10


class GarbageCollection:
    """Automatic collection is off in training.

    Args:
        interval_steps: optimizer steps between collections; ``None`` leaves all to Python.

    Raises:
        ValueError: not positive.
    """

    def __init__(self, interval_steps: int | None) -> None:
        if interval_steps is not None and interval_steps < 1:
            raise ValueError(
                f"gc_interval_steps={interval_steps} must be 1 or more, or None to leave garbage collection to Python."
            )
        self._interval = interval_steps
        self._is_on, self._froze = False, False
        self._last: int | None = None

    def start(self) -> None:
        """Training starts. Whoever has switched collection off before keeps it off, and us out of it."""
        if self._interval is None or self._is_on or not gc.isenabled():
            return
        self._is_on, self._last = True, None
        gc.collect()
        if gc.get_freeze_count() == 0:
            gc.freeze()
            self._froze = True
        gc.disable()

    def step(self, number: int) -> None:
        """A batch begins; ``number`` optimizer steps have been taken, the same on all ranks."""
        if self._is_on and self._interval is not None:
            is_new = self._last not in (None, number)  # everything has just been collected when training starts
            gc.collect(2 if is_new and number % self._interval == 0 else 1 if is_new and number % _MIDDLE_STEPS == 0 else 0)
        self._last = number

    def pause(self) -> None:
        """Evaluation starts: it has no steps to count by."""
        if self._is_on:
            gc.enable()

    def resume(self) -> None:
        """Training goes on."""
        if self._is_on:
            gc.disable()

    def stop(self) -> None:
        """Leave everything as it was."""
        if not self._is_on:
            return
        self._is_on = False
        if self._froze:
            gc.unfreeze()
            self._froze = False
        gc.enable()
