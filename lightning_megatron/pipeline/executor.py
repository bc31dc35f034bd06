"""Runs a schedule: forwards, backwards and what travels between them. The only pipeline file that touches autograd."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatron.comm import broadcast_object
from lightning_megatron.mesh import Mesh
from lightning_megatron.pipeline.backward_split import SplitBackward
from lightning_megatron.pipeline.capture import StageDone, StageJob, StageRunner
from lightning_megatron.pipeline.choice import Schedule
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.p2p import P2P, HiddenMeta
from lightning_megatron.pipeline.plan import RunPlan, run_plan
from lightning_megatron.pipeline.schedule import Action, Kind, Placement

# A product whose output is more than this many times as wide as the stage's hidden state (logits) makes its weight gradient
# at once: see SplitBackward. The first product of a gated MLP is up to 16 times as wide.
_WIDEST = 16


@dataclass(frozen=True)
class Step:
    """One step of the user's as the executor runs it.

    Args:
        name: the method, for messages: ``training_step``.
        run: calls it on a micro-batch: ``run(microbatch, is_last_stage) -> output``.
        loss: turns a micro-batch's output into the scalar to differentiate; ``None`` runs forwards only, and a ``None``
            result means that this micro-batch has no gradient.
        signatures: for each micro-batch, what the shapes of hidden states depend on.
        seed_names: for each micro-batch, the names that its random numbers are seeded by.
    """

    name: str
    run: Callable[[int, bool], Any]
    loss: Callable[[int, Any], Tensor | None] | None
    signatures: Sequence[Hashable]
    seed_names: Sequence[tuple[object, ...]]


@dataclass(frozen=True)
class StageHooks:
    """What the executor tells its caller about each of this rank's stages, once a run that has backwards.

    Args:
        on_last_backward: called with the stage before its last B or I.
        on_stage_grads_ready: called with the stage after its last B or W: the run adds nothing more to its gradients.
            Whether another run of the same optimizer step will is for the caller to know.
    """

    on_last_backward: Callable[[int], None] | None = None
    on_stage_grads_ready: Callable[[int], None] | None = None


@dataclass
class _Forward:
    """What a forward leaves for its backward. Of its output only the edges of the graph, so that the storage can go."""

    inputs: list[Tensor] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    loss: Tensor | None = None
    width: int = 0  # elements of the largest hidden tensor


class PipelineExecutor:
    """Executes schedules on this rank's stages.

    Args:
        mesh: the job's axes.
        placement: which rank holds which stage.
        parts: this rank's stages by global index.
        context: entered around each forward (autocast).
        model: the user's model when it is pipelined; ``None`` runs the user's step whole, as the only stage.
    """

    def __init__(
        self,
        mesh: Mesh,
        placement: Placement,
        *,
        parts: dict[int, StagePart],
        context: Callable[[], AbstractContextManager[None]],
        model: PipelineModel | None = None,
    ) -> None:
        self._mesh, self._placement, self._parts, self._context = mesh, placement, parts, context
        self._p2p = P2P(mesh, placement, {})
        self.runner = StageRunner(model, mesh=mesh, outside=self.call_model) if model is not None else None
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._weights: dict[tuple[int, int], SplitBackward] = {}
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def run(self, schedule: Schedule, step: Step, *, num_microbatches: int, hooks: StageHooks = StageHooks()) -> list[Any]:
        """Run one step under a schedule.

        Args:
            schedule: a name that ``schedule_for`` knows, or the user's own, see ``choice.Schedule``.
            step: the user's step.
            num_microbatches: M.
            hooks: what to call when.

        Returns:
            The outputs of the user's step by micro-batch, on the rank of the last stage; an empty list on the others.

        Raises:
            ScheduleError: a schedule of the user's own cannot run; nothing has been sent yet.
        """
        plan = run_plan(schedule, self._mesh.pp.rank, placement=self._placement, num_microbatches=num_microbatches)
        self._p2p.begin(plan, step.signatures)
        outputs: dict[int, Any] = {}
        for issued, action in enumerate(plan.actions):
            self._p2p.before_action(issued)
            self._run_action(action, step, outputs, _due(hooks, plan, issued))
        self._p2p.drain()
        self._calls.clear()
        return [outputs[m] for m in sorted(outputs)]

    def _run_action(self, action: Action, step: Step, outputs: dict[int, Any], due: StageHooks) -> None:
        key = (action.stage, action.microbatch)
        if due.on_last_backward is not None:
            due.on_last_backward(action.stage)
        if action.kind is Kind.F:
            self._forward(action, step, outputs)
        elif action.kind is Kind.W:
            self._weights.pop(key).run_weight_part()
        else:
            self._backward(action)
        if due.on_stage_grads_ready is not None:
            due.on_stage_grads_ready(action.stage)

    def _forward(self, action: Action, step: Step, outputs: dict[int, Any]) -> None:
        part, m = self._parts[action.stage], action.microbatch
        hidden = None if part.is_first else self._p2p.receive_hidden(part.stage, m)
        job = StageJob(part, m, hidden, tuple(step.seed_names[m]))
        record = _Forward(inputs=[] if hidden is None else _float_leaves(hidden))
        with self._context():
            if part.is_last or m not in self._calls:
                result = self._run_step(job, step)
            else:
                assert self.runner is not None
                job.output = self.runner.run(job, *self._calls[m])
        if not part.is_last:
            self._p2p.send_hidden(part.stage, m, job.output)  # first of all: the next stage waits for it
            leaves = _float_leaves(job.output)
            record.edges = [get_gradient_edge(leaf) if leaf.requires_grad else None for leaf in leaves]
            record.width = max((leaf.numel() for leaf in leaves), default=0)
        else:
            record.loss = step.loss(m, result) if step.loss is not None else None
            record.width = max((leaf.numel() for leaf in record.inputs), default=0)
            outputs[m] = _detached(result)
        if step.loss is not None:
            self._forwards[part.stage, m] = record

    def _run_step(self, job: StageJob, step: Step) -> Any:
        """Call the user's step for this stage; its output on the last one, ``None`` on the others."""
        runner = self.runner
        if runner is None:
            return step.run(job.microbatch, True)
        runner.job, runner.step_name = job, step.name
        try:
            result = step.run(job.microbatch, job.part.is_last)
        except StageDone:
            assert job.named is not None
            self._calls[job.microbatch] = (job.inputs, job.named)
            return None
        finally:
            runner.job = None
        runner.check(job)
        return result

    def _backward(self, action: Action) -> None:
        """B, or I: its W then finds what it needs in ``_weights``."""
        part, m = self._parts[action.stage], action.microbatch
        record = self._forwards.pop((part.stage, m))
        roots = self._roots(part, m, record)
        if action.kind is Kind.I:
            split = self._weights[part.stage, m] = SplitBackward(roots, record.inputs, widest=_WIDEST * record.width)
            roots.clear()
            split.run_input_part()
        elif roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        if not part.is_first:
            grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in record.inputs]
            self._p2p.send_grads(part.stage, m, [grad.to(leaf.dtype) for grad, leaf in zip(grads, record.inputs, strict=True)])

    def _roots(self, part: StagePart, microbatch: int, record: _Forward) -> list[tuple[GradientEdge, Tensor]]:
        """Where the backward of a forward begins, with the gradients that come in there; nothing is left in the record."""
        edges, loss = record.edges, record.loss
        record.edges, record.loss = [], None
        if part.is_last:
            if loss is not None and not loss.requires_grad:
                raise RuntimeError(
                    f"{self._mesh.coordinate} the loss does not require grad: nothing that it was computed from is trained, or "
                    f"it was detached or computed under torch.no_grad()."
                )
            return [] if loss is None else [(get_gradient_edge(loss), torch.ones_like(loss))]
        grads = self._p2p.receive_grads(part.stage, microbatch)
        return [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None]

    def call_model(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call the model outside of a step: all ranks of a pipeline together, without gradients; each gets the output.

        Raises:
            RuntimeError: gradients are on (``loss.backward()`` could not reach the other stages).
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._mesh.coordinate} the pipelined model was called outside of training_step, validation_step, test_step "
                f"and predict_step with gradients enabled. Wrap the call in torch.no_grad(), on every rank."
            )
        runner = self.runner
        assert runner is not None
        plan = run_plan("forward_only", self._mesh.pp.rank, placement=self._placement, num_microbatches=1)
        self._p2p.begin(plan, [("call", signature_of((inputs, named)))])
        output = None
        for issued, action in enumerate(plan.actions):
            self._p2p.before_action(issued)
            part = self._parts[action.stage]
            hidden = None if part.is_first else self._p2p.receive_hidden(part.stage, 0)
            with self._context():
                result = runner.run(StageJob(part, 0, hidden, ("call",)), inputs, named)
            if part.is_last:
                output = result
            else:
                self._p2p.send_hidden(part.stage, 0, result)
        self._p2p.drain()
        return broadcast_output(output, self._mesh, self._placement)


