"""A pipeline of small stages that the executor runs without a Trainer, and that tell which of their tensors are alive."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.choice import Schedule, style_for
from lightning_megatron.pipeline.executor import PipelineExecutor, StageHooks, Step
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.schedule import Placement
from lightning_megatron.pipeline.stage import cut_to_stages

H = 4


class Watch:
    """Counts live memory by kind, and the greatest count of each. A kind is a letter and a stage."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def copy(self, kind: str, value: Tensor) -> Tensor:
        """A copy whose memory is counted until it is freed, whichever tensors share it."""
        array = np.array(value.numpy())
        self.alive[kind] += 1
        self.peak[kind] = max(self.peak[kind], self.alive[kind])
        weakref.finalize(array, self._freed, kind)
        return torch.from_numpy(array)

    def _freed(self, kind: str) -> None:
        self.alive[kind] -= 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, watch: Watch, kind: str) -> Tensor:
        return watch.copy(kind, value.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class Layer(nn.Module):
    """A product and a curve. Counts: ``o`` its output, ``i`` what only I needs, ``w`` what only W needs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.watch = index, Watch()
        self.linear = nn.Linear(H, H, bias=False)
        self.pointers: list[tuple[int, int]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        x = _Copy.apply(hidden, self.watch, f"w{self.index}")
        x = _Copy.apply(self.linear(x), self.watch, f"i{self.index}")
        output: Tensor = _Copy.apply(torch.sin(x) + 1.0, self.watch, f"o{self.index}")
        self.pointers.append((hidden.data_ptr(), output.data_ptr()))
        return output


class Model(PipelineModel):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(H, H)
        self.layers = nn.ModuleList(Layer(i) for i in range(num_layers))

    def first(self, value: Tensor) -> Tensor:
        return self.inlet(value)

    def last(self, hidden: Tensor) -> Tensor:
        return hidden.square().sum()


class Pipeline:
    """This rank's part of a pipeline with a layer a stage."""

    def __init__(self, num_ranks: int, stages_per_rank: int, schedule: Schedule) -> None:
        style = style_for(schedule, num_ranks, stages_per_rank)
        parallelism = Parallelism(pp=num_ranks, vpp=stages_per_rank, placement=style)
        self.mesh = Mesh.create(parallelism, device=torch.device("cpu"))
        self.placement = Placement(num_ranks, stages_per_rank, style)
        num_stages = self.placement.num_stages
        self.model = new_model(num_stages)
        parts = {s: StagePart(s, num_stages, (s,)) for s in self.placement.stages_of(self.mesh.pp.rank)}
        cut_to_stages(self.model, list(parts.values()), ends_apart=style != "v")
        self.executor = PipelineExecutor(self.mesh, self.placement, parts=parts, context=nullcontext, model=self.model)
        self.model._stage_runner = self.executor.runner
        self.schedule = schedule
        self.layers: dict[int, Layer] = {int(name): layer for name, layer in self.model.layers.named_children()}  # type: ignore[misc]

    def run(
        self,
        num_microbatches: int,
        *,
        backward: bool = True,
        loss: Callable[[int, Tensor], Tensor | None] = lambda m, output: output,
        hooks: StageHooks | None = None,
    ) -> list[Any]:
        data = inputs(num_microbatches)
        step = Step(
            "training_step",
            run=lambda m, is_last: self.model(data[m]),
            loss=loss if backward else None,
            signatures=["same"] * num_microbatches,
            seed_names=[("test", m) for m in range(num_microbatches)],
        )
        schedule = self.schedule if backward else "forward_only"
        with torch.set_grad_enabled(backward):
            return self.executor.run(schedule, step, num_microbatches=num_microbatches, hooks=hooks or StageHooks())

    def grads(self) -> dict[str, Tensor | None]:
        return {name: param.grad for name, param in self.model.named_parameters()}


def new_model(num_layers: int) -> Model:
    torch.manual_seed(2)
    return Model(num_layers).double()


def inputs(num_microbatches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, H, generator=generator, dtype=torch.float64) for _ in range(num_microbatches)]


def whole_grads(num_layers: int, num_microbatches: int, *, skipped: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """The gradients on one process."""
    model = new_model(num_layers)
    for m, value in enumerate(inputs(num_microbatches)):
        if m not in skipped:
            model(value).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
