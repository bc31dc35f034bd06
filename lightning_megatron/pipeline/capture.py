"""What the user's ``self.model(...)`` does inside a step: run this rank's stage, then unwind out of the step.

Note [Unwinding]
The user's step is one function, written for one process. On a stage that is not the last there is nothing left to do in
it once the model has been called, so the call does not return: it raises ``StageDone``, which the executor catches. It is
a ``BaseException``, so ``except Exception`` in user code does not see it. Whether the stage ran is decided by the output
that was kept, not by the exception, so a bare ``except:`` is found out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.model import PipelineModel, StagePart, run_part
from lightning_megatron.rng import derive_seed, preserved_rng, seed_default_generators


class StageDone(BaseException):
    """Unwinds out of the user's step on a stage that is not the last."""


@dataclass
class StageJob:
    """One run of the user's step: which stage it is for, what it received, and what became of it."""

    part: StagePart
    microbatch: int
    hidden: Any
    seed_names: tuple[object, ...]
    calls: int = 0
    inputs: tuple[Any, ...] = ()
    named: dict[str, Any] | None = None
    output: Any = None


class StageRunner:
    """Takes the place of a ``PipelineModel``'s own forward while a strategy runs it with ``pp > 1``.

    Args:
        model: the user's model, holding this rank's stages.
        mesh: for messages and devices.
        outside: runs the model when it is called outside of a step: ``(inputs, named) -> output`` on every rank.
    """

    def __init__(self, model: PipelineModel, *, mesh: Mesh, outside: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._model, self._mesh, self._outside = model, mesh, outside
        self.job: StageJob | None = None
        self.step_name = "training_step"

    def __call__(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the current job's stage on the arguments of the user's call."""
        job = self.job
        if job is None:
            return self._outside(inputs, named)
        job.calls += 1
        if job.calls > 1:
            raise RuntimeError(
                f"{self._mesh.coordinate} {self.step_name} called the pipelined model {job.calls} times. With pp > 1 a step "
                f"calls self.model(...) exactly once; put the inputs together in one batch."
            )
        job.inputs, job.named = inputs, named
        job.output = self.run(job, inputs, named)
        if job.part.is_last:
            return job.output
        raise StageDone

    def run(self, job: StageJob, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a job's stage; random numbers are seeded for each layer by name (see rng: Note [Seeds by name])."""
        with preserved_rng(self._mesh.device):
            return run_part(self._model, job.part, job.hidden, inputs, named, self._seeded(job.seed_names))

    def _seeded(self, names: tuple[object, ...]) -> Callable[[str], Any]:
        return _seeding(self._mesh.device, names)

    def check(self, job: StageJob) -> None:
        """Say what is wrong when a step came back without having gone through the model as it must.

        Raises:
            RuntimeError: the step returned before calling the model, or swallowed the unwinding.
        """
        where = f"{self._mesh.coordinate} {self.step_name}"
        if job.calls == 0:
            raise RuntimeError(
                f"{where} returned without calling the pipelined model. With pp > 1 every stage waits for that call: call "
                f"self.model(...) exactly once in each {self.step_name}, whatever the batch."
            )
        if not job.part.is_last:
            raise RuntimeError(
                f"{where} went on after self.model(...) on pipeline stage {job.part.stage}, which is not the last. A bare "
                f"`except:` or `except BaseException:` around the call swallowed the unwinding; catch Exception instead."
            )


@contextmanager
def whole_models_seeded(models: Sequence[PipelineModel], device: torch.device, names: tuple[object, ...]) -> Iterator[None]:
    """Inside the ``with`` block models that are whole on this rank draw the random numbers that their stages would draw.

    Args:
        models: outermost first.
        device: where they compute.
        names: what the random numbers of this run of the user's step are seeded by.
    """
    calls = count()

    def runner(model: PipelineModel) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        whole = StagePart(0, 1, tuple(range(len(model.layers))))

        def run(inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            call = next(calls)  # the first call is the only one that a pipeline allows
            with preserved_rng(device):
                return run_part(model, whole, None, inputs, named, _seeding(device, (*names, call) if call else names))

        return run

    for model in models:
        model._stage_runner = runner(model)
    try:
        yield
    finally:
        for model in models:
            model._stage_runner = None


def _seeding(device: torch.device, names: tuple[object, ...]) -> Callable[[str], Any]:
    def around(unit: str) -> Any:
        seed_default_generators(device, derive_seed(*names, unit))
        return _NOTHING

    return around


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


_NOTHING = _Nothing()
