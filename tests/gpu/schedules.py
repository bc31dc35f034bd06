"""Every schedule on CUDA over NCCL against a plain loop, then what a step costs. Started by torchrun; prints a line a case.

torchrun --nproc-per-node 2 tests/gpu/schedules.py
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_megatron.mesh import Mesh
from lightning_megatron.parallelism import Parallelism
from lightning_megatron.pipeline.executor import PipelineExecutor, Step
from lightning_megatron.pipeline.model import PipelineModel, StagePart
from lightning_megatron.pipeline.schedule import placement_for
from lightning_megatron.pipeline.stage import cut_to_stages
from tests.parity.test_schedules import LAYOUTS, VARIANTS, plain_loop, train

EPOCHS = 3  # shapes are known from the second on


def parity(world_size: int) -> int:
    """Number of layouts of this world size that do not train like the loop."""
    failed = 0
    for variant in ("tied", "first stage frozen"):
        reference, _ = plain_loop(VARIANTS[variant], EPOCHS)
        expected = {name: value.detach() for name, value in reference.named_parameters()}
        for name, layout in LAYOUTS.items():
            if layout["pp"] != world_size:
                continue
            faulthandler.dump_traceback_later(40, exit=True)
            found = train(VARIANTS[variant], layout, max_epochs=EPOCHS, accelerator="gpu", devices=world_size).final
            error = max(float((found[key] - value).abs().max() / value.abs().max()) for key, value in expected.items())
            failed += error > 1e-9
            if dist.get_rank() == 0:
                print(f"{'FAILED' if error > 1e-9 else 'passed'} {variant:20s} {name:22s} {error:.1e}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return failed


class Block(nn.Module):
    """A transformer block: ``[S, B, H] -> [S, B, H]``."""

    def __init__(self, size: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size, **options), nn.LayerNorm(size, **options)
        self.qkv, self.out = nn.Linear(size, 3 * size, **options), nn.Linear(size, size, **options)
        self.up, self.down = nn.Linear(size, 4 * size, **options), nn.Linear(4 * size, size, **options)

    def forward(self, hidden: Tensor) -> Tensor:
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
        return self.inlet(value)

    def last(self, hidden: Tensor) -> Tensor:
        return hidden.float().square().mean()


def cost(name: Any, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> None:
    """Print the time and the peak memory of a step of 8 blocks of width 4096 on 4096 tokens a micro-batch."""
    device = torch.device("cuda", torch.cuda.current_device())
    placement = placement_for(name, num_ranks, stages_per_rank)
    mesh = Mesh.create(Parallelism(pp=num_ranks, vpp=stages_per_rank, placement=placement.style), device=device)
    num_stages, layers = placement.num_stages, 8
    model = Model(layers, 4096, device=device, dtype=torch.bfloat16)
    each = layers // num_stages
    parts = {s: StagePart(s, num_stages, tuple(range(s * each, s * each + each))) for s in placement.stages_of(mesh.pp.rank)}
    cut_to_stages(model, list(parts.values()), ends_apart=placement.style != "v")
    executor = PipelineExecutor(mesh, placement, parts=parts, context=nullcontext, model=model)
    model._stage_runner = executor.runner
    data = torch.randn(4096, 1, 4096, device=device, dtype=torch.bfloat16)
    names = [("cost", m) for m in range(num_microbatches)]
    step = Step("training_step", lambda m, last: model(data), lambda m, out: out, ["same"] * num_microbatches, names)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    times = []
    for index in range(6):
        torch.cuda.synchronize()
        dist.barrier()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        start = time.monotonic()
        executor.run(name, step, num_microbatches=num_microbatches)
        host = time.monotonic() - start
        torch.cuda.synchronize()
        times.append((time.monotonic() - start, host))
    best = min(times[2:])
    gib = (torch.cuda.max_memory_allocated() - base) / 2**30
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, (mesh.pp.rank, round(best[0] * 1000, 1), round(best[1] * 1000, 1), round(gib, 2)))
    if dist.get_rank() == 0:
        print(f"{name} M={num_microbatches} (pp rank, step ms, host ms, activations GiB): {sorted(gathered)}", flush=True)


def main() -> None:
    """Parity, then costs."""
    world_size = int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    failed = parity(world_size)
    faulthandler.dump_traceback_later(60, exit=True)
    for name, stages in (("1f1b", 1), ("zbh1", 1), ("interleaved", 2), ("zbv", 2)):
        for num_microbatches in (4, 16):
            cost(name, world_size, stages, num_microbatches)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
