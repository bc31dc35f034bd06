"""Which buckets may be reduced during a backward, and in which order: plain numbers, no tensors.

Note [When a gradient is final]
A parameter's gradient is final after its last arrival in the last backward that reaches it in the step. Only the caller
knows that backward, so it says so: ``arm`` before it, ``finish`` after it. In between, arrivals are counted. A parameter may
arrive several times from there on (used inside and outside a reentrant checkpoint; weight gradients of earlier
micro-batches, where a schedule splits the backward), so the count that makes it final is taken from the first time that
this pattern of arrivals is seen, which launches nothing before ``finish``. A parameter that never arrives is final at
``finish``. Buckets are launched in their own order, each after all before it: hooks may fire in another order on another
rank, or not at all, and collectives must be issued in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence


class Readiness:
    """Tracks one optimizer step.

    Args:
        members: the parameters (any integers) of each bucket, in the order in which buckets are launched.
    """

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        self._members = [list(bucket) for bucket in members]
        self._bucket_of = {param: index for index, bucket in enumerate(self._members) for param in bucket}
        self._expected: dict[tuple[Hashable, int], int] = {}
        self.reset()

    def reset(self) -> None:
        """Start a new step: nothing is armed, nothing launched."""
        self._missing = [len(bucket) for bucket in self._members]
        self._armed: dict[int, Hashable] = {}
        self._final: set[int] = set()
        self._count: dict[int, int] = {}
        self._next = 0

    def is_launched(self, param: int) -> bool:
        """Whether the parameter's bucket has been launched in this step."""
        return self._bucket_of[param] < self._next

    def arm(self, params: Iterable[int], pattern: Hashable = None) -> None:
        """The next backward that reaches these parameters is their last one in the step.

        Args:
            params: the parameters.
            pattern: whatever the number of arrivals may depend on.
        """
        self._armed.update(dict.fromkeys(params, pattern))

    def arrived(self, param: int) -> list[int]:
        """A gradient was added; returns the buckets to launch now, in order."""
        if param not in self._armed:
            return []
        self._count[param] = self._count.get(param, 0) + 1
        expected = self._expected.get((self._armed[param], param))
        return self._finalize([param]) if self._count[param] == expected else []

    def finish(self, params: Iterable[int]) -> list[int]:
        """No more gradients of these parameters come in this step; returns the buckets to launch now, in order."""
        params = list(params)
        for param in params:
            if param in self._count:
                key = (self._armed[param], param)
                self._expected[key] = max(self._count[param], self._expected.get(key, 0))
        return self._finalize(params)

    def finish_all(self) -> list[int]:
        """No more gradients come at all; returns the buckets that are left, in order."""
        return self.finish(self._bucket_of) + self._launchable()

    def _finalize(self, params: Iterable[int]) -> list[int]:
        for param in params:
            if param not in self._final:
                self._final.add(param)
                self._missing[self._bucket_of[param]] -= 1
        return self._launchable()

    def _launchable(self) -> list[int]:
        first = self._next
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return list(range(first, self._next))


class StageOrder:
    """Turns the beginnings and ends of stages' last backwards into parameters to arm and to finish.

    Args:
        stages: the parameters (any integers) of each pipeline stage on this rank. One of several stages is final with the
            last of them, whichever that is.
    """

    def __init__(self, stages: Mapping[int, Sequence[int]]) -> None:
        self._stages = {stage: list(params) for stage, params in stages.items()}
        self._open: dict[int, set[int]] = {}
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self._open = {}
        for stage, params in self._stages.items():
            for param in params:
                self._open.setdefault(param, set()).add(stage)

    def begin(self, stage: int) -> list[int]:
        """The stage's last backward begins: the parameters that no other stage will reach."""
        return [param for param in self._stages.get(stage, ()) if self._open[param] == {stage}]

    def end(self, stage: int) -> list[int]:
        """The stage's last backward is done: the parameters that no stage will reach any more."""
        done = []
        for param in self._stages.get(stage, ()):
            self._open[param].discard(stage)
            if not self._open[param]:
                done.append(param)
        return done
