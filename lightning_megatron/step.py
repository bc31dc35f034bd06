"""One optimizer step on one screen. Read this file first; each line names the file behind it.

Lightning calls, for every batch::

    Strategy.training_step ─► TrainingEngine.train
        split the batch                      micro_batch.py
        cut the sequences over cp            sequence_batch.py, context_parallel/layout.py
        run the schedule                     pipeline/schedule.py, pipeline/executor.py
            the user's training_step         on every stage, see pipeline/capture.py
            loss normalisation               loss.py, token_guard.py
            backward, fp32 accumulation      optim/buffers.py
        replay the logs on every rank        log_replay.py
    Strategy.backward ─► TrainingEngine.finish_gradients      on the last accumulated batch
        reduce-scatter, partial sums, norm   optim/distributed.py, optim/norm.py
    precision.clip_gradients                 precision.py
    the user's optimizer.step                on this rank's fp32 main shards
    Strategy.optimizer_step ─► DistributedOptimizer.update_parameters     all-gather
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from rich.console import Console
from torch import Tensor

from lightning_megatron.context_parallel.layout import SequenceLayout
from lightning_megatron.log_replay import LogRecorder
from lightning_megatron.loss import StepLosses
from lightning_megatron.mesh import Mesh
from lightning_megatron.metrics import MetricSync
from lightning_megatron.micro_batch import MicroBatches, batch_size_of, merge_outputs, split_batch
from lightning_megatron.optim.distributed import DistributedOptimizer
from lightning_megatron.pipeline.capture import whole_models_seeded
from lightning_megatron.pipeline.choice import Schedule, choose
from lightning_megatron.pipeline.executor import PipelineExecutor, StageHooks, Step, broadcast_output, signature_of
from lightning_megatron.pipeline.model import PipelineModel
from lightning_megatron.pipeline.plan import run_plan
from lightning_megatron.pipeline.schedule import Placement
from lightning_megatron.rng import seeded_user_rng
from lightning_megatron.sequence_batch import SequenceCutter, ShardBatch, joined
from lightning_megatron.token_guard import GuardedModels, TokenGuard


class TrainingEngine:
    """Runs the user's steps under a schedule and finishes the gradients.

    Args:
        module: the user's LightningModule.
        mesh: the job's axes.
        placement: which rank holds which stage.
        executor: runs schedules on this rank's stages.
        metrics: torchmetrics of the module, reduced over replicas.
        seed: every random number of the job is seeded by it and a name.
        schedule: the training schedule.
        micro_batch_size: samples in a micro-batch; ``None`` for the whole batch.
        num_microbatches: M instead of a size.
        shard_batch: cuts a micro-batch over context-parallel ranks, instead of the default rule.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        *,
        placement: Placement,
        executor: PipelineExecutor,
        metrics: MetricSync,
        seed: int,
        schedule: Schedule,
        micro_batch_size: int | None,
        num_microbatches: int | None,
        shard_batch: ShardBatch | None = None,
    ) -> None:
        self._module, self._mesh, self._placement, self._executor = module, mesh, placement, executor
        self._metrics, self.seed, self._schedule = metrics, seed, schedule
        self._micro_batch_size, self._num_microbatches = micro_batch_size, num_microbatches
        self._recorder = LogRecorder(module, mesh=mesh, last_stage_rank=placement.last_rank)
        self._cutter = SequenceCutter(module, mesh, shard_batch)
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._per_token: bool | None = None
        self._models = [child for child in module.modules() if isinstance(child, PipelineModel)]
        self._guarded = GuardedModels(self._models)
        self._guards: dict[int, TokenGuard] = {}
        self._has_said_schedule = False
        self.optimizers: list[DistributedOptimizer] = []
        self.scale_loss: Callable[[Tensor], Tensor] = lambda loss: loss

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last stage: where losses, logs and predictions come to be."""
        return self._placement.last_rank == self._mesh.pp.rank

    def split(self, batch: Any) -> MicroBatches:
        """Cut a batch into micro-batches; a module's own ``split_batch(batch, micro_batch_size)`` goes first."""
        if isinstance(batch, MicroBatches):
            return batch
        own: Callable[..., Any] | None = getattr(self._module, "split_batch", None)
        if own is not None:
            parts = list(own(batch, self._micro_batch_size))
            return MicroBatches(parts, sizes=[_samples_in(part) for part in parts])
        if self._micro_batch_size is None and self._num_microbatches is None:
            return MicroBatches([batch], sizes=[_samples_in(batch)])
        return split_batch(batch, micro_batch_size=self._micro_batch_size, num_microbatches=self._num_microbatches)

    def train(
        self, args: tuple[Any, ...], *, batch_number: int, accumulate: int, backward: bool = True, is_last: bool = True
    ) -> Any:
        """Forward and backward of one batch, gradients added to the main gradients.

        Args:
            args: what Lightning passes to ``training_step``: the batch, then ``batch_idx`` if the signature has it.
            batch_number: batches seen so far in the whole run: seeds the random numbers.
            accumulate: batches that share one optimizer step.
            backward: ``False`` runs the forwards only (a callback asked Lightning to skip the backward).
            is_last: whether this is the last batch of the optimizer step: gradients are reduced beside its backward.

        Returns:
            The batch's mean loss on every rank (0-dim), in a dict with the step's other outputs where this is the last stage.
        """
        batch, layouts = self._cutter(self.split(args[0]))
        self._say_schedule(len(batch))
        losses = StepLosses(batch.sizes, num_sharers=accumulate * self._mesh.dp_cp.size, device=self._mesh.device)
        losses.per_token = self._per_token
        loss_of = partial(self._differentiable, losses)
        step = self._step("training_step", batch, layouts, args[1:], (batch_number,), loss_of)
        hooks = self._reduction_hooks(len(batch)) if is_last else StageHooks()
        outputs = self._run(self._schedule if backward else "forward_only", step, batch, hooks)
        self._wait_parameters()  # of the step before: all have been used
        self._per_token = losses.per_token
        if self._mesh.tp.is_first:
            self._num_tokens += losses.num_tokens
        loss = self._recorder.replay(losses.mean(self._mesh.cp), losses.tokens)
        return _with_extras(loss, outputs, batch.sizes)

    def evaluate(self, name: str, args: tuple[Any, ...], *, run: int = 0) -> Any:
        """Run ``validation_step``, ``test_step`` or ``predict_step``, forwards only; its outputs put together.

        Predictions come back on every rank of the pipeline, other outputs on the last stage alone.

        Args:
            name: of the step.
            args: what Lightning passes to it: the batch, then its indices if the signature has them.
            run: each run draws its own random numbers: dropout that a prediction keeps on is to be sampled anew.
        """
        self._wait_parameters()
        batch, layouts = self._cutter(self.split(args[0]))
        position = (*args[1:], "run", run) if run else args[1:]
        step = self._step(name, batch, layouts, args[1:], position, None)
        outputs = self._run("forward_only", step, batch)
        if name == "predict_step":
            outputs = [joined(output, layout, self._mesh.cp) for output, layout in zip(outputs, layouts, strict=False)]
        merged = _merged(outputs, batch.sizes) if self.is_last_stage else None
        if name == "predict_step":
            return broadcast_output(merged, self._mesh, self._placement)
        self._recorder.replay(None, _num_tokens(outputs, self._mesh))
        return merged

    def finish_gradients(self, *, loss_scale: float | None = None, defer: bool = False) -> None:
        """Reduce the gradients over replicas, take the norm, divide by the token count; ready to clip and step.

        Args:
            loss_scale: what losses were multiplied by before the backward.
            defer: leave the division to the clipping; see ``DistributedOptimizer.finish_gradients``.
        """
        for optimizer in self.optimizers:
            optimizer.reduce_gradients()
            optimizer.finish_gradients(num_tokens=self._num_tokens, loss_scale=loss_scale, defer=defer)
        self.forget_tokens()

    def drop_gradients(self) -> None:
        """Clear the gradients of batches whose optimizer step does not come."""
        for optimizer in self.optimizers:
            optimizer.zero_gradients()
        self.forget_tokens()

    def forget_tokens(self) -> None:
        """Count the tokens of a step from zero, and let its first loss say whether they count."""
        self._num_tokens = torch.zeros_like(self._num_tokens)
        self._per_token = None

    def _differentiable(self, losses: StepLosses, microbatch: int, output: Any) -> Tensor | None:
        loss = losses.scaled(microbatch, output, self._guards[microbatch] if self._guarded.is_attached else None)
        return None if loss is None else self.scale_loss(loss)

    def _reduction_hooks(self, num_microbatches: int) -> StageHooks:
        """Start the reduction of gradients beside the backward. Those of several optimizers have no common order: later."""
        if len(self.optimizers) != 1:
            return StageHooks()
        (optimizer,) = self.optimizers
        plan = run_plan(self._schedule, self._mesh.pp.rank, placement=self._placement, num_microbatches=num_microbatches)

        def last_backward(stage: int) -> None:
            # Where weight gradients wait, how many still come depends on which micro-batches had a loss.
            if plan.last_backward[stage] == plan.last_gradient[stage]:
                optimizer.last_backward(stage)

        return StageHooks(last_backward, optimizer.backward_done)

    def _wait_parameters(self) -> None:
        for optimizer in self.optimizers:
            optimizer.wait_parameters()

    def _run(self, schedule: Schedule, step: Step, batch: MicroBatches, hooks: StageHooks | None = None) -> list[Any]:
        with self._recorder.recording(), self._metrics.in_step():
            return self._executor.run(schedule, step, num_microbatches=len(batch), hooks=hooks or StageHooks())

    def _say_schedule(self, num_microbatches: int) -> None:
        """Say once, on global rank 0, what ``schedule="auto"`` runs and why."""
        if not self._has_said_schedule and self._schedule == "auto" and self._mesh.pp.size > 1 and self._mesh.rank == 0:
            choice = choose(self._placement, num_microbatches)
            Console().print(f"schedule={choice.name}: {choice.why}.", highlight=False)
        self._has_said_schedule = True

    def _step(
        self,
        name: str,
        batch: MicroBatches,
        layouts: list[SequenceLayout | None],
        rest: tuple[Any, ...],
        position: tuple[Any, ...],
        loss: Callable[[int, Any], Tensor | None] | None,
    ) -> Step:
        method = getattr(self._module, name)
        whole = self._models if self._mesh.pp.size == 1 else []
        seed_names = [(self.seed, name, *position, m, self._mesh.dp.rank) for m in range(len(batch))]
        # Ranks of cp run the user's own code under the same numbers, and the model, on other tokens, under their own.
        cp_rank = (self._mesh.cp.rank,) if self._mesh.cp.size > 1 else ()
        model_names: list[tuple[object, ...]] = [(*names, *cp_rank) for names in seed_names]

        def run(microbatch: int, is_last_stage: bool) -> Any:
            self._recorder.begin(microbatch, batch.sizes[microbatch], keep=is_last_stage)
            # On the rank of the last stage an earlier stage's run of the step comes on top of the one that counts.
            discard = self._metrics.discarded() if self.is_last_stage and not is_last_stage else nullcontext()
            names, device = seed_names[microbatch], self._mesh.device
            self._guards[microbatch] = guard = TokenGuard()
            with (
                self._guarded.guarding(guard),
                discard,
                seeded_user_rng(device, *names, "step"),
                whole_models_seeded(whole, device, model_names[microbatch]),
                self._cutter.telling(layouts[microbatch]),
            ):
                return method(batch[microbatch], *rest)

        signatures: list[Hashable] = [(name, signature_of(microbatch)) for microbatch in batch]
        return Step(name, run, loss, signatures, model_names)


def _samples_in(batch: Any) -> int:
    """Samples in a batch; one where it holds no tensor to tell by."""
    try:
        return batch_size_of(batch)
    except ValueError:
        return 1


def _num_tokens(outputs: list[Any], mesh: Mesh) -> Tensor | None:
    """Valid tokens behind each output of a step that tells them, ``[M]``; ``None`` where it does not."""
    if mesh.cp.size == 1 or not outputs or not all(isinstance(output, dict) and "num_tokens" in output for output in outputs):
        return None
    counts = [torch.as_tensor(output["num_tokens"], device=mesh.device, dtype=torch.float64) for output in outputs]
    return torch.stack([count.reshape(()) for count in counts])


def _merged(outputs: list[Any], sizes: list[int]) -> Any:
    return outputs[0] if len(outputs) == 1 else merge_outputs(outputs, sizes)


def _with_extras(loss: Tensor, outputs: list[Any], sizes: list[int]) -> Any:
    """Lightning's form of a step output: the loss, with what else the user's step returned."""
    if not outputs or not isinstance(outputs[0], dict):
        return loss
    extras = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
    return {"loss": loss, **_merged(extras, sizes)}
