"""Peak memory of each pipeline rank against the simulator's count of activations in flight. Needs a GPU.

torchrun --no-python --nproc-per-node 4 bash tests/gpu/one_gpu_ranks.sh benchmarks/pipeline_memory.py

One unit is what a forward of one stage leaves for its backward. "measured" is the peak over what was there before the step,
less what a single forward and backward need on top of that unit, in units. It is printed for the executor as it is, which
frees an output when it has been sent, and for one that keeps outputs until their backward.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.pipeline_model import Pipeline, make_pipeline
from lightning_megatron.pipeline.choice import lists_for
from lightning_megatron.pipeline.model import layer_at
from lightning_megatron.pipeline.schedule import placement_for
from lightning_megatron.pipeline.simulate import simulate

CASES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbh1", 1), ("zbv", 2))
MICROBATCHES, LAYERS, SIZE, TOKENS = 8, 8, 2048, 4096


def one_stage(pipeline: Pipeline) -> tuple[int, int]:
    """Bytes that a forward of a middle stage leaves, and the most that its forward and backward need beyond them."""
    stage = min(pipeline.parts)
    layers = [layer_at(pipeline.model, i) for i in pipeline.parts[stage].layers]
    hidden = torch.randn(TOKENS, 1, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    left = peak = 0
    for _ in range(2):  # the first makes workspaces
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - hidden.nbytes
        out = hidden
        for layer in layers:
            out = layer(out)
        edge = torch.autograd.graph.get_gradient_edge(out)
        gradient = torch.ones_like(out)
        del out
        left = torch.cuda.memory_allocated() - before - gradient.nbytes
        torch.autograd.backward([edge], [gradient])
        del edge, gradient
        hidden.grad = None
        peak = torch.cuda.max_memory_allocated() - before
    return left, peak - left


def keep_outputs(pipeline: Pipeline) -> None:
    """Make the executor hold what it sends until the backward of it."""
    executor: Any = pipeline.executor
    kept: dict[tuple[int, int], Any] = {}
    send, backward = executor._p2p.send_hidden, executor._backward

    def send_and_keep(stage: int, microbatch: int, hidden: Any) -> None:
        kept[stage, microbatch] = hidden
        send(stage, microbatch, hidden)

    def backward_and_drop(action: Any) -> None:
        backward(action)
        kept.pop((action.stage, action.microbatch), None)

    executor._p2p.send_hidden, executor._backward = send_and_keep, backward_and_drop


def measure(name: str, num_ranks: int, stages: int, *, keep: bool) -> tuple[int, float, int]:
    """This rank's position in the pipeline, its peak in units, and the bytes of one."""
    pipeline = make_pipeline(name, num_ranks, stages, num_microbatches=MICROBATCHES, layers=LAYERS, size=SIZE, tokens=TOKENS)
    unit, beside = one_stage(pipeline)
    if keep:
        keep_outputs(pipeline)
    for index in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        if index == 2:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        pipeline.run()
        torch.cuda.synchronize()
    return pipeline.mesh.pp.rank, (torch.cuda.max_memory_allocated() - base - beside) / unit, unit


def main() -> None:
    """Print a line a schedule and rank."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    num_ranks = dist.get_world_size()
    for name, stages in CASES:
        pp_rank, freed, unit = measure(name, num_ranks, stages, keep=False)
        _, kept, _ = measure(name, num_ranks, stages, keep=True)
        gathered: list[Any] = [None] * num_ranks
        dist.all_gather_object(gathered, (pp_rank, freed, kept, unit / 2**20))
        if dist.get_rank() == 0:
            placement = placement_for(name, num_ranks, stages)
            report = simulate(lists_for(name, placement, MICROBATCHES), placement)
            for rank, own, with_outputs, mib in sorted(gathered):
                print(
                    f"{name:12s} pp rank {rank}  unit {mib:7.1f} MiB  in flight {report.peak_in_flight[rank]:2d}  "
                    f"until W {report.peak_held[rank]:2d}  measured {own:6.2f}  with outputs kept {with_outputs:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
