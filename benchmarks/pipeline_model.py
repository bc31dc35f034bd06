"""A pipeline of transformer blocks on this GPU, for the benchmarks of the executor."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.executor import PipelineExecutor, Step
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.schedule import Placement, placement_for
from lightning_megatron.pipeline.stage import cut_to_stages


class Block(nn.Module):
    """A transformer block: ``[S, B, H] -> [S, B, H]``."""

    def __init__(self, size: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size, **options), nn.LayerNorm(size, **options)
        self.qkv, self.out = nn.Linear(size, 3 * size, **options), nn.Linear(size, size, **options)
        self.up, self.down = nn.Linear(size, 4 * size, **options), nn.Linear(4 * size, size, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape out."""
        length, batch, _ = hidden.shape
        q, k, v = (x.view(length, batch, self.heads, -1).permute(1, 2, 0, 3) for x in self.qkv(self.norm1(hidden)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Model(PipelineModel):
    """Blocks between two small ends."""

    def __init__(self, layers: int, size: int, **options: Any) -> None:
        super().__init__()
        self.inlet = nn.Linear(size, size, **options)
        self.layers = nn.ModuleList(Block(size, size // 128, **options) for _ in range(layers))

    def first(self, value: Tensor) -> Tensor:
        """Same shape out."""
        return self.inlet(value)

    def last(self, hidden: Tensor) -> Tensor:
        """A loss."""
        return hidden.float().square().mean()


@dataclass
class Pipeline:
    """This rank's stages and what runs them."""

    name: str
    mesh: Mesh
    placement: Placement
    parts: dict[int, StagePart]
    model: Model
    executor: PipelineExecutor
    num_microbatches: int
    step: Step

    def run(self) -> None:
        """One step: forwards and backwards of all micro-batches."""
        self.executor.run(self.name, self.step, num_microbatches=self.num_microbatches)


def make_pipeline(
    name: Any,
    num_ranks: int,
    stages_per_rank: int,
    *,
    num_microbatches: int,
    layers: int,
    size: int,
    tokens: int,
) -> Pipeline:
    """A pipeline in bf16 under a schedule; hidden states are ``[tokens, 1, size]``, gradients are there already."""
    device = torch.device("cuda", torch.cuda.current_device())
    placement = placement_for(name, num_ranks, stages_per_rank)
    mesh = Mesh.create(Parallelism(pp=num_ranks, vpp=stages_per_rank, placement=placement.style), device=device)
    num_stages = placement.num_stages
    model = Model(layers, size, device=device, dtype=torch.bfloat16)
    each = layers // num_stages
    parts = {s: StagePart(s, num_stages, tuple(range(s * each, s * each + each))) for s in placement.stages_of(mesh.pp.rank)}
    cut_to_stages(model, list(parts.values()), ends_apart=placement.style != "v")
    executor = PipelineExecutor(mesh, placement, parts=parts, context=nullcontext, model=model)
    model._stage_runner = executor.runner
    data = torch.randn(tokens, 1, size, device=device, dtype=torch.bfloat16)
    names = [("cost", m) for m in range(num_microbatches)]
    step = Step("training_step", lambda m, last: model(data), lambda m, out: out, ["same"] * num_microbatches, names)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return Pipeline(name, mesh, placement, parts, model, executor, num_microbatches, step)