def _due(hooks: StageHooks, plan: RunPlan, index: int) -> StageHooks:
    """The hooks that an action is to call."""
    stage = plan.actions[index].stage
    last, ready = plan.last_backward.get(stage) == index, plan.last_gradient.get(stage) == index
    return StageHooks(hooks.on_last_backward if last else None, hooks.on_stage_grads_ready if ready else None)


def broadcast_output(output: Any, mesh: Mesh, placement: Placement) -> Any:
    """Send the last stage's output (a pytree) to every rank of its pipeline. Tensors come back on the mesh's device."""
    source = placement.last_rank
    is_source = mesh.pp.rank == source

    def moved(value: Any, device: torch.device) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().to(device), value)

    received = broadcast_object(moved(output, torch.device("cpu")) if is_source else None, mesh.pp, source)
    return output if is_source else moved(received, mesh.device)


def signature_of(batch: Any) -> Hashable:
    """What the shapes of hidden states may depend on: shape and dtype of every tensor of a batch."""
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    forms = tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return forms, str(spec)


def _float_leaves(hidden: Any) -> list[Tensor]:
    if isinstance(hidden, Tensor):
        return [hidden] if hidden.is_floating_point() else []
    _, leaves = HiddenMeta.of(hidden)
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _detached(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda leaf: leaf.detach(), result)
